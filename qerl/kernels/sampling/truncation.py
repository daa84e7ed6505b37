# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Top-k, top-p and min-p in Triton without sorting: the least logit that is kept is found by bisection.

Legend: B rows, V vocabulary, C tokens of a chunk, J bounds that are tried at once, N candidates.

One program has a row. How many tokens, or how much weight, lies at or above a bound only falls as the bound rises. One pass measures it at 16
logits below the largest; the bound with just enough lies between two of them. The tokens between these, few as a rule, are
gathered in vocabulary order and bisected in registers; too many of them are measured by passes over the row instead. Floats in their order
are integers in theirs, once the bits of negative ones are flipped, so bisection ends at one value. Tokens are ordered by logit, where the
reference orders by weight: they differ only where two logits round to one weight.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.overlap import begin, overlap

CHUNK, MOST = 4096, 4096
"""Tokens of a chunk, and candidates that are held in registers."""
LADDER = 1.0
"""Distance of the logits that the first pass tries, in units of the temperature."""


def truncate(
    logits_BV: Tensor, temperature: float | Tensor, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """See `qerl.kernels.sampling.truncate`."""
    rows, vocabulary = logits_BV.shape
    device = logits_BV.device
    if not isinstance(temperature, Tensor):
        temperature = torch.tensor([temperature], dtype=torch.float64, device=device)
    kept_BV = torch.empty_like(logits_BV)
    share_B = torch.empty(rows, dtype=torch.float32, device=device)
    _truncate[(rows,)](
        logits_BV,
        temperature,
        torch.empty(rows, MOST, dtype=torch.float32, device=device),
        kept_BV,
        share_B,
        vocabulary,
        logits_BV.stride(0),
        kept_BV.stride(0),
        top_k,
        top_p,
        top_p - struct.unpack("f", struct.pack("f", top_p))[0],
        min_p,
        TOP_K=0 < top_k < vocabulary,
        TOP_P=top_p < 1,
        MIN_P=min_p > 0,
        LADDER=LADDER,
        CHUNK=CHUNK,
        MOST=MOST,
        num_warps=16,
        **overlap(device),
    )
    return kept_BV, share_B


@triton.jit
def _ordered(logits):
    """int32 in the order of the logits."""
    bits = logits.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weights(logits, top, temperature):
    return tl.where(logits == float("-inf"), 0.0, tl.exp((logits - top) / temperature))


@triton.jit
def _measured(logits, keys, inside, least, top, temperature, COUNT: tl.constexpr):
    """What each token counts for: 1, or its weight where its key is at least `least`."""
    if COUNT:
        return inside.to(tl.float32)
    else:
        return tl.where(inside & (keys >= least), _weights(logits, top, temperature), 0.0)


@triton.jit
def _row_at_least(row_ptr, vocabulary, bound_J, least, top, temperature, COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """float64 [J]: weight (or number) of the tokens whose keys are at least each bound, those below `least` left out."""
    sums_JC = tl.zeros((bound_J.shape[0], CHUNK), tl.float32)
    for start in range(0, vocabulary, CHUNK):
        token_C = start + tl.arange(0, CHUNK)
        inside_C = token_C < vocabulary
        logits_C = tl.load(row_ptr + token_C, mask=inside_C, other=float("-inf"))
        key_C = _ordered(logits_C)
        value_C = _measured(logits_C, key_C, inside_C, least, top, temperature, COUNT)
        sums_JC += tl.where(key_C[None, :] >= bound_J[:, None], value_C[None, :], 0.0)
    return tl.sum(sums_JC.to(tl.float64), 1)


@triton.jit
def _gather_between(row_ptr, into_ptr, vocabulary, low, high, CHUNK: tl.constexpr, MOST: tl.constexpr):
    """Logits whose keys lie in [low, high), in vocabulary order, the first MOST of them; and their number."""
    found = 0
    for start in range(0, vocabulary, CHUNK):
        token_C = start + tl.arange(0, CHUNK)
        logits_C = tl.load(row_ptr + token_C, mask=token_C < vocabulary, other=float("-inf"))
        key_C = _ordered(logits_C)
        wanted_C = (token_C < vocabulary) & (key_C >= low) & (key_C < high)
        count = tl.sum(wanted_C.to(tl.int32), 0)
        if count > 0:
            place_C = found + tl.cumsum(wanted_C.to(tl.int32), 0) - 1
            tl.store(into_ptr + place_C, logits_C, mask=wanted_C & (place_C < MOST))
            found += count
    tl.debug_barrier()
    return found


@triton.jit
def _largest_bound(
    row_ptr, into_ptr, vocabulary, wanted, least, top, temperature,
    COUNT: tl.constexpr, LADDER: tl.constexpr, CHUNK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """(the largest key at or above which there is as much as wanted, how much lies above it, tokens that have it)."""
    step_J = tl.arange(0, 16)
    bound_J = _ordered(top - step_J.to(tl.float32) * (LADDER * temperature))
    found_J = _row_at_least(row_ptr, vocabulary, bound_J, least, top, temperature, COUNT, CHUNK // 4)
    enough_J = found_J >= wanted
    # All keys between two neighbors of the ladder; below its end, all there are.
    low = tl.max(tl.where(enough_J, bound_J, least), 0)
    high = tl.min(tl.where(enough_J, 2147483647, bound_J), 0)
    beyond = tl.max(tl.where(enough_J, 0.0, found_J), 0)
    number = _gather_between(row_ptr, into_ptr, vocabulary, low, high, CHUNK, MOST)
    lane_N = tl.arange(0, MOST)
    inside_N = lane_N < number
    logits_N = tl.load(into_ptr + lane_N, mask=inside_N, other=float("-inf"))
    key_N = _ordered(logits_N)
    value_N = _measured(logits_N, key_N, inside_N, least, top, temperature, COUNT).to(tl.float64)
    reached = low.to(tl.int64)
    missed = high.to(tl.int64)
    above = beyond
    while reached + 1 < missed:
        middle = reached + (missed - reached) // 2
        if number <= MOST:
            found = beyond + tl.sum(tl.where(key_N >= middle.to(tl.int32), value_N, 0.0), 0)
        else:
            pair_J = middle.to(tl.int32) + tl.arange(0, 2) * 0
            found = tl.max(_row_at_least(row_ptr, vocabulary, pair_J, least, top, temperature, COUNT, CHUNK), 0)
        if found >= wanted:
            reached = middle
        else:
            missed = middle
            above = found
    bound = reached.to(tl.int32)
    equals = vocabulary
    if number <= MOST:
        equals = tl.sum((inside_N & (key_N == bound)).to(tl.int32), 0)
    return bound, above, equals


@triton.jit
def _truncate(
    logits_ptr,
    temperature_ptr,
    into_ptr,
    kept_ptr,
    share_ptr,
    vocabulary,
    stride,
    kept_stride,
    top_k,
    top_p,
    top_p_rest,
    min_p,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    LADDER: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    begin(OVERLAP)
    row_ptr = logits_ptr + tl.program_id(0).to(tl.int64) * stride
    kept_row_ptr = kept_ptr + tl.program_id(0).to(tl.int64) * kept_stride
    into_ptr += tl.program_id(0).to(tl.int64) * MOST
    temperature = tl.load(temperature_ptr).to(tl.float32)
    top_C = tl.full((CHUNK,), float("-inf"), tl.float32)
    for start in range(0, vocabulary, CHUNK):
        token_C = start + tl.arange(0, CHUNK)
        top_C = tl.maximum(top_C, tl.load(row_ptr + token_C, mask=token_C < vocabulary, other=float("-inf")))
    top = tl.max(top_C, 0)

    lowest = tl.full((), -2147483648, tl.int32)
    least = lowest
    if TOP_K:
        least, _, _ = _largest_bound(
            row_ptr, into_ptr, vocabulary, top_k, lowest, top, temperature, True, LADDER, CHUNK, MOST
        )
    bound = least
    most_equals = vocabulary
    equals = 0
    if TOP_P:
        all_J = least + tl.arange(0, 2) * 0
        whole = tl.max(_row_at_least(row_ptr, vocabulary, all_J, least, top, temperature, False, CHUNK), 0)
        # An argument is rounded to float32; the rest of it comes apart.
        wanted = whole * (tl.cast(top_p, tl.float64) + tl.cast(top_p_rest, tl.float64))
        bound, above, equals = _largest_bound(
            row_ptr, into_ptr, vocabulary, wanted, least, top, temperature, False, LADDER, CHUNK, MOST
        )
        # The bound's key back to its logit, and how many tokens of that logit are still wanted.
        logit = (bound ^ ((bound >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        one = _weights(logit, top, temperature).to(tl.float64)
        most_equals = tl.ceil((wanted - above) / one).to(tl.int32)

    seen = 0
    kept_C = tl.zeros((CHUNK,), tl.float32)
    whole_C = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, vocabulary, CHUNK):
        token_C = start + tl.arange(0, CHUNK)
        logits_C = tl.load(row_ptr + token_C, mask=token_C < vocabulary, other=float("-inf"))
        key_C = _ordered(logits_C)
        weight_C = _weights(logits_C, top, temperature)
        keep_C = key_C >= bound
        if equals > most_equals:
            equal_C = (key_C == bound).to(tl.int32)
            keep_C = keep_C & ((equal_C == 0) | (seen + tl.cumsum(equal_C, 0) <= most_equals))
            seen += tl.sum(equal_C, 0)
        if MIN_P:
            keep_C = keep_C & (weight_C >= min_p)
        whole_C += weight_C
        kept_C += tl.where(keep_C, weight_C, 0.0)
        tl.store(kept_row_ptr + token_C, tl.where(keep_C, logits_C, float("-inf")), mask=token_C < vocabulary)
    share = tl.sum(kept_C.to(tl.float64), 0) / tl.sum(whole_C.to(tl.float64), 0)
    tl.store(share_ptr + tl.program_id(0), tl.log(share).to(tl.float32))
