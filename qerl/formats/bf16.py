"""The unquantized format: the weight as it is, in the dtype it was given (bfloat16, or float32 on request)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.formats.base import PackedWeight, WeightFormat, check_finite, check_weight
from qerl.formats.nvfp4 import check_rounding


class Bf16Format(WeightFormat):
    """One stored tensor, `weight` [d_out, d_in]. Nothing is rounded, so every rounding name gives the same bytes."""

    name = "bf16"

    def quantize(
        self, weight: Tensor, *, rounding: str = "ct", segments: Sequence[int] | None = None, name: str = "weight"
    ) -> PackedWeight:
        check_rounding(rounding)
        rows = check_weight(weight, segments, name)
        check_finite(weight.abs().amax(), name)
        shape = (weight.shape[0], weight.shape[1])
        return PackedWeight(format=self.name, shape=shape, tensors={"weight": weight.detach()}, segments=rows)

    def dequantize(self, packed: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        return packed.tensors["weight"].to(dtype)

    def factored(self, packed: PackedWeight, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        return packed.tensors["weight"].to(dtype), None

    def nbytes(self, shape: tuple[int, int], segments: int = 1, itemsize: int = 2) -> int:
        del segments  # no scales
        return shape[0] * shape[1] * itemsize
