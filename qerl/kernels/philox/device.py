# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton functions that other kernels call to draw in registers: the words and normals of `qerl.kernels.philox`.

Words are bit-equal to the reference. Normals are float32 arithmetic throughout (a consumer card has next to no float64): the
logarithm is of an exact mantissa, the angle is reduced to an eighth of a turn in integers, and every polynomial is a chain of
explicit fused multiply-adds, so its bits do not depend on the kernel around it. Kernels that go on computing with z are
launched with `enable_fp_fusion=False` for the same reason.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.random import philox_impl


@triton.jit
def uniform_of(word):
    """float32 ((w >> 9) + 1/2) / 2^23 of a uint32 word, exact."""
    return (((word >> 9) << 1) + 1).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def normal_pair(word_radius, word_angle):
    """Two standard normals of two uint32 words, by Box and Muller."""
    # -2 ln u, u = odd / 2^24: exponent and mantissa of the integer, mantissa brought to [sqrt(1/2), sqrt(2)).
    odd = (((word_radius >> 9) << 1) + 1).to(tl.float32)
    bits = odd.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - (127 + 24)
    mantissa = ((bits & 0x007FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    above = mantissa > 1.41421356
    mantissa = tl.where(above, mantissa * 0.5, mantissa)
    power = tl.where(above, exponent + 1, exponent).to(tl.float32)
    f = mantissa - 1.0
    square = f * f
    p = tl.fma(f, 7.0376836292e-2, -1.1514610310e-1)
    p = tl.fma(p, f, 1.1676998740e-1)
    p = tl.fma(p, f, -1.2420140846e-1)
    p = tl.fma(p, f, 1.4249322787e-1)
    p = tl.fma(p, f, -1.6668057665e-1)
    p = tl.fma(p, f, 2.0000714765e-1)
    p = tl.fma(p, f, -2.4999993993e-1)
    p = tl.fma(p, f, 3.3333331174e-1)
    p = tl.fma(p * f, square, power * -2.12194440e-4)
    p = tl.fma(square, -0.5, p)
    log = tl.fma(power, 0.693359375, f + p)
    radius = tl.sqrt_rn(-2.0 * log)
    # Angle in turns, (k + 1/2) / 2^23: nearest quarter turn, and the exact rest of at most an eighth.
    k = (word_angle >> 9).to(tl.int32)
    quarter = (k + 0x100000) >> 21
    turns = (2 * (k - (quarter << 21)) + 1).to(tl.float32) * (1.0 / 16777216.0)
    x = tl.fma(turns, 6.28318548202514648, turns * -1.74845553146e-7)
    s = x * x
    sine = tl.fma(s, -1.9515295891e-4, 8.3321608736e-3)
    sine = tl.fma(sine, s, -1.6666654611e-1)
    sine = tl.fma(sine * s, x, x)
    cosine = tl.fma(s, 2.443315711809948e-5, -1.388731625493765e-3)
    cosine = tl.fma(cosine, s, 4.166664568298827e-2)
    cosine = tl.fma(cosine, s, -0.5)
    cosine = tl.fma(cosine, s, 1.0)
    odd_quarter = (quarter & 1) != 0
    first = tl.where(odd_quarter, sine, cosine)
    second = tl.where(odd_quarter, cosine, sine)
    first = tl.where(((quarter + 1) & 2) != 0, -first, first)
    second = tl.where((quarter & 2) != 0, -second, second)
    return radius * first, radius * second


@triton.jit
def normal_rows_tile(k0, k1, c1, c2, c3, first_block, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """float32 [ROWS, BLOCK]: row r, element i is the standard normal of channel 4 * first_block + i at counter c1[r], c2[r], c3.

    Key and counters are uint32 (c1 and c2 of shape [ROWS], the key scalars, c3 a scalar or [ROWS, 1]); BLOCK is a multiple of 4.
    """
    blocks = (first_block + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = tl.zeros((ROWS, BLOCK // 4), tl.uint32)
    w0, w1, w2, w3 = philox_impl(zero + blocks[None, :], zero + c1[:, None], zero + c2[:, None], zero + c3, k0, k1)
    z0, z1 = normal_pair(w0, w1)
    z2, z3 = normal_pair(w2, w3)
    return tl.interleave(tl.interleave(z0, z2), tl.interleave(z1, z3))
