"""Streams a plain checkpoint through a quantizer into a quantized one, a group of projections at a time.

In memory at once: one group (q, k, v; o; gate, up; down) and one shard of output, never the model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.errors import CheckpointError, ConfigError
from qerl.formats import PackedWeight, get_format
from qerl.formats.base import check_choices
from qerl.formats.nvfp4 import BLOCK
from qerl.model.spec import GroupShape, ModelSpec, read_json_object
from qerl.model.tensor_folder import INDEX_FILE, TensorFolder
from qerl.quantize.layout import ShardWriter, quantization_config, stored_tensors
from qerl.quantize.quality import TensorQuality, measure, summary

QUALITY_FILE = "quality.json"
SHARD_BYTES = 2 << 30

# Tokenizer, chat template and generation settings; weights and the files written here are not among them.
_COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_WRITTEN = ("config.json", INDEX_FILE, QUALITY_FILE)

Progress = Callable[[int, int, str], None]
"""Called with (groups done, groups in all, name of the group)."""


def quantize_checkpoint(
    model_path: str | Path,
    out_dir: str | Path,
    *,
    format: str = "nvfp4",
    method: str = "rtn",
    rounding: str = "ct",
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a quantized copy of a checkpoint folder in the layout of compressed-tensors (see `layout`).

    The folder appears whole: it is written as `OUT_DIR.partial` and renamed. A leftover of an interrupted run under that
    name is replaced.

    Args:
        model_path: folder of a plain (unquantized) checkpoint.
        out_dir: folder to make; must not exist.
        format: `nvfp4`.
        method: `rtn`, round to nearest.
        rounding: named rounding of the format.
        shard_bytes: largest shard to write.
        progress: called after every group.

    Returns:
        What `quality.json` holds: settings, `tensors` (name -> shape, relative_error, sqnr_db, bytes) and `total`.

    Raises:
        CheckpointError: the source cannot be read, is quantized already, has a shape that the layout cannot hold, or
            `out_dir` exists.
        ConfigError: unknown format or method.
        FormatError: unknown rounding, or NaN or infinity in a tensor.
    """
    source_folder, out = Path(model_path), Path(out_dir)
    _check_request(out, format, method, rounding)
    spec = ModelSpec.from_folder(source_folder)
    source = TensorFolder(source_folder)
    _check_source(source_folder, spec, source)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        tensors = _write_weights(spec, source, ShardWriter(partial, shard_bytes), rounding, progress)
        settings = {"format": format, "method": method, "rounding": rounding, "calibration": None}
        quality = {
            "schema": 1,
            "source": source_folder.resolve().name,
            **settings,
            "total": summary(tensors),
            "tensors": {name: tensor.to_dict() for name, tensor in tensors.items()},
        }
        _copy_files(source_folder, partial)
        config = read_json_object(source_folder, "config.json") | {"quantization_config": quantization_config()}
        _write_json(partial / "config.json", config)
        _write_json(partial / QUALITY_FILE, quality)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return quality


def _check_request(out: Path, format_name: str, method: str, rounding: str) -> None:
    if format_name != "nvfp4":
        raise ConfigError(
            "this format has no quantized checkpoint layout",
            got=f"format={format_name}",
            expected="nvfp4",
            remedy="Unquantized weights need no writing: use the plain checkpoint.",
        )
    if method != "rtn":
        raise ConfigError("unknown quantizer", got=f"method={method}", expected="rtn")
    check_choices(get_format(format_name), method, rounding)
    if out.exists():
        raise CheckpointError(
            "the output folder exists already",
            got=out,
            expected="a new folder",
            remedy="Remove it or choose another name.",
        )


def _check_source(folder: Path, spec: ModelSpec, source: TensorFolder) -> None:
    if spec.packed_layout is not None:
        raise CheckpointError(
            f"{folder} is quantized already", got=spec.packed_layout, expected="a checkpoint with plain weights"
        )
    expected: dict[str, tuple[int, ...]] = {}
    for layer, shape in _groups(spec):
        if shape.in_features % BLOCK:
            raise CheckpointError(
                f"{shape.group_name(layer)} cannot be stored in this layout",
                got=f"{shape.in_features} inputs",
                expected=f"a multiple of {BLOCK}, since the layout has no padding",
                remedy="Train from the plain checkpoint: quantizing at load pads.",
            )
        for name, rows in zip(shape.part_names(layer), shape.sizes, strict=True):
            expected[f"model.{name}.weight"] = (rows, shape.in_features)
    source.check(expected, ignored=frozenset(source))


def _groups(spec: ModelSpec) -> Iterator[tuple[int, GroupShape]]:
    for layer in range(spec.num_layers):
        for shape in spec.groups():
            yield layer, shape


def _write_weights(
    spec: ModelSpec, source: TensorFolder, writer: ShardWriter, rounding: str, progress: Progress | None
) -> dict[str, TensorQuality]:
    """All tensors, linear layers quantized; the error of each of those by its name in the checkpoint."""
    groups = list(_groups(spec))
    quality: dict[str, TensorQuality] = {}
    for done, (layer, shape) in enumerate(groups, start=1):
        names = [f"model.{name}" for name in shape.part_names(layer)]
        weights = [source.read(f"{name}.weight") for name in names]
        for name, weight, packed in zip(names, weights, _quantize_group(weights, names, rounding), strict=True):
            quality[f"{name}.weight"] = measure(weight, packed)
            for stored_name, tensor in stored_tensors(name, packed).items():
                writer.add(stored_name, tensor)
        if progress is not None:
            progress(done, len(groups), shape.group_name(layer))
    for name in source:
        if name not in quality:
            writer.add(name, source.read(name))
    writer.finish()
    return quality


def _quantize_group(weights: list[Tensor], names: list[str], rounding: str) -> tuple[PackedWeight, ...]:
    """The members of a group share one global scale, because servers fuse them into one layer."""
    nvfp4 = get_format("nvfp4")
    rows = [weight.shape[0] for weight in weights]
    stacked = nvfp4.quantize(torch.cat(weights), rounding=rounding, segments=rows, name=" + ".join(names))
    return nvfp4.split(stacked)


def _copy_files(source: Path, out: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _COPIED_SUFFIXES and path.name not in _WRITTEN:
            shutil.copyfile(path, out / path.name)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
