# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""E2M1 codes of quotients, eight in a word, and E4M3 codes: what the kernels that quantize share.

Legend: N blocks of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def words(w, quotient, FUSED: tl.constexpr):
    """Eight codes of 4 bits in a word, the first lowest, [N] of [N, 8]: those nearest to each quotient, ties to the even code,
    magnitudes above 6 saturated; the sign is set where w < 0. FUSED: the corrections of a quotient turn -0 into 0 and keep the sign
    of everything else, so its sign bit says the same."""
    magnitude = tl.minimum(tl.abs(quotient), 6.0)
    # Codes are the least of three roundings: to halves, to whole numbers above 2, to even ones above 4, each in the last bits of a sum with 2^23,
    # whose own bits are taken off a whole word. (Floating point has room for it where integers are what binds.)
    halves = tl.fma(magnitude, 2.0, 8388608.0).to(tl.int32, bitcast=True)
    whole = (magnitude + 8388610.0).to(tl.int32, bitcast=True)
    even = tl.fma(magnitude, 0.5, 8388612.0).to(tl.int32, bitcast=True)
    code = tl.minimum(tl.minimum(halves, whole), even).to(tl.uint32, bitcast=True)
    shift = (tl.arange(0, 8) * 4)[None, :]
    if FUSED:
        sign = (quotient.to(tl.uint32, bitcast=True) >> (28 - shift)) & (tl.full((1, 8), 8, tl.uint32) << shift)
    else:
        sign = tl.where(w < 0.0, tl.full((1, 8), 8, tl.uint32) << shift, 0)
    return tl.sum((code << shift) + sign, axis=1) - 0xFB000000


@triton.jit
def e4m3(value):
    """(byte, its value) of the E4M3 number nearest to each float32 in [0, 448], ties to even."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
    normal = (rounded >> 20) - ((127 - 7) << 3)
    # Below 2^-6 the numbers are multiples of 2^-9; adding and subtracting 1.5 * 2^23 rounds to integers.
    steps = (value * 512.0 + 12582912.0) - 12582912.0
    small = value < 0.015625
    byte = tl.where(small, steps.to(tl.int32), normal)
    return byte, tl.where(small, steps * (1.0 / 512.0), rounded.to(tl.float32, bitcast=True))
