"""FP8 for the LM head: E4M3 codes and one float32 divisor a row. 8 bits a weight and 4 bytes a row.

    w_hat = code / divisor,     divisor = 448 / amax_row

Stored tensors:

    codes    float8_e4m3fn  [d_out, d_in]
    divisor  float32        [d_out]

A row of zeros has divisor 1; where 448 / amax overflows (amax below 1.3e-36) it is the largest float. Codes are rounded to
nearest, ties to even. There is one rounding: `ct` and `torchao` are the same here.

`tiled` replaces the codes by `tiles`, the same numbers in the order of `qerl.formats.tiles`, divisors beside them; `for_device` does so on the
devices of `TILED_ON`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from qerl.formats.base import (
    BlockScales,
    PackedWeight,
    check_choices,
    check_finite,
    check_weight,
    row_slices,
)
from qerl.formats.tiles import TiledFormat, TileLayout

LARGEST = 448.0

TILED_ON = frozenset({(9, 0)})
"""Compute capabilities of the devices on which a head is held as tiles: those on which the kernels that read them have been timed. Other CUDA devices keep
the natural order, which a Triton kernel reads (`kernels.token_logprobs.logits`)."""


class Fp8Format(TiledFormat):
    """See the module's docstring."""

    name = "fp8"
    block = 0
    tile_layout = TileLayout(scale_bytes=0, pairs=False, wide=True)

    def for_device(self, packed: PackedWeight) -> PackedWeight:
        there = packed.device.type == "cuda" and torch.cuda.get_device_capability(packed.device) in TILED_ON
        return self.tiled(packed) if there else packed

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
        del importance_I, shared  # nothing is searched, and a row's scale is its own
        check_choices(self, method, rounding)
        rows = check_weight(weight, segments, name)
        amax_O = weight.abs().amax(1).float()
        reach = amax_O.amax()
        check_finite(reach, name)
        divisor_O = (LARGEST / amax_O).clamp(max=torch.finfo(torch.float32).max)
        return BlockScales(
            format=self.name,
            shape=(weight.shape[0], weight.shape[1]),
            segments=rows,
            rounding=rounding,
            reach=reach,
            tensors={"divisor": torch.where(amax_O > 0, divisor_O, 1.0)},
        )

    def quantize_with_scales(self, weight: Tensor, scales: BlockScales) -> PackedWeight:
        divisor_O = scales.tensors["divisor"]
        codes = torch.empty(scales.shape, dtype=torch.float8_e4m3fn, device=weight.device)
        for part in row_slices(*scales.shape, weight.device):
            codes[part] = _encode(weight[part].float() * divisor_O[part, None])
        tensors = {"codes": codes, "divisor": divisor_O}
        return PackedWeight(format=self.name, shape=scales.shape, tensors=tensors, segments=scales.segments)

    def steps(self, scales: BlockScales, columns: slice | None = None) -> Tensor:
        start, stop, _ = (columns or slice(None)).indices(scales.shape[1])
        return (1 / scales.tensors["divisor"])[:, None].expand(-1, stop - start)

    def snap(self, weight: Tensor, steps: Tensor) -> Tensor:
        divisor = 1 / steps
        return _encode(weight.float() * divisor).float() / divisor

    def to_parts(self, packed: PackedWeight, rows: slice) -> tuple[Tensor, Tensor]:
        codes = packed.tensors["codes"][rows].view(torch.uint8)
        return codes, codes[:, :0]

    def from_parts_of_tiles(self, parts: Iterable[tuple[Tensor, Tensor]], shape: tuple[int, int]) -> dict[str, Tensor]:
        codes = torch.cat([codes[:, : shape[1]] for codes, _ in parts])
        return {"codes": codes.view(torch.float8_e4m3fn)}

    def beside_tiles(self, packed: PackedWeight) -> dict[str, Tensor]:
        return {"divisor": packed.tensors["divisor"]}

    def from_beside_tiles(self, packed: PackedWeight, start: int, stop: int) -> dict[str, Tensor]:
        return {"divisor": packed.tensors["divisor"][start:stop]}

    def dequantize(self, packed: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        packed = self.natural(packed)
        codes, divisor_O = packed.tensors["codes"], packed.tensors["divisor"]
        out = torch.empty(packed.shape, dtype=dtype, device=codes.device)
        for part in row_slices(*packed.shape, out.device):
            out[part] = codes[part].float() / divisor_O[part, None]
        return out

    def factored(self, packed: PackedWeight, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Values are the codes: four significant bits, exact in float16, bfloat16 and wider."""
        packed = self.natural(packed)
        return packed.tensors["codes"].to(dtype), packed.tensors["divisor"]

    def nbytes(self, shape: tuple[int, int], segments: Sequence[int] | None = None, itemsize: int = 2) -> int:
        del segments, itemsize  # scales belong to rows, and storage does not depend on the compute type
        return shape[0] * (shape[1] + 4)


def _encode(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
