# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Scales of a norm with their noise, in registers: what the kernels of `qerl.kernels.rms_norm.triton` multiply by.

Legend: T tokens, R draws, D channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qerl.kernels.philox.device import normal_rows_tile


@triton.jit
def _drawn(
    key,
    c1,
    c1_R,
    c1_stride,
    c2_R,
    c2_stride,
    c3_1,
    spread,
    draw,
    inside,
    SPREADS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """z of the given draws (int64 [ROWS]), float32 [ROWS, BLOCK]."""
    word1 = tl.zeros((ROWS,), tl.int64) + c1
    if c1_R is not None:
        word1 += tl.load(c1_R + draw * c1_stride, mask=inside, other=0)
    word2 = tl.load(c2_R + draw * c2_stride, mask=inside, other=0)
    k0, k1 = tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32)
    word3 = tl.load(c3_1).to(tl.uint32)
    z = normal_rows_tile(k0, k1, word1.to(tl.uint32), word2.to(tl.uint32), word3, 0, ROWS, BLOCK)
    if SPREADS:
        columns = tl.arange(0, BLOCK)
        return z * tl.load(spread + columns, mask=columns < D, other=0.0)[None, :]
    else:
        return z * tl.load(spread)


@triton.jit
def of_run(
    w,
    z,
    last,
    key,
    c1,
    c1_R,
    c1_stride,
    c2_R,
    c2_stride,
    c3_1,
    spread,
    rows_T,
    noisy_T,
    token,
    count,
    SPREADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(w + z [1, BLOCK], z, its draw) of a token, from z of the draw ``last``, which is made anew only where the token sees another."""
    inside = token < count
    draw = tl.load(rows_T + token, mask=inside, other=-1)
    if inside & (draw != last):
        one = tl.zeros((1,), tl.int64)
        z = _drawn(
            key, c1, c1_R, c1_stride, c2_R, c2_stride, c3_1, spread, one + draw, one == 0, SPREADS, D, 1, BLOCK
        )  # fmt: skip
        last = draw
    scale = w + z
    if noisy_T is not None:
        scale = w + z * tl.load(noisy_T + token, mask=inside, other=0).to(tl.float32)
    return scale, z, last


@triton.jit
def scale_of(
    w,
    table,
    table_stride,
    key,
    c1,
    c1_R,
    c1_stride,
    c2_R,
    c2_stride,
    c3_1,
    spread,
    rows_T,
    noisy_T,
    tokens,
    inside,
    SOURCE: tl.constexpr,
    SPREADS: tl.constexpr,
    SHARED: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """w + z of the given tokens (int64 [ROWS]), float32 [ROWS, BLOCK] or, where all tokens share it, [1, BLOCK] as w is."""
    columns = tl.arange(0, BLOCK)
    if SOURCE == 0:
        return w
    elif SHARED:
        return w + tl.load(table + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
    else:
        draw = tokens
        if rows_T is not None:
            draw = tl.load(rows_T + tokens, mask=inside, other=0)
        if SOURCE == 1:
            mask = inside[:, None] & (columns < D)[None, :]
            z = tl.load(table + draw[:, None] * table_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        else:
            z = _drawn(key, c1, c1_R, c1_stride, c2_R, c2_stride, c3_1, spread, draw, inside, SPREADS, D, ROWS, BLOCK)
        if noisy_T is not None:
            z = z * tl.load(noisy_T + tokens, mask=inside, other=0).to(tl.float32)[:, None]
        return w + z
