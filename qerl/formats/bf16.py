"""The unquantized format: the weight as it is, in the dtype it was given (bfloat16, or float32 on request)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.formats.base import (
    METHODS,
    BlockScales,
    PackedWeight,
    WeightFormat,
    check_choices,
    check_finite,
    check_weight,
)


class Bf16Format(WeightFormat):
    """One stored tensor, `weight` [d_out, d_in]. Nothing is rounded, so every method and rounding gives the same bytes."""

    name = "bf16"
    block = 1
    methods = METHODS

    def block_scales(
        self,
        weight: Tensor,
        *,
        method: str = "rtn",
        rounding: str = "ct",
        segments: Sequence[int] | None = None,
        name: str = "weight",
        importance_I: Tensor | None = None,
        shared: BlockScales | None = None,
    ) -> BlockScales:
        del importance_I, shared  # there is no scale to choose
        check_choices(self, method, rounding)
        rows = check_weight(weight, segments, name)
        reach = weight.abs().amax().float()
        check_finite(reach, name)
        shape = (weight.shape[0], weight.shape[1])
        return BlockScales(format=self.name, shape=shape, segments=rows, rounding=rounding, reach=reach, tensors={})

    def quantize_with_scales(self, weight: Tensor, scales: BlockScales) -> PackedWeight:
        tensors = {"weight": weight.detach()}
        return PackedWeight(format=self.name, shape=scales.shape, tensors=tensors, segments=scales.segments)

    def steps(self, scales: BlockScales, columns: slice | None = None) -> Tensor:
        """All ones; `snap` does not look at them."""
        start, stop, _ = (columns or slice(None)).indices(scales.shape[1])
        return torch.ones(scales.shape[0], stop - start, device=scales.reach.device)

    def snap(self, weight: Tensor, steps: Tensor) -> Tensor:
        del steps
        return weight.float()

    def dequantize(self, packed: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        return packed.tensors["weight"].to(dtype)

    def factored(self, packed: PackedWeight, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        return packed.tensors["weight"].to(dtype), None

    def nbytes(self, shape: tuple[int, int], segments: Sequence[int] | None = None, itemsize: int = 2) -> int:
        del segments  # no scales
        return shape[0] * shape[1] * itemsize
