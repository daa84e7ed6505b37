# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: SIM102 - what is known at compile time stands in an `if` of its own
"""What the Triton kernels of decode attention are made of.

Legend: B rows, H query heads, K key/value heads, G = H / K heads that share one, d head size, P pages, L tokens a page, N pages a
row has at most; S rows of a matrix product, T positions of a tile, J parts that are joined at once, M rows of a group.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def part_tiles(tiles, first, most, LEAST: tl.constexpr, LONG: tl.constexpr):
    """Tiles of a part of a context: `first` parts as soon as it has the tiles, then more of LONG tiles, then longer ones."""
    return tl.maximum(tl.maximum(tl.cdiv(tiles, most), LEAST), tl.minimum(tl.cdiv(tiles, first), LONG))


@triton.jit
def find(counts_N, lane_N, task):
    """(the lane that the task belongs to, how many tasks of the lane come before it)."""
    ends_N = tl.cumsum(counts_N, 0)
    lane = tl.sum((ends_N <= task).to(tl.int32), 0)
    return lane, task - tl.max(tl.where(lane_N < lane, ends_N, 0), 0)


@triton.jit
def own_tiles(
    lengths_ptr,
    shared_ptr,
    row,
    mask,
    SHARED: tl.constexpr,
    TILE: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
):
    """(tokens in the cache, first tile that the row does not read with its group, tiles from there on); of one row or of many."""
    length = tl.load(lengths_ptr + row, mask=mask, other=0).to(tl.int32)
    if not PAGED:
        length = tl.minimum(length, PAGE - 1)
    before = length * 0
    if SHARED:
        before = tl.load(shared_ptr + row, mask=mask, other=0) * (PAGE // TILE)
    return length, before, tl.cdiv(length, TILE) - before


@triton.jit
def scaled(low_Nd, high_Nd, weight_ptr, z_ptr, z_stride, row_N, lane_d, swapped_d, eps, SIZE: tl.constexpr):
    """RMSNorm of heads: (values, values of the swapped channels), rounded to the type of the projections."""
    inside_1d = (lane_d < SIZE)[None, :]
    wide_low_Nd, wide_high_Nd = low_Nd.to(tl.float32), high_Nd.to(tl.float32)
    r_N1 = (1.0 / tl.sqrt_rn(tl.sum(wide_low_Nd * wide_low_Nd, 1) / SIZE + eps))[:, None]
    scale_Nd = tl.load(weight_ptr + lane_d[None, :], mask=inside_1d, other=0.0).to(tl.float32)
    swapped_scale_Nd = tl.load(weight_ptr + swapped_d[None, :], mask=inside_1d, other=0.0).to(tl.float32)
    if z_ptr is not None:
        z_N1 = z_ptr + row_N[:, None] * z_stride
        scale_Nd += tl.load(z_N1 + lane_d[None, :], mask=inside_1d, other=0.0).to(tl.float32)
        swapped_scale_Nd += tl.load(z_N1 + swapped_d[None, :], mask=inside_1d, other=0.0).to(tl.float32)
    normed_Nd = (wide_low_Nd * r_N1 * scale_Nd).to(low_Nd.dtype)
    return normed_Nd, (wide_high_Nd * r_N1 * swapped_scale_Nd).to(low_Nd.dtype)


@triton.jit
def load_heads(qkv_ptr, qkv_stride, row_N, head_N, there_N, lane_d, SIZE: tl.constexpr):
    """Heads of the projections, of a row and a head each (a row alone, [1], is that of all): (channels, swapped channels) [N, d]."""
    swapped_d = tl.where(lane_d < SIZE // 2, lane_d + SIZE // 2, lane_d - SIZE // 2)
    there_Nd = there_N[:, None] & (lane_d < SIZE)[None, :]
    from_N1 = qkv_ptr + row_N[:, None] * qkv_stride + head_N[:, None] * SIZE
    low_Nd = tl.load(from_N1 + lane_d[None, :], mask=there_Nd, other=0.0)
    return low_Nd, tl.load(from_N1 + swapped_d[None, :], mask=there_Nd, other=0.0)


@triton.jit
def load_turns(cos_ptr, sin_ptr, row_N, lane_d, SIZE: tl.constexpr):
    """(cosines, sines) [N, d] of rows."""
    place_Nd, inside_1d = row_N[:, None] * SIZE + lane_d[None, :], (lane_d < SIZE)[None, :]
    return tl.load(cos_ptr + place_Nd, mask=inside_1d, other=0.0), tl.load(
        sin_ptr + place_Nd, mask=inside_1d, other=0.0
    )


@triton.jit
def turned(
    low_Nd,
    high_Nd,
    cos_Nd,
    sin_Nd,
    weight_ptr,
    eps,
    z_ptr,
    z_stride,
    row_N,
    lane_d,
    bias_ptr,
    shift_ptr,
    head_N,
    there_N,
    NORMS: tl.constexpr,
    SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """[N, d]: heads, normalized or given their bias, and rotated, rounded once; less one vector for all."""
    swapped_d = tl.where(lane_d < SIZE // 2, lane_d + SIZE // 2, lane_d - SIZE // 2)
    if NORMS:
        low_Nd, high_Nd = scaled(low_Nd, high_Nd, weight_ptr, z_ptr, z_stride, row_N, lane_d, swapped_d, eps, SIZE)
    wide_low_Nd, wide_high_Nd = low_Nd.to(tl.float32), high_Nd.to(tl.float32)
    if bias_ptr is not None:
        there_Nd = there_N[:, None] & (lane_d < SIZE)[None, :]
        from_N1 = bias_ptr + head_N[:, None] * SIZE
        wide_low_Nd += tl.load(from_N1 + lane_d[None, :], mask=there_Nd, other=0.0).to(tl.float32)
        wide_high_Nd += tl.load(from_N1 + swapped_d[None, :], mask=there_Nd, other=0.0).to(tl.float32)
    result_Nd = wide_low_Nd * cos_Nd + wide_high_Nd * sin_Nd
    if shift_ptr is not None:
        result_Nd -= tl.load(shift_ptr + lane_d, mask=lane_d < SIZE, other=0.0)[None, :]
    return result_Nd.to(DTYPE)


@triton.jit
def walk(
    q_Sd, k_ptr, v_ptr, table_ptr, row, kv_head, first, last, length, scale, page_stride, token_stride,
    SIDE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """(largest score [S], sum of weights [S], weighted values [S, d]) over the tiles [first, last) of a row."""
    lane_d, lane_T = tl.arange(0, PADDED), tl.arange(0, TILE)
    inside_d = lane_d < SIZE
    top_S = tl.full((SIDE,), float("-inf"), tl.float32)
    sum_S = tl.zeros((SIDE,), tl.float32)
    out_Sd = tl.zeros((SIDE, PADDED), tl.float32)
    # The number of the next page is read a turn ahead, or its tile could not be on its way while this one is worked on.
    page = row
    if PAGED:
        page = tl.load(table_ptr + first * TILE // PAGE, mask=first < last, other=0).to(tl.int64)
    for tile in range(first, last):
        start = tile * TILE
        next_page = row
        if PAGED:
            next_page = tl.load(table_ptr + (start + TILE) // PAGE, mask=tile + 1 < last, other=0).to(tl.int64)
        base = page * page_stride + (start % PAGE).to(tl.int64) * token_stride
        inside_T = start + lane_T < length
        place_Td = base + kv_head * SIZE + lane_T[:, None] * token_stride + lane_d[None, :]
        mask_Td = inside_T[:, None] & inside_d[None, :]
        k_Td = tl.load(k_ptr + place_Td, mask=mask_Td, other=0.0).to(q_Sd.dtype)
        v_Td = tl.load(v_ptr + place_Td, mask=mask_Td, other=0.0).to(q_Sd.dtype)
        if EXACT:
            scores_ST = tl.dot(q_Sd, tl.trans(k_Td), input_precision="ieee") * scale
        else:
            scores_ST = tl.dot(q_Sd, tl.trans(k_Td)) * scale
        scores_ST = tl.where(inside_T[None, :], scores_ST, float("-inf"))
        new_top_S = tl.maximum(top_S, tl.max(scores_ST, 1))
        weights_ST = tl.exp2(scores_ST - new_top_S[:, None])
        shrink_S = tl.exp2(top_S - new_top_S)
        sum_S = sum_S * shrink_S + tl.sum(weights_ST, 1)
        out_Sd = out_Sd * shrink_S[:, None]
        if EXACT:
            out_Sd += tl.dot(weights_ST, v_Td, input_precision="ieee")
        else:
            out_Sd += tl.dot(weights_ST.to(v_Td.dtype), v_Td)
        top_S = new_top_S
        page = next_page
    return top_S, sum_S, out_Sd


@triton.jit
def merged(top_S, sum_S, out_Sd, other_top_S, other_sum_S, other_Sd):
    """Two sums over different tokens as one; either may be over none, not both."""
    new_top_S = tl.maximum(top_S, other_top_S)
    shrink_S, other_shrink_S = tl.exp2(top_S - new_top_S), tl.exp2(other_top_S - new_top_S)
    new_sum_S = sum_S * shrink_S + other_sum_S * other_shrink_S
    return new_top_S, new_sum_S, out_Sd * shrink_S[:, None] + other_Sd * other_shrink_S[:, None]


@triton.jit
def leave(parts_ptr, stats_ptr, place_S, kept_S, top_S, sum_S, out_Sd, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Write a part to memory."""
    lane_d = tl.arange(0, PADDED)
    tl.store(stats_ptr + 2 * place_S, top_S, mask=kept_S)
    tl.store(stats_ptr + 2 * place_S + 1, sum_S, mask=kept_S)
    mask_Sd = kept_S[:, None] & (lane_d < SIZE)[None, :]
    tl.store(parts_ptr + place_S[:, None] * SIZE + lane_d[None, :], out_Sd, mask=mask_Sd)


@triton.jit
def joined(
    parts_ptr, stats_ptr, head_S, kept_S, slots, first, count,
    SIDE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """Sum of the parts in slots [first, first + count) of some heads, JOINED at a time, in their order."""
    lane_d, lane_J = tl.arange(0, PADDED), tl.arange(0, JOINED)
    top_S = tl.full((SIDE,), float("-inf"), tl.float32)
    sum_S = tl.zeros((SIDE,), tl.float32)
    out_Sd = tl.zeros((SIDE, PADDED), tl.float32)
    for start in range(0, count, JOINED):
        mask_SJ = kept_S[:, None] & (start + lane_J < count)[None, :]
        part_SJ = head_S[:, None] * slots + (first + start + lane_J)[None, :]
        top_SJ = tl.load(stats_ptr + 2 * part_SJ, mask=mask_SJ, other=float("-inf"))
        sum_SJ = tl.load(stats_ptr + 2 * part_SJ + 1, mask=mask_SJ, other=0.0)
        mask_SJd = mask_SJ[:, :, None] & (lane_d < SIZE)[None, None, :]
        parts_SJd = tl.load(parts_ptr + part_SJ[:, :, None] * SIZE + lane_d[None, None, :], mask=mask_SJd, other=0.0)
        new_top_S = tl.where(kept_S, tl.maximum(top_S, tl.max(top_SJ, 1)), 0.0)
        weight_SJ = tl.exp2(top_SJ - new_top_S[:, None])
        shrink_S = tl.exp2(top_S - new_top_S)
        sum_S = sum_S * shrink_S + tl.sum(sum_SJ * weight_SJ, 1)
        out_Sd = out_Sd * shrink_S[:, None] + tl.sum(parts_SJd * weight_SJ[:, :, None], 1)
        top_S = new_top_S
    return top_S, sum_S, out_Sd


@triton.jit
def joined_at_once(
    parts_ptr, stats_ptr, head_S, slots, first, count, SIZE: tl.constexpr, PADDED: tl.constexpr, JOINED: tl.constexpr
):
    """Sum of `count` parts, at most JOINED, in slots from `first` on, of heads that are all there, in their order, asked for together."""
    lane_d, lane_J = tl.arange(0, PADDED), tl.arange(0, JOINED)
    # A head's address, and distances from there that are known when this is compiled; and no loop, which would rescale what it has.
    place_S = head_S * slots + first
    from_SJ = (stats_ptr + 2 * place_S)[:, None] + 2 * lane_J[None, :]
    there_J = lane_J < count
    there_SJ, there_SJd = there_J[None, :], there_J[None, :, None] & (lane_d < SIZE)[None, None, :]
    from_SJd = (parts_ptr + place_S * SIZE)[:, None, None] + (lane_J[:, None] * SIZE + lane_d[None, :])[None, :, :]
    parts_SJd = tl.load(from_SJd, mask=there_SJd, other=0.0)
    top_SJ = tl.load(from_SJ, mask=there_SJ, other=float("-inf"))
    sum_SJ = tl.load(from_SJ + 1, mask=there_SJ, other=0.0)
    top_S = tl.max(top_SJ, 1)
    weight_SJ = tl.exp2(top_SJ - top_S[:, None])
    return top_S, tl.sum(sum_SJ * weight_SJ, 1), tl.sum(parts_SJd * weight_SJ[:, :, None], 1)


@triton.jit
def finish(
    out_ptr, parts_ptr, stats_ptr, head_S, kept_S, slots, together, top_S, sum_S, out_Sd,
    SHARED: tl.constexpr, SIDE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """Write the result of some heads: what they read with their group, in the first `together` slots, then what is their own."""
    if SHARED:
        if together > 0:
            group_top_S, group_sum_S, group_Sd = joined(
                parts_ptr, stats_ptr, head_S, kept_S, slots, 0, together, SIDE, SIZE, PADDED, JOINED // 2
            )
            top_S, sum_S, out_Sd = merged(group_top_S, group_sum_S, group_Sd, top_S, sum_S, out_Sd)
    lane_d = tl.arange(0, PADDED)
    out_Sd = out_Sd / tl.where(kept_S, sum_S, 1.0)[:, None]
    mask_Sd = kept_S[:, None] & (lane_d < SIZE)[None, :]
    tl.store(out_ptr + head_S[:, None] * SIZE + lane_d[None, :], out_Sd.to(out_ptr.dtype.element_ty), mask=mask_Sd)


@triton.jit
def stored(values_1d, dtype: tl.constexpr, IS_FP8: tl.constexpr):
    """Values in the type of a cache; too large ones saturate."""
    if IS_FP8:
        return tl.minimum(tl.maximum(values_1d.to(tl.float32), -448.0), 448.0).to(dtype)
    else:
        return values_1d.to(dtype)


@triton.jit
def fetch(
    k_ptr,
    v_ptr,
    page,
    tile,
    length,
    kv_head,
    page_stride,
    token_stride,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Ask for a tile of keys and values to be brought into the second-level cache."""
    token_T = tl.minimum(tile * TILE + tl.arange(0, TILE), tl.maximum(length - 1, 0)) % PAGE
    half_2 = tl.arange(0, 2) * (SIZE // 2)
    place_T2 = page * page_stride + (token_T.to(tl.int64) * token_stride)[:, None] + (kv_head * SIZE + half_2)[None, :]
    ask: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(ask, "=r,l", [(k_ptr + place_T2).to(tl.uint64)], dtype=tl.int32, is_pure=False, pack=1)
    tl.inline_asm_elementwise(ask, "=r,l", [(v_ptr + place_T2).to(tl.uint64)], dtype=tl.int32, is_pure=False, pack=1)
