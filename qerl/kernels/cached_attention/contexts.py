# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: SIM102 - what is known at compile time stands in an `if` of its own
"""The two Triton kernels of decode attention: each row's own context, and what the rows of a group read together.

Legend: see `device`; L rows of the batch, or groups, looked at together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qerl.kernels.cached_attention.device import (
    fetch,
    find,
    finish,
    joined_at_once,
    leave,
    load_heads,
    load_turns,
    merged,
    own_tiles,
    part_tiles,
    stored,
    turned,
    walk,
)
from qerl.kernels.overlap import begin, launch_next, wait


@triton.jit(do_not_specialize=["rows", "first", "most", "slots", "before_slots", "group_first", "group_most", "early"])
def attend(
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
    bias_ptr,
    shift_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    table_ptr,
    shared_ptr,
    out_ptr,
    parts_ptr,
    stats_ptr,
    arrived_ptr,
    scale,
    qkv_stride,
    rows,
    first,
    most,
    slots,
    before_slots,
    group_first,
    group_most,
    early,
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
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    LEAST: tl.constexpr,
    LONG: tl.constexpr,
    FETCHED: tl.constexpr,
    SPLIT: tl.constexpr,
    SHARED: tl.constexpr,
    JOINED: tl.constexpr,
    DTYPE: tl.constexpr,
    EXACT: tl.constexpr,
    K_FP8: tl.constexpr,
    V_FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Each row's context beyond what it reads with its group, the new token included; the last part to end joins all."""
    launch_next(OVERLAP)
    if early == 0:
        wait(OVERLAP)
    program = tl.program_id(0)
    pairs = rows * KV_HEADS
    # All further parts of long contexts, and then the first part of each row and head, in turn for as many programs as there are: who has
    # none of the former begins with one of the latter.
    further = 0
    if SPLIT:
        lane_L = tl.arange(0, LANES)
        _, _, tiles_L = own_tiles(lengths_ptr, shared_ptr, lane_L, lane_L < rows, SHARED, TILE, PAGED, PAGE)
        further_L = tl.zeros((LANES,), tl.int32)
        # Short contexts are whole, and the divisions are for nothing.
        if tl.max(tiles_L, 0) > tl.where(first == 1, LONG, LEAST):
            further_L = tl.maximum(tl.cdiv(tiles_L, part_tiles(tiles_L, first, most, LEAST, LONG)), 1) - 1
            further_L = tl.where(lane_L < rows, further_L, 0) * KV_HEADS
        further = tl.sum(further_L, 0)
    ahead = 0
    if SPLIT:
        # Where each program has one task at most, the first parts begin first: their new token makes them end last otherwise.
        ahead = tl.where(further + pairs <= tl.num_programs(0), pairs, 0)
    for listed in range(program, further + pairs, tl.num_programs(0)):
        task = tl.where(listed < ahead, listed + further, listed - ahead)
        row32 = (task - further) // KV_HEADS
        kv_head = (task - further) % KV_HEADS
        part = 0
        if SPLIT:
            if task < further:
                row32, rest = find(further_L, lane_L, task)
                kv_head = rest % KV_HEADS
                part = 1 + rest // KV_HEADS
        row = row32.to(tl.int64)
        length, before, tiles = own_tiles(lengths_ptr, shared_ptr, row, True, SHARED, TILE, PAGED, PAGE)
        together = 0
        if SHARED:
            if before > 0:
                together = tl.cdiv(before, part_tiles(before, group_first, group_most, LEAST, LONG))
        share = part_tiles(tiles, first, most, LEAST, LONG)
        working = 1
        if SPLIT:
            working = tl.maximum(tl.cdiv(tiles, share), 1)
        start = before + part * share
        stop = before + tiles
        if SPLIT:
            stop = tl.minimum(start + share, stop)
        line_ptr = table_ptr + row * table_stride
        if OVERLAP and PAGED:
            # Old keys and values, lengths and pages are not what the kernel in front writes.
            if early != 0:
                for tile in range(start, tl.minimum(start + FETCHED, stop)):
                    page = tl.load(line_ptr + tile * TILE // PAGE).to(tl.int64)
                    fetch(k_ptr, v_ptr, page, tile, length, kv_head, page_stride, token_stride, SIZE, TILE, PAGE)
        wait(OVERLAP)

        member_S = tl.arange(0, SIDE)
        lane_d = tl.arange(0, PADDED)
        row_1 = tl.zeros((1,), tl.int64) + row
        cos_1d, sin_1d = load_turns(cos_ptr, sin_ptr, row_1, lane_d, SIZE)
        low_Sd, high_Sd = load_heads(
            qkv_ptr, qkv_stride, row_1, kv_head * GROUP + member_S, member_S < GROUP, lane_d, SIZE
        )
        one_1 = tl.zeros((1,), tl.int32)
        of_k_1 = KV_HEADS * GROUP + kv_head + one_1
        k_low_1d, k_high_1d = load_heads(qkv_ptr, qkv_stride, row_1, of_k_1, one_1 == 0, lane_d, SIZE)
        there_1d = (lane_d < SIZE)[None, :]
        v_from = qkv_ptr + row * qkv_stride + (KV_HEADS * GROUP + KV_HEADS + kv_head) * SIZE
        v_1d = tl.load(v_from + lane_d[None, :], mask=there_1d, other=0.0)
        if bias_ptr is not None:
            v_bias = bias_ptr + (KV_HEADS * GROUP + KV_HEADS + kv_head) * SIZE + lane_d[None, :]
            v_1d = v_1d.to(tl.float32) + tl.load(v_bias, mask=there_1d, other=0.0).to(tl.float32)
        v_1d = v_1d.to(DTYPE)
        q_Sd = turned(
            low_Sd, high_Sd, cos_1d, sin_1d, q_weight_ptr, eps, q_z_ptr, q_z_stride, row_1, lane_d, bias_ptr, None,
            kv_head * GROUP + member_S, member_S < GROUP, NORMS, SIZE, DTYPE,
        )  # fmt: skip
        top_S, sum_S, out_Sd = walk(
            q_Sd, k_ptr, v_ptr, line_ptr, row, kv_head, start, stop, length, scale, page_stride, token_stride,
            SIDE, SIZE, PADDED, TILE, PAGED, PAGE, EXACT,
        )  # fmt: skip
        if part == 0:
            shift = None
            if bias_ptr is not None:
                shift = shift_ptr + kv_head * SIZE
            turned_1d = turned(
                k_low_1d, k_high_1d, cos_1d, sin_1d, k_weight_ptr, eps, k_z_ptr, k_z_stride, row_1, lane_d, bias_ptr, shift,
                of_k_1, one_1 == 0, NORMS, SIZE, DTYPE,
            )  # fmt: skip
            # What later steps will read is what this one sees.
            new_k_1d = stored(turned_1d, k_ptr.dtype.element_ty, K_FP8)
            new_v_1d = stored(v_1d, v_ptr.dtype.element_ty, V_FP8)
            page = row
            if PAGED:
                page = tl.load(line_ptr + length // PAGE).to(tl.int64)
            place_1d = (
                page * page_stride + (length % PAGE).to(tl.int64) * token_stride + kv_head * SIZE + lane_d[None, :]
            )
            tl.store(k_ptr + place_1d, new_k_1d, mask=there_1d)
            tl.store(v_ptr + place_1d, new_v_1d, mask=there_1d)
            score_S = tl.sum(q_Sd.to(tl.float32) * new_k_1d.to(tl.float32), 1) * scale
            new_Sd = tl.zeros((SIDE, PADDED), tl.float32) + new_v_1d.to(tl.float32)
            top_S, sum_S, out_Sd = merged(top_S, sum_S, out_Sd, score_S, tl.full((SIDE,), 1.0, tl.float32), new_Sd)

        head = row * (KV_HEADS * GROUP) + kv_head * GROUP
        if working == 1:
            finish(
                out_ptr, parts_ptr, stats_ptr, head + member_S, member_S < GROUP, slots, together, top_S, sum_S, out_Sd,
                SHARED, SIDE, SIZE, PADDED, JOINED,
            )  # fmt: skip
        elif SPLIT:
            place_S = (head + member_S) * slots + before_slots + part
            leave(parts_ptr, stats_ptr, place_S, member_S < GROUP, top_S, sum_S, out_Sd, SIZE, PADDED)
            # Eights of parts are joined by whoever ends last of them, and their sums by whoever ends last of those.
            eight = part // JOINED
            counter = arrived_ptr + (row32 * KV_HEADS + kv_head) * (1 + JOINED)
            tl.debug_barrier()
            arrived = tl.atomic_add(counter + 1 + eight, 1, sem="acq_rel", scope="gpu")
            if arrived == tl.minimum(working - eight * JOINED, JOINED) - 1:
                tl.store(counter + 1 + eight, 0)
                member_G = tl.arange(0, JOIN_SIDE)
                kept_G = member_G < GROUP
                head_G = head + member_G
                read_G = head + tl.minimum(member_G, GROUP - 1)
                of_eight = before_slots + eight * JOINED
                top_G, sum_G, out_Gd = joined_at_once(
                    parts_ptr, stats_ptr, read_G, slots, of_eight, working - eight * JOINED, SIZE, PADDED, JOINED
                )
                done = working <= JOINED
                if working > JOINED:
                    place_G = head_G * slots + before_slots + most + eight
                    leave(parts_ptr, stats_ptr, place_G, kept_G, top_G, sum_G, out_Gd, SIZE, PADDED)
                    eights = tl.cdiv(working, JOINED)
                    tl.debug_barrier()
                    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == eights - 1:
                        tl.store(counter, 0)
                        top_G, sum_G, out_Gd = joined_at_once(
                            parts_ptr, stats_ptr, read_G, slots, before_slots + most, eights, SIZE, PADDED, JOINED
                        )
                        done = eights > 0
                if done:
                    finish(
                        out_ptr, parts_ptr, stats_ptr, head_G, kept_G, slots, together, top_G, sum_G, out_Gd,
                        SHARED, JOIN_SIDE, SIZE, PADDED, JOINED,
                    )  # fmt: skip


@triton.jit(do_not_specialize=["groups", "first", "most", "slots"])
def attend_together(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    eps,
    q_z_ptr,
    q_z_stride,
    bias_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    shared_ptr,
    members_ptr,
    parts_ptr,
    stats_ptr,
    scale,
    qkv_stride,
    groups,
    first,
    most,
    slots,
    table_stride,
    page_stride,
    token_stride,
    NORMS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    SIDE: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    LEAST: tl.constexpr,
    LONG: tl.constexpr,
    DTYPE: tl.constexpr,
    EXACT: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """What the rows of a group read together, once for all of them: each row's part of it, in its first slots."""
    begin(OVERLAP)
    lane_L = tl.arange(0, LANES)
    lead_L = tl.load(members_ptr + lane_L * MEMBERS, mask=lane_L < groups, other=-1)
    tiles_L = tl.load(shared_ptr + lead_L, mask=lead_L >= 0, other=0) * (PAGE // TILE)
    parts_L = tl.where(tiles_L > 0, tl.cdiv(tiles_L, part_tiles(tiles_L, first, most, LEAST, LONG)), 0)
    for task in range(tl.program_id(0), tl.sum(parts_L, 0) * KV_HEADS, tl.num_programs(0)):
        group, rest = find(parts_L * KV_HEADS, lane_L, task)
        kv_head = rest % KV_HEADS
        part = rest // KV_HEADS
        lead = tl.load(members_ptr + group * MEMBERS).to(tl.int64)
        tiles = tl.load(shared_ptr + lead) * (PAGE // TILE)
        share = part_tiles(tiles, first, most, LEAST, LONG)
        start = part * share
        stop = tl.minimum(start + share, tiles)

        # A member's heads stand side by side, padded to a power of 2.
        side_S = tl.arange(0, SIDE)
        row_S = tl.load(members_ptr + group * MEMBERS + side_S // (SIDE // MEMBERS)).to(tl.int64)
        member_S = side_S % (SIDE // MEMBERS)
        kept_S = (row_S >= 0) & (member_S < GROUP)
        row_S = tl.maximum(row_S, 0)
        head_S = kv_head * GROUP + member_S
        lane_d = tl.arange(0, PADDED)
        cos_Sd, sin_Sd = load_turns(cos_ptr, sin_ptr, row_S, lane_d, SIZE)
        low_Sd, high_Sd = load_heads(qkv_ptr, qkv_stride, row_S, head_S, kept_S, lane_d, SIZE)
        q_Sd = turned(
            low_Sd, high_Sd, cos_Sd, sin_Sd, q_weight_ptr, eps, q_z_ptr, q_z_stride, row_S, lane_d, bias_ptr, None,
            head_S, kept_S, NORMS, SIZE, DTYPE,
        )  # fmt: skip
        top_S, sum_S, out_Sd = walk(
            q_Sd, k_ptr, v_ptr, table_ptr + lead * table_stride, lead, kv_head, start, stop, tiles * TILE, scale,
            page_stride, token_stride, SIDE, SIZE, PADDED, TILE, True, PAGE, EXACT,
        )  # fmt: skip
        place_S = (row_S * (KV_HEADS * GROUP) + head_S) * slots + part
        leave(parts_ptr, stats_ptr, place_S, kept_S, top_S, sum_S, out_Sd, SIZE, PADDED)
