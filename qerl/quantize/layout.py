"""The `nvfp4-pack-quantized` layout of compressed-tensors, weight-only: names, configuration and shards.

A linear layer NAME becomes `NAME.weight_packed` uint8 [O, I/2], `NAME.weight_scale` float8_e4m3fn [O, I/16] and
`NAME.weight_global_scale` float32 [1] (G = 2688 / amax, equal inside q/k/v and inside gate/up). Everything else keeps its
name and bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from qerl.formats import PackedWeight
from qerl.formats.nvfp4 import BLOCK
from qerl.model.tensor_folder import INDEX_FILE, SINGLE_FILE

LAYOUT = "nvfp4-pack-quantized"
STORED_NAMES = {"packed": "weight_packed", "block_scales": "weight_scale", "global_scale": "weight_global_scale"}


def stored_tensors(name: str, packed: PackedWeight) -> dict[str, Tensor]:
    """The three tensors of the linear layer `name`."""
    return {f"{name}.{STORED_NAMES[key]}": tensor.contiguous() for key, tensor in packed.tensors.items()}


def quantization_config() -> dict[str, Any]:
    """What config.json says about the weights: 4-bit float weights in groups of 16, activations as they are."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": BLOCK,
        "symmetric": True,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.float8_e4m3fn",
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": LAYOUT,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": LAYOUT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


class ShardWriter:
    """Collects tensors and writes a safetensors file whenever `shard_bytes` are together.

    Files get their final names in `finish`, when their number is known.
    """

    def __init__(self, folder: Path, shard_bytes: int):
        self.folder = folder
        self.shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; the shard before it is written first if the tensor would not fit into it."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.shard_bytes:
            self._write()
        self._pending[name] = tensor
        self._pending_bytes += size
        self._total_bytes += size

    def finish(self) -> None:
        """Write what is left, name the shards, and write their index if there are several."""
        self._write()
        count = len(self._shards)
        if count == 1:
            self._temporary(0).rename(self.folder / SINGLE_FILE)
            return
        weight_map = {}
        for index, names in enumerate(self._shards):
            file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            self._temporary(index).rename(self.folder / file)
            weight_map.update(dict.fromkeys(names, file))
        index_content = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self.folder / INDEX_FILE).write_text(json.dumps(index_content, indent=2) + "\n", encoding="utf-8")

    def _temporary(self, index: int) -> Path:
        return self.folder / f"shard-{index}.safetensors"

    def _write(self) -> None:
        save_file(self._pending, self._temporary(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0
