"""Philox-4x32-10 in plain torch integer arithmetic: the same words on every device.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW16, _LOW32 = 0xFFFF, 0xFFFFFFFF


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b; b is split in 16-bit halves so that no product leaves int64."""
    low = (b & _LOW16) * a
    high = (b >> 16) * a + (low >> 16)
    return high >> 16, ((high & _LOW16) << 16) | (low & _LOW16)


Key: TypeAlias = tuple[int, int] | tuple[Tensor, Tensor]
"""Two words in [0, 2^32): integers, or int64 tensors of one value."""


def philox4x32(counter: tuple[Tensor, ...], key: Key) -> tuple[Tensor, ...]:
    """Four output words of each block; the four counters are int64 in [0, 2^32), of one shape or broadcasting."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & _LOW32, (k1 + KEY_STEPS[1]) & _LOW32
    return c0, c1, c2, c3


def stack_words(counter: tuple[Tensor, ...], key: Key) -> Tensor:
    """int64 [..., 4]."""
    return torch.stack(torch.broadcast_tensors(*philox4x32(counter, key)), dim=-1)
