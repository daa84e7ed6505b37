# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Decode attention in Triton, one launch: rotate, append, attend, split over the context, parts joined in fixed order.

Legend: B rows, H query heads, K key/value heads, G = H / K heads that share one, d head size, P pages, L tokens a page, N pages a
row has at most, S splits of a context.

One program works on (row, key/value head, split): its G query heads stand together on the row side of the matrix product (padded
to 16), so keys and values are read once for all of them. The new token never comes from the cache: the first split of a row rotates its
key, stores it with its value, and adds them to its running sums at the end, when the tiles are done. A split covers whole tiles, at least `LEAST_TILES` of them, so a
short context is one program's, and the other programs of its row end at once. Where several work, the one that ends last joins their parts, in
the order of the context and not of time. The most splits follow from B, K and the device alone, so one captured graph serves
every length; lengths and page numbers are read on the device. Softmax is in float32, base 2; weights are rounded to the type of the values
for the second product.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.cached_attention.rows import CacheRows
from qerl.kernels.cached_attention.storage import FP8
from qerl.kernels.overlap import begin, overlap
from qerl.kernels.rms_norm import NormNoise, noise_values
from qerl.kernels.rope import HeadNorms

TILE = 64
"""Positions per step of a program's loop."""
LEAST_TILES = 2
"""Fewest tiles of a split where a context has several."""
LARGEST_SPLITS = 32
PROGRAMS_PER_PROCESSOR = 2
MANY_PROGRAMS = 3
"""A multiprocessor with more programs than this hides the way of a tile by the others' work, and they keep one tile each in shared memory, not two."""
LOG2_E = 1.4426950408889634
_SIDE = 16
"""Least rows of a matrix product."""
_JOINED = 8
"""Parts that are read at once when they are joined."""


def splits_for(rows: int, kv_heads: int, processors: int) -> int:
    """Most parts of a context: as many as keep the device busy, up to 32."""
    return max(1, min(LARGEST_SPLITS, PROGRAMS_PER_PROCESSOR * processors // (rows * kv_heads)))


def cached_attention(
    qkv_BX: Tensor,
    rotation: tuple[Tensor, Tensor],
    heads: int,
    kv_heads: int,
    k_cache_PLKd: Tensor,
    v_cache_PLKd: Tensor,
    rows: CacheRows,
    scale: float,
    norms: HeadNorms | None = None,
    splits: int | None = None,
) -> Tensor:
    """See `qerl.kernels.cached_attention.cached_attention`; ``splits`` overrides the most parts of a context."""
    cos_Bd, sin_Bd = (table.contiguous() for table in rotation)
    batch, size = cos_Bd.shape
    group = heads // kv_heads
    device, table_BN = qkv_BX.device, rows.table_BN
    assert qkv_BX.stride(1) == 1 and qkv_BX.shape[1] == (heads + 2 * kv_heads) * size
    assert table_BN is None or rows.page_tokens % TILE == 0, "pages hold whole tiles"
    out_BHd = qkv_BX.new_empty(batch, heads, size)
    processors = _processors(device)
    if splits is None:
        splits = splits_for(batch, kv_heads, processors)
    few = batch * kv_heads * splits <= MANY_PROGRAMS * processors
    parts_BHSd = stats_BHS2 = arrived_BK = out_BHd
    if splits > 1:
        parts_BHSd = torch.empty(batch, heads, splits, size, dtype=torch.float32, device=device)
        stats_BHS2 = torch.empty(batch, heads, splits, 2, dtype=torch.float32, device=device)
        arrived_BK = _arrivals(device, triton.next_power_of_2(batch * kv_heads))
    weights: tuple[Tensor | None, ...] = (None, None)
    noises: tuple[tuple[Tensor | None, int], ...] = ((None, 0), (None, 0))
    if norms is not None:
        weights = norms.q_weight_d, norms.k_weight_d
        noises = _values(norms.q_noise), _values(norms.k_noise)
    _attend[(batch * kv_heads, splits)](
        qkv_BX,
        cos_Bd,
        sin_Bd,
        *weights,
        0.0 if norms is None else norms.eps,
        *noises[0],
        *noises[1],
        k_cache_PLKd,
        v_cache_PLKd,
        rows.lengths_B,
        rows.lengths_B if table_BN is None else table_BN,
        out_BHd,
        parts_BHSd,
        stats_BHS2,
        arrived_BK,
        scale * LOG2_E,
        qkv_BX.stride(0),
        splits,
        0 if table_BN is None else table_BN.stride(0),
        k_cache_PLKd.stride(0),
        k_cache_PLKd.stride(1),
        NORMS=norms is not None,
        KV_HEADS=kv_heads,
        GROUP=group,
        SIDE=max(_SIDE, triton.next_power_of_2(group)),
        JOIN_SIDE=triton.next_power_of_2(group),
        SIZE=size,
        PADDED=triton.next_power_of_2(size),
        TILE=TILE,
        PAGED=table_BN is not None,
        PAGE=rows.page_tokens,
        LEAST=LEAST_TILES,
        SPLIT=splits > 1,
        JOINED=_JOINED,
        EXACT=qkv_BX.dtype == torch.float32,
        K_FP8=k_cache_PLKd.dtype == FP8,
        V_FP8=v_cache_PLKd.dtype == FP8,
        num_warps=4,
        # Tiles of float32 in several stages would not fit the shared memory of smaller devices.
        num_stages=1 if qkv_BX.dtype == torch.float32 else 3 if few else 2,
        enable_fp_fusion=False,
        **overlap(device),
    )
    return out_BHd


def _values(noise: NormNoise | None) -> tuple[Tensor | None, int]:
    """z and the distance of its rows."""
    z = noise_values(noise)
    if z is None:
        return None, 0
    z = z.contiguous()
    return z, z.shape[-1] if z.dim() == 2 and len(z) > 1 else 0


@cache
def _arrivals(device: torch.device, count: int) -> Tensor:
    """How many splits of each row and head have ended; whoever joins them puts it back to 0. Kept, since captured steps use it."""
    return torch.zeros(count, dtype=torch.int32, device=device)


@cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of the device; 1 on the CPU, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _scaled(low_Nd, high_Nd, weight_ptr, z_ptr, z_stride, row, lane_d, swapped_d, eps, SIZE: tl.constexpr):
    """RMSNorm of heads: (values, values of the swapped channels), rounded to the type of the projections."""
    inside_d = lane_d < SIZE
    wide_low_Nd, wide_high_Nd = low_Nd.to(tl.float32), high_Nd.to(tl.float32)
    r_N1 = (1.0 / tl.sqrt_rn(tl.sum(wide_low_Nd * wide_low_Nd, 1) / SIZE + eps))[:, None]
    scale_d = tl.load(weight_ptr + lane_d, mask=inside_d, other=0.0).to(tl.float32)
    swapped_scale_d = tl.load(weight_ptr + swapped_d, mask=inside_d, other=0.0).to(tl.float32)
    if z_ptr is not None:
        scale_d += tl.load(z_ptr + row * z_stride + lane_d, mask=inside_d, other=0.0).to(tl.float32)
        swapped_scale_d += tl.load(z_ptr + row * z_stride + swapped_d, mask=inside_d, other=0.0).to(tl.float32)
    normed_Nd = (wide_low_Nd * r_N1 * scale_d[None, :]).to(low_Nd.dtype)
    return normed_Nd, (wide_high_Nd * r_N1 * swapped_scale_d[None, :]).to(low_Nd.dtype)


@triton.jit
def _stored(values_1d, dtype: tl.constexpr, IS_FP8: tl.constexpr):
    """Values in the type of a cache; too large ones saturate."""
    if IS_FP8:
        return tl.minimum(tl.maximum(values_1d.to(tl.float32), -448.0), 448.0).to(dtype)
    else:
        return values_1d.to(dtype)


@triton.jit(do_not_specialize=["splits"])  # compiled once for all numbers of rows
def _attend(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    q_z_ptr,
    q_z_stride,
    k_z_ptr,
    k_z_stride,
    k_ptr,
    v_ptr,
    lengths_ptr,
    table_ptr,
    out_ptr,
    parts_ptr,
    stats_ptr,
    arrived_ptr,
    scale,
    qkv_stride,
    splits,
    table_stride,
    page_stride,
    token_stride,
    NORMS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIDE: tl.constexpr,
    JOIN_SIDE: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    LEAST: tl.constexpr,
    SPLIT: tl.constexpr,
    JOINED: tl.constexpr,
    EXACT: tl.constexpr,
    K_FP8: tl.constexpr,
    V_FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    begin(OVERLAP)
    row = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    if not PAGED:
        length = tl.minimum(length, PAGE - 1)
    tiles = tl.cdiv(length, TILE)
    working = 1
    first = 0
    last = tiles
    if SPLIT:
        share = tl.maximum(tl.cdiv(tiles, splits), LEAST)
        working = tl.maximum(tl.cdiv(tiles, share), 1)
        if split >= working:
            return
        first = split * share
        last = tl.minimum(first + share, tiles)
    # The number of the next page is read a turn ahead, or its tile could not be on its way while this one is worked on.
    table_ptr += row * table_stride
    page = row
    if PAGED:
        page = tl.load(table_ptr + first * TILE // PAGE).to(tl.int64)

    member_G = tl.arange(0, SIDE)
    lane_d = tl.arange(0, PADDED)
    lane_N = tl.arange(0, TILE)
    inside_d = lane_d < SIZE
    swapped_d = tl.where(lane_d < SIZE // 2, lane_d + SIZE // 2, lane_d - SIZE // 2)
    cos_1d = tl.load(cos_ptr + row * SIZE + lane_d, mask=inside_d, other=0.0)[None, :]
    sin_1d = tl.load(sin_ptr + row * SIZE + lane_d, mask=inside_d, other=0.0)[None, :]
    there_Gd = (member_G < GROUP)[:, None] & inside_d[None, :]
    q_from = qkv_ptr + row * qkv_stride + (kv_head * GROUP + member_G)[:, None] * SIZE
    q_Gd = tl.load(q_from + lane_d[None, :], mask=there_Gd, other=0.0)
    q_swapped_Gd = tl.load(q_from + swapped_d[None, :], mask=there_Gd, other=0.0)
    if NORMS:
        q_Gd, q_swapped_Gd = _scaled(
            q_Gd, q_swapped_Gd, q_weight_ptr, q_z_ptr, q_z_stride, row, lane_d, swapped_d, eps, SIZE
        )
    q_Gd = (q_Gd.to(tl.float32) * cos_1d + q_swapped_Gd.to(tl.float32) * sin_1d).to(qkv_ptr.dtype.element_ty)

    top_G = tl.full((SIDE,), float("-inf"), tl.float32)
    sum_G = tl.zeros((SIDE,), tl.float32)
    out_Gd = tl.zeros((SIDE, PADDED), tl.float32)
    one_d = lane_d[None, :] + tl.zeros((1, PADDED), tl.int32)
    there_1d = inside_d[None, :]
    k_from = qkv_ptr + row * qkv_stride + (KV_HEADS * GROUP + kv_head) * SIZE
    k_1d = tl.load(k_from + one_d, mask=there_1d, other=0.0)
    k_swapped_1d = tl.load(k_from + swapped_d[None, :], mask=there_1d, other=0.0)
    v_1d = tl.load(k_from + KV_HEADS * SIZE + one_d, mask=there_1d, other=0.0)
    for tile in range(first, last):
        start = tile * TILE
        next_page = row
        if PAGED:
            next_page = tl.load(table_ptr + (start + TILE) // PAGE, mask=tile + 1 < last, other=0).to(tl.int64)
        base = page * page_stride + (start % PAGE).to(tl.int64) * token_stride
        inside_N = start + lane_N < length
        place_Nd = base + kv_head * SIZE + lane_N[:, None] * token_stride + lane_d[None, :]
        mask_Nd = inside_N[:, None] & inside_d[None, :]
        k_Nd = tl.load(k_ptr + place_Nd, mask=mask_Nd, other=0.0).to(q_Gd.dtype)
        v_Nd = tl.load(v_ptr + place_Nd, mask=mask_Nd, other=0.0).to(q_Gd.dtype)
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
        page = next_page

    if split == 0:
        if NORMS:
            k_1d, k_swapped_1d = _scaled(
                k_1d, k_swapped_1d, k_weight_ptr, k_z_ptr, k_z_stride, row, lane_d, swapped_d, eps, SIZE
            )
        k_1d = (k_1d.to(tl.float32) * cos_1d + k_swapped_1d.to(tl.float32) * sin_1d).to(qkv_ptr.dtype.element_ty)
        # What later steps will read is what this one sees.
        new_k_1d, new_v_1d = _stored(k_1d, k_ptr.dtype.element_ty, K_FP8), _stored(v_1d, v_ptr.dtype.element_ty, V_FP8)
        page = row
        if PAGED:
            page = tl.load(table_ptr + length // PAGE).to(tl.int64)
        place_1d = page * page_stride + (length % PAGE).to(tl.int64) * token_stride + kv_head * SIZE + one_d
        tl.store(k_ptr + place_1d, new_k_1d, mask=there_1d)
        tl.store(v_ptr + place_1d, new_v_1d, mask=there_1d)
        score_G = tl.sum(q_Gd.to(tl.float32) * new_k_1d.to(tl.float32), 1) * scale
        new_top_G = tl.maximum(top_G, score_G)
        weight_G, shrink_G = tl.exp2(score_G - new_top_G), tl.exp2(top_G - new_top_G)
        sum_G = sum_G * shrink_G + weight_G
        out_Gd = out_Gd * shrink_G[:, None] + weight_G[:, None] * new_v_1d.to(tl.float32)
        top_G = new_top_G

    head_G = row * (KV_HEADS * GROUP) + kv_head * GROUP + member_G
    if working == 1:
        result_Gd = (out_Gd / sum_G[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + head_G[:, None] * SIZE + lane_d[None, :], result_Gd, mask=there_Gd)
    elif SPLIT:
        part_G = head_G * splits + split
        kept_G = member_G < GROUP
        tl.store(stats_ptr + 2 * part_G, top_G, mask=kept_G)
        tl.store(stats_ptr + 2 * part_G + 1, sum_G, mask=kept_G)
        tl.store(parts_ptr + part_G[:, None] * SIZE + lane_d[None, :], out_Gd, mask=there_Gd)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel", scope="gpu") == working - 1:
            tl.store(arrived_ptr + tl.program_id(0), 0)
            _join(
                parts_ptr, stats_ptr, out_ptr, row * (KV_HEADS * GROUP) + kv_head * GROUP, working, splits,
                GROUP, JOIN_SIDE, SIZE, PADDED, JOINED,
            )  # fmt: skip


@triton.jit
def _join(
    parts_ptr,
    stats_ptr,
    out_ptr,
    first_head,
    working,
    splits,
    GROUP: tl.constexpr,
    SIDE: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    JOINED: tl.constexpr,
) -> None:
    """Sum of the parts of G heads, a few parts at a time, each weighted by its share of the softmax."""
    member_G = tl.arange(0, SIDE)
    lane_d = tl.arange(0, PADDED)
    lane_J = tl.arange(0, JOINED)
    head_G = first_head + member_G
    kept_G = member_G < GROUP
    top_G = tl.full((SIDE,), float("-inf"), tl.float32)
    sum_G = tl.zeros((SIDE,), tl.float32)
    out_Gd = tl.zeros((SIDE, PADDED), tl.float32)
    for start in range(0, working, JOINED):
        split_J = start + lane_J
        mask_GJ = kept_G[:, None] & (split_J < working)[None, :]
        part_GJ = head_G[:, None] * splits + split_J[None, :]
        top_GJ = tl.load(stats_ptr + 2 * part_GJ, mask=mask_GJ, other=float("-inf"))
        sum_GJ = tl.load(stats_ptr + 2 * part_GJ + 1, mask=mask_GJ, other=0.0)
        mask_GJd = mask_GJ[:, :, None] & (lane_d < SIZE)[None, None, :]
        parts_GJd = tl.load(parts_ptr + part_GJ[:, :, None] * SIZE + lane_d[None, None, :], mask=mask_GJd, other=0.0)
        new_top_G = tl.where(kept_G, tl.maximum(top_G, tl.max(top_GJ, 1)), 0.0)
        weight_GJ = tl.exp2(top_GJ - new_top_G[:, None])
        shrink_G = tl.exp2(top_G - new_top_G)
        sum_G = sum_G * shrink_G + tl.sum(sum_GJ * weight_GJ, 1)
        out_Gd = out_Gd * shrink_G[:, None] + tl.sum(parts_GJd * weight_GJ[:, :, None], 1)
        top_G = new_top_G
    out_Gd = out_Gd / tl.where(kept_G, sum_G, 1.0)[:, None]
    place_Gd = head_G[:, None] * SIZE + lane_d[None, :]
    tl.store(out_ptr + place_Gd, out_Gd.to(out_ptr.dtype.element_ty), mask=kept_G[:, None] & (lane_d < SIZE)[None, :])
