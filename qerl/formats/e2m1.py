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
