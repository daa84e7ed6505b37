"""E2M1, the 4-bit float of NVFP4 and MXFP4: 1 sign, 2 exponent and 1 mantissa bit, and its packing into bytes.

Codes 0..7 are the magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6; adding 8 sets the sign. Two codes share a byte, the even element
in the LOW nibble. Source: OCP Microscaling Formats (MX) Specification v1.0, section 5.3.3.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = 6.0

# A float32 in [2^23, 2^24) has spacing 1, so adding 1.5 * 2^23 and taking it away rounds to integers, ties to even.
_ROUND_TO_HALVES = 1.5 * 2.0**22
_EXPONENT_BITS = 0x7F800000
_EXPONENT_OF_ONE = 127 << 23


@cache
def _byte_values(device: torch.device) -> Tensor:
    """float32 [256, 2]: the two values of every byte, low nibble first."""
    values = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES))
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1).to(device)


@cache
def _codes_of_halves(device: torch.device) -> Tensor:
    """uint8 [13]: the code of each magnitude at its number of halves."""
    codes = torch.zeros(int(2 * LARGEST) + 1, dtype=torch.uint8)
    for code, magnitude in enumerate(MAGNITUDES):
        codes[int(2 * magnitude)] = code
    return codes.to(device)


def nearest_value(x: Tensor) -> Tensor:
    """The E2M1 value nearest to each element, ties to the even code, magnitudes above 6 saturated; float32, sign kept.

    Values below 2 are multiples of 1/2, below 4 of 1, above of 2, and an even multiple is an even code: so this is rounding to a
    multiple of max(1, 2^floor(log2 |x|)) / 2, which adding and subtracting a large number does.
    """
    magnitude = x.abs().clamp_(max=LARGEST)
    binade = (magnitude.view(torch.int32) & _EXPONENT_BITS).clamp_(min=_EXPONENT_OF_ONE).view(torch.float32)
    large = binade.mul_(_ROUND_TO_HALVES)
    return torch.copysign(magnitude.add_(large).sub_(large), x)


def encode(x: Tensor, negative: Tensor) -> Tensor:
    """Round to the nearest E2M1 magnitude, ties to the even code.

    Args:
        x: float32, any shape; magnitudes above 6 saturate.
        negative: bool, same shape: which codes get the sign bit (formats differ in how they treat -0.0).

    Returns:
        uint8 codes 0..15, same shape.
    """
    halves = nearest_value(x).abs_().mul_(2).to(torch.int32)
    codes = _codes_of_halves(x.device).index_select(0, halves.reshape(-1)).view(x.shape)
    return codes | (negative.to(torch.uint8) << 3)


def pack(codes: Tensor) -> Tensor:
    """uint8 codes [..., n] to bytes [..., n / 2], even element low."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Bytes [..., n / 2] to float32 values [..., n]."""
    pairs = _byte_values(packed.device).index_select(0, packed.reshape(-1).int())
    return pairs.view(*packed.shape[:-1], packed.shape[-1] * 2)
