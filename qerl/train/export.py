"""What leaves a run to be served: an adapter in PEFT's format, or a whole model with the adapter merged in.

Merging adds (alpha / r) B A to each projection in float32 and rounds once. What it is added to is a choice that changes
the policy: the checkpoint's own weights (``plain``), or those that the adapter was trained on, quantized and then
dequantized (``trained``). For an unquantized run both are the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from qerl.config.schema import QuantConfig
from qerl.errors import CheckpointError, ConfigError
from qerl.formats.tensor_file import save_tensors
from qerl.metrics.files import whole_folder, write_json
from qerl.model.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE, adapter_lora_config
from qerl.model.checkpoint import held_tensors
from qerl.model.model_files import COPIED_SUFFIXES, SHARD_BYTES, copy_settings
from qerl.model.spec import ModelSpec, read_json_object
from qerl.model.tensor_folder import INDEX_FILE, SINGLE_FILE, TensorFile

Weights = Literal["plain", "trained"]

PEFT_PREFIX = "base_model.model."
FACTS_FILE = "qerl_export.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What a merge did."""

    path: Path
    projections: int
    """Matrices that an adapter was added to."""
    norms: int
    """Norm scales that were trained, and so replaced."""
    files: int
    bytes: int


def export_adapter(adapter: str | Path, out: str | Path, *, base_name: str | None = None) -> Path:
    """Copy the two files that PEFT and servers read; optimizer and counters stay behind.

    Args:
        adapter: folder of a checkpoint or of any plain LoRA.
        out: folder to write; appears whole, in place of an older one.
        base_name: what ``base_model_name_or_path`` shall say; None leaves the path it was trained from.

    Raises:
        CheckpointError: the adapter cannot be read.
    """
    adapter, out = Path(adapter), Path(out)
    adapter_lora_config(adapter)
    TensorFile(adapter / ADAPTER_FILE)
    config = read_json_object(adapter, ADAPTER_CONFIG)
    if base_name is not None:
        config["base_model_name_or_path"] = base_name
    with whole_folder(out) as folder:
        shutil.copyfile(adapter / ADAPTER_FILE, folder / ADAPTER_FILE)
        write_json(folder / ADAPTER_CONFIG, config)
    return out


def export_model(folder: str | Path, out: str | Path) -> Path:
    """Copy a checkpoint of full mode, which is a model already, without optimizer and counters."""
    folder, out = Path(folder), Path(out)
    with whole_folder(out) as target:
        for path in sorted(folder.iterdir()):
            kept = path.suffix == ".safetensors" or path.suffix in COPIED_SUFFIXES
            if path.is_file() and kept and path.name != "trainer_state.json":
                shutil.copyfile(path, target / path.name)
    return out


def merge(
    base: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    quant: QuantConfig,
    weights: Weights = "plain",
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    facts: dict[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Merged:
    """Write an ordinary Hugging Face folder of the base with the adapter in it. One group of layers and one shard are in memory.

    Args:
        base: the folder that the adapter belongs to.
        adapter: folder in PEFT's format; the norms it brings replace the base's.
        out: folder to write; appears whole, in place of an older one.
        quant: how the base was held in training; used with ``weights="trained"``.
        weights: what the adapter is added to, see the module's docstring.
        dtype: of matrices, biases and embeddings. Norm scales are float32: trained ones differ from the base's by less than
            bfloat16 can hold.
        device: where groups are merged.
        facts: where it comes from, for ``qerl_export.json``.
        shard_bytes: largest file.

    Raises:
        ConfigError: plain weights are asked for and the folder holds packed ones.
        CheckpointError: the adapter does not belong to the base, or a file cannot be read.
    """
    base, adapter, out = Path(base), Path(adapter), Path(out)
    spec = ModelSpec.from_folder(base)
    if spec.stored_format is not None and weights == "plain":
        raise ConfigError(
            "the base holds packed weights, so there are no plain ones to merge into",
            got=f"{base} with {spec.stored_format} weights",
            remedy="Add --weights trained: the packed weights are dequantized and the adapter is added to them",
        )
    held = held_tensors(base, quant if weights == "trained" else QuantConfig(format="bf16"), device=device)
    additions = _Adapter(adapter)
    with whole_folder(out) as folder:
        placed, total = _write_shards(folder, (additions.apply(*item) for item in held), dtype, shard_bytes)
        additions.check_all_used(base)
        config = read_json_object(base, "config.json")
        config = {key: value for key, value in config.items() if key not in ("torch_dtype", "quantization_config")}
        write_json(folder / "config.json", config | {"dtype": str(dtype).removeprefix("torch.")})
        copy_settings(base, folder, without=(FACTS_FILE,))
        write_json(folder / FACTS_FILE, {"weights": weights, **(facts or {})})
    return Merged(
        path=out, projections=additions.projections, norms=additions.norms, files=len(set(placed.values())), bytes=total
    )


class _Adapter:
    """An adapter's tensors, added to or put in place of those of a base by name."""

    def __init__(self, folder: Path):
        lora = adapter_lora_config(folder)
        self.scale = lora.alpha / lora.rank
        self.file = TensorFile(folder / ADAPTER_FILE)
        self.projections = self.norms = 0
        self._unused = set(self.file.names)

    def apply(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        """The merged tensor, float32."""
        stem = PEFT_PREFIX + name.removesuffix(".weight")
        a_name, b_name, own = f"{stem}.lora_A.weight", f"{stem}.lora_B.weight", f"{stem}.weight"
        if name.endswith(".weight") and a_name in self._unused and b_name in self._unused:
            a_RI, b_OR = (self.file.read(part).to(tensor.device, torch.float32) for part in (a_name, b_name))
            if (b_OR.shape[0], a_RI.shape[1]) != tuple(tensor.shape):
                raise CheckpointError(
                    f"the adapter does not fit the base at {name}",
                    got=f"A {list(a_RI.shape)}, B {list(b_OR.shape)}",
                    expected=f"a product of shape {list(tensor.shape)}",
                )
            tensor = tensor + self.scale * (b_OR @ a_RI)
            self._unused -= {a_name, b_name}
            self.projections += 1
        elif own in self._unused and tensor.dim() == 1:
            tensor = self.file.read(own).to(tensor.device, torch.float32)
            self._unused.discard(own)
            self.norms += 1
        return name, tensor

    def check_all_used(self, base: Path) -> None:
        """Refuse an adapter of which something was left over.

        Raises:
            CheckpointError: it has tensors that the base has no place for.
        """
        if self._unused:
            raise CheckpointError(
                "the adapter has tensors that the base has no place for",
                got=f"{min(self._unused)} ({len(self._unused)} in all); base {base}",
                remedy="Give the base that the adapter was trained on",
            )


def _write_shards(
    folder: Path, tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype, shard_bytes: int
) -> tuple[dict[str, str], int]:
    """Files of at most ``shard_bytes``, with an index where there are several; (tensor -> file, bytes in all)."""
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0

    def close() -> None:
        save_tensors(shard, folder / f"{len(shards)}.part")
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        stored = tensor.to("cpu", torch.float32 if _is_norm(name) else dtype).clone()
        nbytes = stored.numel() * stored.element_size()
        if shard and size + nbytes > shard_bytes:
            close()
            size = 0
        shard[name] = stored
        size, total = size + nbytes, total + nbytes
    close()
    placed: dict[str, str] = {}
    for index, names in enumerate(shards):
        name = SINGLE_FILE if len(shards) == 1 else f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{index}.part").rename(folder / name)
        placed |= dict.fromkeys(names, name)
    if len(shards) > 1:
        index_json = json.dumps({"metadata": {"total_size": total}, "weight_map": placed}, indent=2)
        (folder / INDEX_FILE).write_text(index_json + "\n", encoding="utf-8")
    return placed, total


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight")
