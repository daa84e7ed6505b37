# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Decode attention in Triton: one query a row against its pages of the cache, split over the context, parts joined in fixed order.

Legend: B rows, H query heads, K key/value heads, G = H / K heads that share one, d head size, P pages, L tokens a page, N pages a
row has at most, S splits of a context.

One program works on (row, key/value head, split): its G query heads stand together on the row side of the matrix product (padded
to 16), so keys and values are read once for all of them. The number of splits follows from B, K and the device alone, so one
captured graph serves every length; lengths and page numbers are read on the device. A split covers whole tiles; one without work
leaves weight 0. Softmax is in float32, base 2; weights are rounded to the type of the values for the second product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64
"""Positions per step of a program's loop."""
LARGEST_SPLITS = 64
PROGRAMS_PER_PROCESSOR = 4
LOG2_E = 1.4426950408889634
_SIDE = 16
"""Least rows of a matrix product."""


def splits_for(rows: int, kv_heads: int, processors: int) -> int:
    """Parts of each context: enough programs to fill the device, a power of two up to 64."""
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * processors, rows * kv_heads)
    return min(LARGEST_SPLITS, triton.next_power_of_2(wanted))


def cached_attention(
    q_BHd: Tensor,
    k_cache_PLKd: Tensor,
    v_cache_PLKd: Tensor,
    lengths_B: Tensor,
    scale: float,
    table_BN: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """See `qerl.kernels.cached_attention.cached_attention`; ``splits`` overrides the number of parts."""
    rows, heads, size = q_BHd.shape
    page, kv_heads = k_cache_PLKd.shape[1:3]
    group = heads // kv_heads
    assert k_cache_PLKd.stride() == v_cache_PLKd.stride() and k_cache_PLKd.stride()[2:] == (size, 1)
    assert table_BN is None or page % TILE == 0, "pages hold whole tiles"
    q_BHd = q_BHd.contiguous()
    out_BHd = torch.empty_like(q_BHd)
    if splits is None:
        splits = splits_for(rows, kv_heads, _processors(q_BHd.device))
    parts_BHSd = stats_2BHS = out_BHd
    if splits > 1:
        parts_BHSd = torch.empty(rows, heads, splits, size, dtype=torch.float32, device=q_BHd.device)
        stats_2BHS = torch.empty(2, rows, heads, splits, dtype=torch.float32, device=q_BHd.device)
    padded = triton.next_power_of_2(size)
    _attend[(rows * kv_heads, splits)](
        q_BHd,
        k_cache_PLKd,
        v_cache_PLKd,
        lengths_B,
        lengths_B if table_BN is None else table_BN,
        out_BHd,
        parts_BHSd,
        stats_2BHS,
        scale * LOG2_E,
        rows,
        0 if table_BN is None else table_BN.stride(0),
        k_cache_PLKd.stride(0),
        k_cache_PLKd.stride(1),
        page,
        KV_HEADS=kv_heads,
        GROUP=group,
        SIDE=max(_SIDE, triton.next_power_of_2(group)),
        SIZE=size,
        PADDED=padded,
        TILE=TILE,
        SPLITS=splits,
        PAGED=table_BN is not None,
        EXACT=q_BHd.dtype == torch.float32,
        num_warps=4,
        # Tiles of float32 in several stages would not fit the shared memory of smaller devices.
        num_stages=1 if q_BHd.dtype == torch.float32 else 3,
    )
    if splits > 1:
        _join[(rows * heads,)](
            parts_BHSd,
            stats_2BHS,
            out_BHd,
            rows * heads * splits,
            SIZE=size,
            PADDED=padded,
            SPLITS=splits,
            num_warps=2,
        )
    return out_BHd


def _processors(device: torch.device) -> int:
    """Multiprocessors of the device; 1 on the CPU, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    table_ptr,
    out_ptr,
    parts_ptr,
    stats_ptr,
    scale,
    rows,
    table_stride,
    page_stride,
    token_stride,
    page_tokens,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIDE: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PAGED: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    row = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    tiles = tl.cdiv(length, TILE)
    share = tl.cdiv(tiles, SPLITS)
    first = split * share
    last = tl.minimum(first + share, tiles)

    member_G = tl.arange(0, SIDE)
    lane_d = tl.arange(0, PADDED)
    lane_N = tl.arange(0, TILE)
    head_G = row * (KV_HEADS * GROUP) + kv_head * GROUP + member_G
    there_Gd = (member_G < GROUP)[:, None] & (lane_d < SIZE)[None, :]
    q_Gd = tl.load(q_ptr + head_G[:, None] * SIZE + lane_d[None, :], mask=there_Gd, other=0.0)

    top_G = tl.full((SIDE,), float("-inf"), tl.float32)
    sum_G = tl.zeros((SIDE,), tl.float32)
    out_Gd = tl.zeros((SIDE, PADDED), tl.float32)
    for tile in range(first, last):
        start = tile * TILE
        if PAGED:
            page = tl.load(table_ptr + row * table_stride + start // page_tokens).to(tl.int64)
            base = page * page_stride + (start % page_tokens).to(tl.int64) * token_stride
        else:
            base = row * page_stride + start.to(tl.int64) * token_stride
        inside_N = start + lane_N < length
        place_Nd = base + kv_head * SIZE + lane_N[:, None] * token_stride + lane_d[None, :]
        mask_Nd = inside_N[:, None] & (lane_d < SIZE)[None, :]
        k_Nd = tl.load(k_ptr + place_Nd, mask=mask_Nd, other=0.0)
        v_Nd = tl.load(v_ptr + place_Nd, mask=mask_Nd, other=0.0)
        if EXACT:
            scores_GN = tl.dot(q_Gd, tl.trans(k_Nd), input_precision="ieee") * scale
        else:
            scores_GN = tl.dot(q_Gd, tl.trans(k_Nd)) * scale
        scores_GN = tl.where(inside_N[None, :], scores_GN, float("-inf"))
        new_top_G = tl.maximum(top_G, tl.max(scores_GN, 1))
        weights_GN = tl.exp2(scores_GN - new_top_G[:, None])
        shrink_G = tl.exp2(top_G - new_top_G)
        sum_G = sum_G * shrink_G + tl.sum(weights_GN, 1)
        out_Gd = out_Gd * shrink_G[:, None]
        if EXACT:
            out_Gd += tl.dot(weights_GN, v_Nd, input_precision="ieee")
        else:
            out_Gd += tl.dot(weights_GN.to(v_Nd.dtype), v_Nd)
        top_G = new_top_G

    if SPLITS == 1:
        out_Gd = out_Gd / tl.where(sum_G == 0.0, 1.0, sum_G)[:, None]
        tl.store(out_ptr + head_G[:, None] * SIZE + lane_d[None, :], out_Gd.to(out_ptr.dtype.element_ty), mask=there_Gd)
    else:
        part_G = head_G * SPLITS + split
        kept_G = member_G < GROUP
        tl.store(stats_ptr + part_G, top_G, mask=kept_G)
        tl.store(stats_ptr + rows * (KV_HEADS * GROUP * SPLITS) + part_G, sum_G, mask=kept_G)
        if first < last:
            tl.store(parts_ptr + part_G[:, None] * SIZE + lane_d[None, :], out_Gd, mask=there_Gd)


@triton.jit
def _join(
    parts_ptr,
    stats_ptr,
    out_ptr,
    plane,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    head = tl.program_id(0).to(tl.int64)
    part_S = head * SPLITS + tl.arange(0, SPLITS)
    lane_d = tl.arange(0, PADDED)
    top_S = tl.load(stats_ptr + part_S)
    sum_S = tl.load(stats_ptr + plane + part_S)
    worked_S = sum_S > 0.0
    top = tl.max(top_S, 0)
    scale_S = tl.where(worked_S, tl.exp2(top_S - top), 0.0)
    total = tl.sum(sum_S * scale_S, 0)
    mask_Sd = worked_S[:, None] & (lane_d < SIZE)[None, :]
    parts_Sd = tl.load(parts_ptr + part_S[:, None] * SIZE + lane_d[None, :], mask=mask_Sd, other=0.0)
    out_d = tl.sum(parts_Sd * scale_S[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + head * SIZE + lane_d, out_d.to(out_ptr.dtype.element_ty), mask=lane_d < SIZE)
