"""From a plain checkpoint folder to a quantized one on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import qerl
from qerl.errors import CheckpointError, ConfigError, QerlError
from qerl.formats import get_format
from qerl.formats.base import check_choices, check_finite
from qerl.metrics.files import cannot_write, is_full
from qerl.model.model_files import copy_settings
from qerl.model.spec import read_json_object
from qerl.model.tokenizer import load_tokenizer
from qerl.quantize.comparison import compare
from qerl.quantize.folding import FOLDS_FILE
from qerl.quantize.layer import QuantizedLayer
from qerl.quantize.layer_tensors import NORMS, LayerTensors, stack
from qerl.quantize.layout import pack_layout, packed_weight, quantization_config, stored_group
from qerl.quantize.partial import PartialFolder, lock_partial, read_tensors
from qerl.quantize.pipeline import Pipeline, Request
from qerl.quantize.quality import TensorQuality, summary
from qerl.quantize.recipes import get_recipe
from qerl.quantize.source import CheckpointSource
from qerl.quantize.streams import Stream
from qerl.quantize.texts import FIELDS, Text, calibration_text, report_text

QUALITY_FILE = "quality.json"
RECORD_FILE = "qerl_quantization.json"
SHARD_BYTES = 2 << 30

Progress = Callable[[int, int, str], None]
"""Called with (groups done, groups in all, name of the group)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """Which text, and how much of it."""

    name: str
    """A data set, as `qerl.data.tasks.load_rows` takes it."""
    count: int = 256
    """Sequences."""
    length: int = 2048
    """Tokens of a sequence (calibration), or at most (comparison)."""
    fields: tuple[str, ...] = FIELDS


def quantize_checkpoint(
    model_path: str | Path,
    out_dir: str | Path,
    *,
    format: str = "nvfp4",
    method: str = "rtn",
    rounding: str = "ct",
    calibration: TextRequest | None = None,
    report: TextRequest | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    activations: str = "memory",
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a quantized copy of a checkpoint folder in the layout of compressed-tensors.

    The folder appears whole. Until then `OUT_DIR.partial` holds the layers that are done, and a run that was interrupted is taken up
    after the last of them when it is started again with the same settings; its bytes are then those of a run without a break.

    Args:
        model_path: folder of a plain (unquantized) checkpoint.
        out_dir: folder to make; must not exist.
        format: a format that has a layout (`nvfp4`, `mxfp4`).
        method: one of `qerl.quantize.recipes.RECIPES`.
        rounding: named rounding of the format.
        calibration: text for the methods that need it; not used by the others.
        report: text on which the whole model is compared with the plain one; None leaves that out.
        device, dtype: where and in what type layers run.
        activations: `memory`, or `disk` to keep hidden states of the calibration text in the partial folder.
        shard_bytes: size of shards, about.
        progress: called after every group.

    Returns:
        What `quality.json` holds: settings, `tensors` (name -> shape, relative_error, sqnr_db, bytes), `total`, and `model`
        (see `comparison.compare`; None without `report`).

    Raises:
        CheckpointError: the source cannot be read, is quantized already, has a shape that the layout cannot hold; `out_dir` exists;
            an interrupted run had other settings; the disk is full.
        RunFolderError: another process is writing the same folder.
        OutputError: the folder cannot be written.
        ConfigError: unknown format or method, or a method without the text it needs.
        DataError: there is no such text, or too little of it.
        FormatError: unknown rounding, or NaN or infinity in a tensor.
    """
    device = torch.device(device)
    request = Request(format=format, method=method, rounding=rounding, device=device, dtype=dtype)
    job = _Job(Path(model_path), request, calibration, report, activations, progress)
    with lock_partial(Path(out_dir)):
        partial = PartialFolder(Path(out_dir), job.settings(shard_bytes))
        with _cleaning_up(partial):
            job.write_layers(partial)
            quality = job.write_files(partial, shard_bytes)
            partial.finish()
    return quality


class _Job:
    """One request, checked: nothing is written before all of it is known to make sense."""

    def __init__(
        self,
        folder: Path,
        request: Request,
        calibration: TextRequest | None,
        report: TextRequest | None,
        activations: str,
        progress: Progress | None,
    ):
        pack_layout(request.format)
        check_choices(get_format(request.format), "rtn", request.rounding)
        self.folder = folder
        self.request = request
        self.activations = activations
        self.progress = progress
        self.source = CheckpointSource(folder)
        recipe = get_recipe(request.method, request.format)
        _check_widths(self.source, request.format)
        self.calibration = _calibration(folder, request, calibration) if recipe.calibrated else None
        self.report = _report(folder, report) if report is not None else None
        texts = [text for text in (self.calibration, self.report) if text is not None]
        longest = max((len(sequence.ids) for text in texts for sequence in text.sequences), default=1)
        self.groups = len(list(self.source.groups()))
        self.groups_done = 0
        self.pipeline = Pipeline(self.source, request, longest=longest, on_group=self._on_group)
        self.quality: dict[str, TensorQuality] = {}
        self.comparison: dict[str, Any] | None = None

    def _on_group(self, name: str) -> None:
        self.groups_done += 1
        if self.progress is not None:
            self.progress(self.groups_done, self.groups, name)

    def settings(self, shard_bytes: int) -> dict[str, Any]:
        """Everything that the output depends on."""
        request = self.request
        return {
            "source": self.source.fingerprint(),
            "format": request.format,
            "method": request.method,
            "rounding": request.rounding,
            "calibration": None if self.calibration is None else self.calibration.record,
            "report": None if self.report is None else self.report.record,
            "device": request.device.type,
            "dtype": str(request.dtype).removeprefix("torch."),
            "shard_bytes": shard_bytes,
            "qerl": qerl.__version__,
        }

    def write_layers(self, partial: PartialFolder) -> None:
        """Quantize what is not done yet, and compare the models."""
        pipeline, keep = self.pipeline, self._keep(partial)
        calibration = None if self.calibration is None else pipeline.stream(self.calibration.sequences, keep)
        quantized, plain = [], []
        if self.report is not None:
            quantized, plain = ([pipeline.stream(self.report.sequences)] for _ in range(2))
        self._take_up(partial, [*([calibration] if calibration else []), *quantized], plain)
        done = len(partial.records)
        layers = pipeline.layers(calibration, quantized=quantized, plain=plain, first=done)
        for index, layer in enumerate(layers, start=done):
            self._commit(partial, index, layer)
            del layer  # not kept while the next one is made
        if self.report is not None:
            self.comparison = compare(plain[0], quantized[0], self.report.sequences, pipeline.head())

    def _keep(self, partial: PartialFolder) -> str | Path:
        if self.activations == "memory":
            return "device"
        return partial.activations_folder()

    def _take_up(self, partial: PartialFolder, quantized: list[Stream], plain: list[Stream]) -> None:
        """Bring the streams to where an interrupted run was."""
        for index, record in enumerate(partial.records):
            self.quality |= {name: TensorQuality.from_record(value) for name, value in record["quality"].items()}
            self.groups_done += len(self.source.spec.groups()) - 1
            if quantized or plain:
                self.pipeline.replay(index, self._stored_layer(partial, index), quantized, plain)
            self._on_group(f"layers.{index}")

    def _stored_layer(self, partial: PartialFolder, index: int) -> LayerTensors:
        """A layer that is done, from its file, in compute type."""
        tensors = {
            name: tensor.to(self.request.device) for name, tensor in read_tensors(partial.layer_file(index)).items()
        }
        fmt, prefix = self.pipeline.format, f"model.layers.{index}"
        weights, biases = {}, {}
        for shape in self.source.spec.groups():
            names = [f"model.{name}" for name in shape.part_names(index)]
            parts = [packed_weight(name, tensors, self.request.format, shape.in_features) for name in names]
            weights[shape.attribute] = fmt.dequantize(fmt.join(parts))
            if shape.bias:
                biases[shape.attribute] = stack([tensors[f"{name}.bias"] for name in names])
        norms = {key: tensors[f"{prefix}.{name}.weight"] for key, name in NORMS.items()}
        head_norms = {}
        if self.source.spec.qk_norm:
            head_norms = {key: tensors[f"{prefix}.self_attn.{key}.weight"] for key in ("q_norm", "k_norm")}
        return LayerTensors(index, weights, biases, norms, head_norms).cast(self.request.dtype)

    def _commit(self, partial: PartialFolder, index: int, layer: QuantizedLayer) -> None:
        tensors: dict[str, Tensor] = {}
        dropped: set[str] = set()
        for shape in self.source.spec.groups():
            names = [f"model.{name}" for name in shape.part_names(index)]
            tensors |= stored_group(names, layer.packed[shape.attribute])
            dropped.update(f"{name}.weight" for name in names)
            if shape.attribute in layer.biases:
                parts = layer.biases[shape.attribute].split(shape.sizes)
                tensors |= {f"{name}.bias": part for name, part in zip(names, parts, strict=True)}
        for key, tensor in layer.norms.items():
            tensors[f"model.layers.{index}.{NORMS[key]}.weight"] = tensor
        copied = {
            name: self.source.stored[name]
            for name in self.source.layer_names(index)
            if name not in dropped and name not in tensors
        }
        record = {
            "quality": {name: quality.to_record() for name, quality in layer.quality.items()},
            "searches": layer.searches,
        }
        partial.commit(tensors, copied, layer.folds, record)
        self.quality |= layer.quality

    def write_files(self, partial: PartialFolder, shard_bytes: int) -> dict[str, Any]:
        """Everything but the layers; returns what `quality.json` holds."""
        others = {name: self.source.stored[name] for name in self.source.other_names()}
        for name in others:
            _check_finite(self.source, name)
        partial.join_shards(others, shard_bytes)
        partial.join_folds(FOLDS_FILE)
        copy_settings(self.folder, partial.path, without=(QUALITY_FILE, RECORD_FILE))
        config = read_json_object(self.folder, "config.json")
        config["quantization_config"] = quantization_config(self.request.format)
        _write_json(partial.path / "config.json", config)
        settings = partial.settings
        quality = {
            "schema": 1,
            "source": self.folder.resolve().name,
            **{key: settings[key] for key in ("format", "method", "rounding", "calibration")},
            "total": summary(self.quality),
            "tensors": {name: tensor.to_dict() for name, tensor in self.quality.items()},
            "report": settings["report"],
            "model": self.comparison,
        }
        _write_json(partial.path / QUALITY_FILE, quality)
        _write_json(partial.path / RECORD_FILE, self._record(partial))
        return quality

    def _record(self, partial: PartialFolder) -> dict[str, Any]:
        """How the checkpoint was made."""
        settings, recipe = partial.settings, self.pipeline.recipe
        return {
            "schema": 1,
            **{key: settings[key] for key in ("qerl", "format", "method", "rounding", "device", "dtype")},
            "source": {"name": self.folder.resolve().name, "fingerprint": settings["source"]},
            "steps": asdict(recipe),
            "calibration": settings["calibration"],
            "folded_scales": FOLDS_FILE if recipe.fold else None,
            "clips": "The ratio of each block's scale to the one that its largest magnitude calls for was chosen by output error; the "
            "result is weight_scale itself. Shares and means are listed by group."
            if recipe.clip
            else None,
            "layers": [record["searches"] for record in partial.records],
        }


def _calibration(folder: Path, request: Request, text: TextRequest | None) -> Text:
    if text is None:
        raise ConfigError(
            "this method needs calibration text",
            got=f"method={request.method} without any",
            expected="a data set",
            remedy="Add --calibration with a JSONL file or a NAME under $QERL_DATA.",
        )
    tokenizer = load_tokenizer(folder)
    return calibration_text(text.name, tokenizer, count=text.count, length=text.length, fields=text.fields)


def _report(folder: Path, text: TextRequest) -> Text:
    return report_text(text.name, load_tokenizer(folder), count=text.count, length=text.length, fields=text.fields)


def _check_widths(source: CheckpointSource, format_name: str) -> None:
    block = get_format(format_name).block
    for layer, shape in source.groups():
        if shape.in_features % block:
            raise CheckpointError(
                f"{shape.group_name(layer)} cannot be stored in this layout",
                got=f"{shape.in_features} inputs",
                expected=f"a multiple of {block}, since the layout has no padding",
                remedy="Train from the plain checkpoint: quantizing at load pads.",
            )


def _check_finite(source: CheckpointSource, name: str, elements: int = 1 << 24) -> None:
    """Refuse NaN and infinity in a tensor that is copied, some rows at a time."""
    stored = source.stored[name]
    if not stored.dtype.startswith(("F", "BF")) or not math.prod(stored.shape):
        return
    rows = max(1, elements // max(1, math.prod(stored.shape[1:])))
    with safe_open(stored.file, framework="pt") as file:
        view = file.get_slice(name)
        for start in range(0, stored.shape[0] if stored.shape else 1, rows):
            part = (view[start : start + rows] if stored.shape else file.get_tensor(name)).float()
            check_finite(part.abs().amax(), name)


@contextmanager
def _cleaning_up(partial: PartialFolder) -> Iterator[None]:
    """What stays of a run that fails: nothing if it can never succeed, else all that is done."""
    try:
        yield
    except QerlError:
        partial.discard()
        raise
    except (OSError, SafetensorError) as error:
        refused = error.filename if isinstance(error, PermissionError) else None
        if refused and partial.path not in (Path(refused), *Path(refused).parents):
            # A file of the source.
            raise
        if not is_full(error):
            raise cannot_write(partial.path, error) from error
        raise CheckpointError(
            f"the disk is full: {partial.out} was not written",
            got=f"{len(partial.records)} layers in {partial.path}",
            remedy="Make room and repeat the command: it goes on after the last layer. Or remove that folder.",
        ) from None


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
