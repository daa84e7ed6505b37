"""MXFP4: E2M1 codes and one power of two a block of 32 along the inputs, stored as its exponent (E8M0). 4.25 bits a weight.

    w_hat = q * 2^(e - 127)

Stored tensors (P = d_in padded to a multiple of 32, with zeros):

    packed        uint8  [d_out, P / 2]     even element in the low nibble
    block_scales  uint8  [d_out, P / 32]    e

On a CUDA device `for_device` replaces both by `tiles`, the same numbers in the order of `qerl.formats.tiles`, if no scale is above 2.

The exponent is rounded "EVEN", as compressed-tensors and torchao's mode of that name do: the block's largest magnitude is
rounded up to the next power of two from 1.75 times a power of two on, and down otherwise; that power, divided by 4, is the
scale. The largest magnitude is then between 3.5 and 7 scales. Two named roundings, equal to the byte to their library on
w.float() with block maxima below 2.97e38:

    ct       code = RNE(clamp(w / 2^(e - 127)));  sign where w < 0, so -0.0 has code 0
    torchao  the divisor is never below 2^-126;  sign bit kept, so -0.0 has code 8

A block that reaches 1.75 * 2^127 (2.97e38) would be stored as values beyond the largest float by either library; here its
exponent is one lower and it saturates.

Searched method: `mse` tries the exponents from two below to one above and keeps the one with the least squared error.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.3.3, 5.4.1 and 6.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from qerl.errors import FormatError
from qerl.formats import e2m1
from qerl.formats.base import BlockScales, PackedWeight, PackLayout
from qerl.formats.e2m1_blocks import E2m1Format
from qerl.formats.tiles import TileLayout

BLOCK = 32
BIAS = 127
# The largest exponent whose product with 6 is a finite float32.
_LARGEST_BYTE = 125 + BIAS
_OFFSETS = (-1, 1, -2)

# In tiles: what makes the exponent of the bfloat16 2^(e - 1), which a code that stands for q * 2^-126 is multiplied by; and the largest e that has one.
_TILE_OFFSET = 126
_LARGEST_IN_TILES = 128

_MANTISSA_BITS = 23
# Added to the bits of a float it carries into the exponent from mantissa 1.75 on.
_QUARTER = 1 << (_MANTISSA_BITS - 2)
_EXPONENT_OF_LARGEST = 2  # floor(log2(6))
_BITS_OF_SMALLEST = 1 << (_MANTISSA_BITS - 1)  # 2^-127, a subnormal


class Mxfp4Format(E2m1Format):
    """See the module's docstring for layout, roundings and methods."""

    name = "mxfp4"
    block = BLOCK
    methods = ("rtn", "mse")
    scale_dtype = torch.uint8
    tile_layout = TileLayout(scale_bytes=2, pairs=False)
    layout = PackLayout(
        name="mxfp4-pack-quantized",
        suffixes={"packed": "weight_packed", "block_scales": "weight_scale"},
        weights={"strategy": "group", "group_size": BLOCK, "scale_dtype": "torch.uint8"},
    )

    def scale_values(self, scales_OB: Tensor) -> Tensor:
        """2^(e - 127) exactly, the subnormal 2^-127 included."""
        bits = scales_OB.int() << _MANTISSA_BITS
        return bits.masked_fill_(scales_OB == 0, _BITS_OF_SMALLEST).view(torch.float32)

    def nearest_scales(self, amax_OB: Tensor, reach: Tensor, rounding: str) -> Tensor:
        del reach, rounding  # no tensor-wide scale, and the libraries agree
        exponents = (amax_OB.view(torch.int32) + _QUARTER) >> _MANTISSA_BITS
        return (exponents - _EXPONENT_OF_LARGEST).clamp_(0, _LARGEST_BYTE).to(torch.uint8)

    def candidates(self, method: str, scales_OB: Tensor, amax_OB: Tensor, reach: Tensor) -> Iterable[Tensor]:
        del method, amax_OB, reach
        yield scales_OB
        for offset in _OFFSETS:
            yield (scales_OB.to(torch.int16) + offset).clamp_(0, _LARGEST_BYTE).to(torch.uint8)

    def codes(self, w_OBK: Tensor, steps_OB: Tensor, scales_OB: Tensor, scales: BlockScales) -> Tensor:
        if scales.rounding == "torchao":
            return e2m1.encode(w_OBK / steps_OB.clamp(min=2.0**-126)[..., None], torch.signbit(w_OBK))
        return e2m1.encode(w_OBK / steps_OB[..., None], w_OBK < 0)

    def tile_scales(self, codes_OI: Tensor, scales_OB: Tensor) -> Tensor:
        del codes_OI  # stay as they are
        return scales_OB + _TILE_OFFSET

    def natural_scales(self, stored_OB: Tensor) -> Tensor:
        return stored_OB - _TILE_OFFSET

    def tileable(self, packed: PackedWeight) -> bool:
        """All scales are at most 2, as those of real weights are by far. The first call waits for the device."""
        return packed.order == "tiles" or int(packed.tensors["block_scales"].max()) <= _LARGEST_IN_TILES

    def check_stored(self, tensors: Mapping[str, Tensor], name: str) -> None:
        largest = int(tensors["block_scales"].max())
        if largest > _LARGEST_BYTE:
            raise FormatError(
                f"a block scale of '{name}' is unusable",
                got="NaN" if largest == 255 else f"2^{largest - BIAS}",
                expected=f"at most 2^{_LARGEST_BYTE - BIAS}",
            )
