"""Whole-number arithmetic of launches. (Triton's own functions of these names also run inside kernels, and cost the host far more.)"""

from __future__ import annotations


def ceil_div(count: int, size: int) -> int:
    """Pieces of `size` that hold `count`."""
    return -(-count // size)


def power_of_2(count: int) -> int:
    """Smallest power of two that is at least `count`, which is positive."""
    return 1 << (count - 1).bit_length()
