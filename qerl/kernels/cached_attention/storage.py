"""Keys and values in the cache: in the type of attention, or in FP8 E4M3 without a scale (largest magnitude 448, larger ones saturate)."""

from __future__ import annotations

import torch
from torch import Tensor

from qerl.kernels.types import as_type

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0


def stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in the type of a cache."""
    if dtype != FP8:
        return as_type(values, dtype)
    return values.float().clamp(-FP8_LARGEST, FP8_LARGEST).to(FP8)


def raw(cache: Tensor) -> Tensor:
    """The cache in a type that torch's indexing knows: the bytes of FP8, anything else as it is."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def write(cache_PLKd: Tensor, place_M: Tensor, values_MKd: Tensor) -> None:
    """Store values at places page * L + offset (int64 [M], each once)."""
    raw(cache_PLKd).flatten(0, 1).index_copy_(0, place_M, raw(stored(values_MKd, cache_PLKd.dtype)))
