"""How compressed-tensors lays a quantized checkpoint out: names of the stored tensors, and `quantization_config`.

A linear layer NAME becomes, in NVFP4, `NAME.weight_packed` uint8 [O, I/2], `NAME.weight_scale` float8_e4m3fn [O, I/16] and
`NAME.weight_global_scale` float32 [1] (equal inside q/k/v and inside gate/up); in MXFP4 `NAME.weight_packed` and
`NAME.weight_scale` uint8 [O, I/32]. Everything else keeps its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from qerl.errors import ConfigError, FormatError
from qerl.formats import FORMAT_NAMES, PackedWeight, get_format
from qerl.formats.base import PackLayout


def pack_layout(format_name: str) -> PackLayout:
    """The layout of a format.

    Raises:
        ConfigError: compressed-tensors has none for it.
        FormatError: no such format.
    """
    layout = get_format(format_name).layout
    if layout is None:
        plain = format_name == "bf16"
        raise ConfigError(
            "this format has no quantized checkpoint layout",
            got=f"format={format_name}",
            expected="one of " + ", ".join(name for name in FORMAT_NAMES if get_format(name).layout is not None),
            remedy="Unquantized weights need no writing: use the plain checkpoint."
            if plain
            else f"Train from the plain checkpoint with quant.format={format_name}: it is quantized at load.",
        )
    return layout


def stored_tensors(name: str, packed: PackedWeight) -> dict[str, Tensor]:
    """The stored tensors of the linear layer `name`, by their names in a checkpoint."""
    suffixes = pack_layout(packed.format).suffixes
    return {f"{name}.{suffix}": packed.tensors[key].contiguous() for key, suffix in suffixes.items()}


def stored_group(names: Sequence[str], packed: PackedWeight) -> dict[str, Tensor]:
    """The stored tensors of the linear layers that are held as one weight, by their names in a checkpoint.

    Args:
        names: the layers, in the order of the weight's segments.
        packed: the weight of all of them.

    Raises:
        FormatError: their tensor-wide scales differ. Inference engines fuse such layers, keep one scale and read the others wrong.
    """
    fmt = get_format(packed.format)
    for key in fmt.per_segment:
        values = packed.tensors[key]
        if bool((values != values[0]).any()):
            raise FormatError(
                f"{', '.join(names)} are read as one layer and have different scales",
                got=f"{key} {', '.join(f'{value:g}' for value in values.tolist())}",
                expected="one value for all of them",
                remedy="Quantize them together, from the plain checkpoint.",
            )
    parts = fmt.split(packed)
    tensors: dict[str, Tensor] = {}
    for name, part in zip(names, parts, strict=True):
        tensors |= stored_tensors(name, part)
    return tensors


def packed_weight(name: str, tensors: Mapping[str, Tensor], format_name: str, d_in: int) -> PackedWeight:
    """The inverse of `stored_tensors`."""
    suffixes = pack_layout(format_name).suffixes
    parts = {key: tensors[f"{name}.{suffix}"] for key, suffix in suffixes.items()}
    return get_format(format_name).from_parts(parts, d_in=d_in, name=name)  # type: ignore[attr-defined]


def quantization_config(format_name: str) -> dict[str, Any]:
    """What config.json says about the weights: 4-bit float weights in groups, activations as they are."""
    layout = pack_layout(format_name)
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
        **layout.weights,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": layout.name,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout.name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
