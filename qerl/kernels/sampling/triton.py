# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Sampling in three small Triton kernels: one pass over the logits, one program a row, and the books.

Legend: B rows, V vocabulary, N blocks of 128 tokens.

`draw_token` reads the logits once: each block leaves its largest logit m and the sum of exp((logit - m) / T). One program a row
brings the sums to the row's largest logit in float64, finds the block, reads that block again and finds the token. The rule is
that of `reference`; only the order of rounding differs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.overlap import begin, overlap
from qerl.kernels.sampling.reference import BLOCK
from qerl.kernels.sampling.truncation import truncate

__all__ = ["advance_rows", "draw_token", "keyed_uniforms", "truncate"]

BLOCKS_PER_PROGRAM = 16


def draw_token(logits_BV: Tensor, uniform_B: Tensor | None, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """See `qerl.kernels.sampling.draw_token`."""
    rows, vocabulary = logits_BV.shape
    device = logits_BV.device
    greedy = uniform_B is None
    if not isinstance(temperature, Tensor):
        temperature = torch.tensor([1.0 if greedy else temperature], dtype=torch.float64, device=device)
    count = -(-vocabulary // BLOCK)
    stats_2BN = torch.empty(2, rows, count, dtype=torch.float32, device=device)
    tokens_B = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs_B = torch.empty(rows, dtype=torch.float32, device=device)
    _block_stats[(rows, triton.cdiv(count, BLOCKS_PER_PROGRAM))](
        logits_BV,
        temperature,
        stats_2BN,
        rows,
        vocabulary,
        count,
        logits_BV.stride(0),
        GREEDY=greedy,
        BLOCK=BLOCK,
        GROUP=BLOCKS_PER_PROGRAM,
        num_warps=4,
        **overlap(device),
    )
    _pick[(rows,)](
        logits_BV,
        temperature,
        stats_2BN,
        logprobs_B if uniform_B is None else uniform_B,
        tokens_B,
        logprobs_B,
        rows,
        vocabulary,
        count,
        logits_BV.stride(0),
        GREEDY=greedy,
        BLOCK=BLOCK,
        PADDED=triton.next_power_of_2(count),
        num_warps=4,
        **overlap(device),
    )
    return tokens_B, logprobs_B


def keyed_uniforms(key_3: Tensor, positions_B: Tensor, sample_keys_B: Tensor) -> Tensor:
    """See `qerl.kernels.sampling.keyed_uniforms`."""
    rows = len(positions_B)
    uniform_B = torch.empty(rows, dtype=torch.float32, device=key_3.device)
    _uniforms[(triton.cdiv(rows, 128),)](
        key_3, positions_B, sample_keys_B, uniform_B, rows, LANES=128, num_warps=1, **overlap(key_3.device)
    )
    return uniform_B


def advance_rows(tokens_B: Tensor, behavior_B: Tensor, sampler_B: Tensor, **books: Tensor) -> None:
    """See `qerl.kernels.sampling.advance_rows`."""
    rows, eos_E, tokens_WR = len(tokens_B), books["eos_E"], books["tokens_WR"]
    # One program, so that the cursor moves after all rows have read it.
    _advance[(1,)](
        tokens_B,
        behavior_B,
        sampler_B,
        books["last_token_R"],
        books["length_R"],
        books["count_R"],
        books["limit_R"],
        books["alive_R"],
        books["cursor_1"],
        eos_E,
        tokens_WR,
        books["logprobs_2WR"],
        rows,
        len(eos_E),
        tokens_WR.shape[0] * tokens_WR.shape[1],
        tokens_WR.shape[1],
        LANES=_lanes(rows),
        num_warps=4,
        **overlap(tokens_B.device),
    )


def _lanes(rows: int) -> int:
    """Lanes that hold a number for each of so many rows; few different ones, since kernels are compiled for each, and a warp has 32 anyway."""
    return next((lanes for lanes in (64, 256) if rows <= lanes), triton.next_power_of_2(rows))


@triton.jit(do_not_specialize=["rows"])
def _block_stats(
    logits_ptr,
    temperature_ptr,
    stats_ptr,
    rows,
    vocabulary,
    count,
    stride,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    block_G = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    token_GC = block_G[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    logits_GC = tl.load(logits_ptr + row * stride + token_GC, mask=token_GC < vocabulary, other=float("-inf"))
    top_G = tl.max(logits_GC, 1)
    gap_GC = logits_GC - top_G[:, None]
    if not GREEDY:
        gap_GC = gap_GC / tl.load(temperature_ptr).to(tl.float32)
    # -inf - -inf is NaN in a block of impossible tokens; a NaN among the logits must stay one.
    weights_GC = tl.where(logits_GC == float("-inf"), 0.0, tl.exp(gap_GC))
    kept_G = block_G < count
    tl.store(stats_ptr + row * count + block_G, top_G, mask=kept_G)
    tl.store(stats_ptr + (rows + row) * count + block_G, tl.sum(weights_GC, 1), mask=kept_G)


@triton.jit
def first_above(weights_N, index_N, target, SIZE: tl.constexpr):
    """Index of the first positive weight whose cumulative sum exceeds the target (else of the last sum), and the rest."""
    ends_N = tl.cumsum(weights_N, 0)
    ends_N = tl.where(weights_N > 0, ends_N, -1.0)
    last = tl.max(ends_N, 0)
    reached_N = (ends_N > target) | (ends_N == last)
    index = tl.min(tl.where(reached_N, index_N, SIZE - 1), 0)
    before = tl.sum(tl.where(index_N == index, ends_N - weights_N, 0.0), 0)
    return index, target - before


@triton.jit(do_not_specialize=["rows"])
def _pick(
    logits_ptr,
    temperature_ptr,
    stats_ptr,
    uniform_ptr,
    tokens_ptr,
    logprobs_ptr,
    rows,
    vocabulary,
    count,
    stride,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    index_N = tl.arange(0, PADDED)
    inside_N = index_N < count
    top_N = tl.load(stats_ptr + row * count + index_N, mask=inside_N, other=float("-inf"))
    sum_N = tl.load(stats_ptr + (rows + row) * count + index_N, mask=inside_N, other=0.0)
    top = tl.max(top_N, 0)
    inverse = 1.0
    if not GREEDY:
        inverse = 1.0 / tl.load(temperature_ptr)
    scale_N = tl.exp((top_N - top).to(tl.float64) * inverse)
    weights_N = tl.where(sum_N == 0.0, 0.0, sum_N.to(tl.float64) * scale_N)
    total = tl.sum(weights_N, 0)
    if GREEDY:
        block = tl.min(tl.where(top_N == top, index_N, PADDED - 1), 0)
        rest = total
    else:
        block, rest = first_above(weights_N, index_N, tl.load(uniform_ptr + row).to(tl.float64) * total, PADDED)
    block = tl.minimum(block, count - 1)
    lane_C = tl.arange(0, BLOCK)
    token_C = block * BLOCK + lane_C
    logits_C = tl.load(logits_ptr + row * stride + token_C, mask=token_C < vocabulary, other=float("-inf"))
    if GREEDY:
        lane = tl.min(tl.where(logits_C == top, lane_C, BLOCK - 1), 0)
    else:
        gap_C = (logits_C - top) / tl.load(temperature_ptr).to(tl.float32)
        lane, rest = first_above(tl.exp(gap_C).to(tl.float64), lane_C, rest, BLOCK)
    token = tl.minimum(block * BLOCK + lane, vocabulary - 1)
    logit = tl.load(logits_ptr + row * stride + token)
    logprob = (logit - top).to(tl.float64) * inverse - tl.log(total)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, logprob.to(tl.float32))


@triton.jit(do_not_specialize=["rows"])
def _uniforms(
    key_ptr, positions_ptr, sample_keys_ptr, uniform_ptr, rows, LANES: tl.constexpr, OVERLAP: tl.constexpr
) -> None:
    begin(OVERLAP)
    row_L = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask_L = row_L < rows
    key = tl.load(key_ptr).to(tl.uint64) | (tl.load(key_ptr + 1).to(tl.uint64) << 32)
    position_L = tl.load(positions_ptr + row_L, mask=mask_L, other=0).to(tl.uint32)
    sample_L = tl.load(sample_keys_ptr + row_L, mask=mask_L, other=0).to(tl.uint32)
    zero_L = position_L * 0
    rollout_L = zero_L + tl.load(key_ptr + 2).to(tl.uint32)
    word_L, _, _, _ = tl.philox(key, position_L, sample_L, rollout_L, zero_L)
    uniform_L = ((word_L >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    tl.store(uniform_ptr + row_L, uniform_L, mask=mask_L)


@triton.jit(do_not_specialize=["rows"])
def _advance(
    tokens_ptr,
    behavior_ptr,
    sampler_ptr,
    last_token_ptr,
    length_ptr,
    count_ptr,
    limit_ptr,
    alive_ptr,
    cursor_ptr,
    eos_ptr,
    tokens_out_ptr,
    logprobs_out_ptr,
    rows,
    eos,
    plane,
    width,
    LANES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    begin(OVERLAP)
    row_L = tl.arange(0, LANES)
    mask_L = row_L < rows
    cursor = tl.load(cursor_ptr)
    alive_L = tl.load(alive_ptr + row_L, mask=mask_L, other=0) != 0
    token_L = tl.load(tokens_ptr + row_L, mask=mask_L, other=0)
    last_L = tl.load(last_token_ptr + row_L, mask=mask_L, other=0)
    one_L = alive_L.to(tl.int64)
    length_L = tl.load(length_ptr + row_L, mask=mask_L, other=0) + one_L
    count_L = tl.load(count_ptr + row_L, mask=mask_L, other=0) + one_L
    limit_L = tl.load(limit_ptr + row_L, mask=mask_L, other=0)
    place_L = cursor * width + row_L
    tl.store(tokens_out_ptr + place_L, tl.where(alive_L, token_L, -1).to(tl.int32), mask=mask_L)
    behavior_L = tl.load(behavior_ptr + row_L, mask=mask_L, other=0.0)
    tl.store(logprobs_out_ptr + place_L, behavior_L, mask=mask_L)
    sampler_L = tl.load(sampler_ptr + row_L, mask=mask_L, other=0.0)
    tl.store(logprobs_out_ptr + plane + place_L, sampler_L, mask=mask_L)
    tl.store(last_token_ptr + row_L, tl.where(alive_L, token_L, last_L), mask=mask_L)
    tl.store(length_ptr + row_L, length_L, mask=mask_L)
    tl.store(count_ptr + row_L, count_L, mask=mask_L)
    ended_L = count_L >= limit_L
    for index in range(eos):
        ended_L = ended_L | (token_L == tl.load(eos_ptr + index))
    tl.store(alive_ptr + row_L, (alive_L & (ended_L == 0)).to(tl.int64), mask=mask_L)
    tl.debug_barrier()
    tl.store(cursor_ptr, cursor + 1)
