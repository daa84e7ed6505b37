"""Philox-4x32-10 in plain torch integer arithmetic, and the numbers made of its words. Legend: R rows, n normals a row.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math
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


Key: TypeAlias = tuple[int, int] | tuple[Tensor, Tensor] | Tensor
"""Two words in [0, 2^32): integers, int64 tensors of one value, or one int64 [2]."""

_SLICE_ELEMENTS = 1 << 20


def philox4x32(counter: tuple[Tensor, ...], key: Key) -> tuple[Tensor, ...]:
    """Four output words of each block; the four counters are int64 in [0, 2^32), of one shape or broadcasting."""
    c0, c1, c2, c3 = counter
    k0, k1 = key[0], key[1]
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & _LOW32, (k1 + KEY_STEPS[1]) & _LOW32
    return c0, c1, c2, c3


def stack_words(counter: tuple[Tensor, ...], key: Key) -> Tensor:
    """int64 [..., 4]."""
    return torch.stack(torch.broadcast_tensors(*philox4x32(counter, key)), dim=-1)


def open_unit(word: Tensor) -> Tensor:
    """float64 ((w >> 9) + 1/2) / 2^23, in (0, 1)."""
    return ((word >> 9).double() + 0.5) * 2.0**-23


def uniform_at(key: Key, counter: tuple[Tensor, ...]) -> Tensor:
    """See `qerl.kernels.philox.uniform_at`; the four counters broadcast."""
    return open_unit(philox4x32(counter, key)[0]).float()


def normal_rows(key: Key, n: int, c1: Tensor | int, c2: Tensor | int, c3: Tensor | int) -> Tensor:
    """See `qerl.kernels.philox.normal_rows_of`."""
    first = max((c for c in (c1, c2, c3) if isinstance(c, Tensor)), key=len)
    blocks = torch.arange(-(-n // 4), dtype=torch.int64, device=first.device)
    counters = [
        c.expand(len(first)) if isinstance(c, Tensor) else torch.tensor(c, device=first.device) for c in (c1, c2, c3)
    ]
    result_Rn = torch.empty(len(first), n, dtype=torch.float32, device=first.device)
    # Rows are drawn a slice at a time: the integers and float64 numbers in between are 20 times the size of the result.
    step = max(1, _SLICE_ELEMENTS // n)
    for start in range(0, len(first), step):
        rows = slice(start, start + step)
        rest = tuple(c[rows, None] if c.dim() else c for c in counters)
        words_Rbw = stack_words((blocks, *rest), key)
        result_Rn[rows] = _box_muller(words_Rbw.flatten(-2))[..., :n]
    return result_Rn


def _box_muller(words_n: Tensor) -> Tensor:
    """float32 [..., n] of int64 words [..., n], n even: neighbors make a pair."""
    u_P2 = open_unit(words_n).unflatten(-1, (-1, 2))
    radius = torch.sqrt(-2.0 * torch.log(u_P2[..., 0]))
    angle = (2.0 * math.pi) * u_P2[..., 1]
    return torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1).flatten(-2).float()
