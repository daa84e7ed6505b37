"""E2M1, the 4-bit float of NVFP4 and MXFP4: 1 sign, 2 exponent and 1 mantissa bit, and its packing into bytes.

Codes 0..7 are the magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6; adding 8 sets the sign. Two codes share a byte, the even element
in the LOW nibble. Source: OCP Microscaling Formats (MX) Specification v1.0, section 5.3.3.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from qerl.formats.base import row_slices

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = 6.0
SIGN = 8


@cache
def _boundaries(device: torch.device) -> Tensor:
    """float32 [7]: a magnitude's code is the number of boundaries strictly below it.

    The boundaries are the midpoints; where the tie goes up to the even code, the boundary is one float below.
    """
    bounds = []
    for code, (low, high) in enumerate(pairwise(MAGNITUDES)):
        middle = torch.tensor((low + high) / 2)
        tie_goes_up = code % 2 == 1
        bounds.append(torch.nextafter(middle, torch.tensor(-math.inf)) if tie_goes_up else middle)
    return torch.stack(bounds).to(device)


@cache
def _byte_values(device: torch.device) -> Tensor:
    """float32 [256, 2]: the two values of every byte, low nibble first."""
    values = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES))
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1).to(device)


def encode(x: Tensor, negative: Tensor) -> Tensor:
    """Round to the nearest E2M1 magnitude, ties to the even code.

    Args:
        x: float32, any shape; magnitudes above 6 saturate.
        negative: bool, same shape: which codes get the sign bit (formats differ in how they treat -0.0).

    Returns:
        uint8 codes 0..15, same shape.
    """
    codes = torch.bucketize(x.abs(), _boundaries(x.device), out_int32=True).to(torch.uint8)
    return codes | (negative.to(torch.uint8) << 3)


def pack(codes: Tensor) -> Tensor:
    """uint8 codes [..., n] to bytes [..., n / 2], even element low."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Bytes [..., n / 2] to float32 values [..., n]."""
    pairs = _byte_values(packed.device).index_select(0, packed.reshape(-1).int())
    return pairs.view(*packed.shape[:-1], packed.shape[-1] * 2)


def nearest_value(x: Tensor) -> Tensor:
    """The E2M1 value nearest to each element, float32: `encode` and decoding in one, signs as x < 0 gives them.

    Below 2 the values are multiples of 1/2, below 4 of 1, above of 2; rounding to an even multiple is rounding to an even code.
    """
    magnitude = x.abs().clamp_(max=LARGEST)
    spacing = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return magnitude.div_(spacing).round_().mul_(spacing).mul_(torch.where(x < 0, -1.0, 1.0))


def spread(steps_OB: Tensor, block: int, d_in: int, columns: slice | None) -> Tensor:
    """One entry a block [d_out, blocks] to one an element [d_out, d_in], or to the given columns."""
    start, stop, _ = (columns or slice(None)).indices(d_in)
    first = start // block
    last = -(-stop // block)
    wide = steps_OB[:, first:last].repeat_interleave(block, dim=1)
    return wide[:, start - first * block : stop - first * block]


def expand(packed_OX: Tensor, steps_OB: Tensor, block: int, d_in: int, dtype: torch.dtype) -> Tensor:
    """codes * steps [d_out, d_in]: the product in float32, then cast."""
    out = torch.empty(packed_OX.shape[0], d_in, dtype=dtype, device=steps_OB.device)
    for part in row_slices(packed_OX.shape[0], d_in):
        q = unpack(packed_OX[part]).view(-1, steps_OB.shape[1], block)
        out[part] = q.mul_(steps_OB[part, :, None]).flatten(1)[:, :d_in]
    return out
