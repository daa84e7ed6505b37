# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Top-k, top-p and min-p in Triton without sorting: the least logit that is kept is found bit by bit.

Legend: B rows, V vocabulary, C tokens of a chunk, J bounds that are tried at once.

Floats in their order are integers in theirs, once the bits of negative ones are flipped. How many tokens, or how much weight, lies at or above a bound
only falls as the bound rises, so the largest bound with enough of it is found two bits a pass, in 16 passes over the row. One program
has a row. Tokens are ordered by logit, where the reference orders by weight: they differ only where two logits round to one weight.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.overlap import begin, overlap

CHUNK = 2048


def truncate(
    logits_BV: Tensor, temperature: float | Tensor, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """See `qerl.kernels.sampling.truncate`."""
    rows, vocabulary = logits_BV.shape
    if not isinstance(temperature, Tensor):
        temperature = torch.tensor([temperature], dtype=torch.float64, device=logits_BV.device)
    kept_BV = torch.empty_like(logits_BV)
    share_B = torch.empty(rows, dtype=torch.float32, device=logits_BV.device)
    _truncate[(rows,)](
        logits_BV,
        temperature,
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
        CHUNK=CHUNK,
        num_warps=16,
        **overlap(logits_BV.device),
    )
    return kept_BV, share_B


@triton.jit
def _ordered(logits_C):
    """int64 in [0, 2^32): keys in the order of the logits."""
    bits_C = logits_C.to(tl.int32, bitcast=True)
    return (bits_C ^ ((bits_C >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _weights(logits_C, top, temperature):
    return tl.where(logits_C == float("-inf"), 0.0, tl.exp((logits_C - top) / temperature))


@triton.jit
def _at_least(row_ptr, vocabulary, bound_J, least, top, temperature, COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """float64 [J]: weight (or number) of the tokens whose keys are at least each bound, those below `least` left out."""
    sums_JC = tl.zeros((bound_J.shape[0], CHUNK), tl.float32)
    for start in range(0, vocabulary, CHUNK):
        token_C = start + tl.arange(0, CHUNK)
        logits_C = tl.load(row_ptr + token_C, mask=token_C < vocabulary, other=float("-inf"))
        key_C = _ordered(logits_C)
        if COUNT:
            value_C = (token_C < vocabulary).to(tl.float32)
        else:
            value_C = tl.where(key_C >= least, _weights(logits_C, top, temperature), 0.0)
        sums_JC += tl.where(key_C[None, :] >= bound_J[:, None], value_C[None, :], 0.0)
    return tl.sum(sums_JC.to(tl.float64), 1)


@triton.jit
def _largest_bound(row_ptr, vocabulary, wanted, least, top, temperature, COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """The largest key at or above which there is as much as wanted; 0 always has it."""
    step_J = tl.arange(0, 4)
    bound = tl.zeros((), tl.int64)
    for index in range(16):
        bound_J = bound + (step_J.to(tl.int64) << (30 - 2 * index))
        found_J = _at_least(row_ptr, vocabulary, bound_J, least, top, temperature, COUNT, CHUNK)
        bound = tl.max(tl.where((found_J >= wanted) | (step_J == 0), bound_J, 0), 0)
    return bound


@triton.jit
def _truncate(
    logits_ptr,
    temperature_ptr,
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
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    begin(OVERLAP)
    row_ptr = logits_ptr + tl.program_id(0).to(tl.int64) * stride
    kept_row_ptr = kept_ptr + tl.program_id(0).to(tl.int64) * kept_stride
    temperature = tl.load(temperature_ptr).to(tl.float32)
    top_C = tl.full((CHUNK,), float("-inf"), tl.float32)
    for start in range(0, vocabulary, CHUNK):
        token_C = start + tl.arange(0, CHUNK)
        top_C = tl.maximum(top_C, tl.load(row_ptr + token_C, mask=token_C < vocabulary, other=float("-inf")))
    top = tl.max(top_C, 0)

    zero = tl.zeros((), tl.int64)
    least = zero
    if TOP_K:
        least = _largest_bound(row_ptr, vocabulary, top_k, zero, top, temperature, True, CHUNK)
    equals = vocabulary
    bound = least
    if TOP_P:
        step_J = tl.arange(0, 2)
        pair_J = _at_least(row_ptr, vocabulary, least + step_J * 0, least, top, temperature, False, CHUNK)
        # An argument is rounded to float32; the rest of it comes apart.
        wanted = tl.max(pair_J, 0) * (tl.cast(top_p, tl.float64) + tl.cast(top_p_rest, tl.float64))
        bound = _largest_bound(row_ptr, vocabulary, wanted, least, top, temperature, False, CHUNK)
        beyond_J = _at_least(row_ptr, vocabulary, bound + 1 + step_J * 0, least, top, temperature, False, CHUNK)
        # The bound's key back to its logit, and how many tokens of that logit are still wanted.
        bits = (bound - 2147483648).to(tl.int32)
        logit = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        one = _weights(logit, top, temperature).to(tl.float64)
        equals = tl.ceil((wanted - tl.max(beyond_J, 0)) / one).to(tl.int32)

    seen = 0
    kept_C = tl.zeros((CHUNK,), tl.float32)
    whole_C = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, vocabulary, CHUNK):
        token_C = start + tl.arange(0, CHUNK)
        logits_C = tl.load(row_ptr + token_C, mask=token_C < vocabulary, other=float("-inf"))
        key_C = _ordered(logits_C)
        weight_C = _weights(logits_C, top, temperature)
        keep_C = key_C >= bound
        if TOP_P:
            equal_C = (key_C == bound).to(tl.int32)
            keep_C = keep_C & ((equal_C == 0) | (seen + tl.cumsum(equal_C, 0) <= equals))
            seen += tl.sum(equal_C, 0)
        if MIN_P:
            keep_C = keep_C & (weight_C >= min_p)
        whole_C += weight_C
        kept_C += tl.where(keep_C, weight_C, 0.0)
        tl.store(kept_row_ptr + token_C, tl.where(keep_C, logits_C, float("-inf")), mask=token_C < vocabulary)
    share = tl.sum(kept_C.to(tl.float64), 0) / tl.sum(whole_C.to(tl.float64), 0)
    tl.store(share_ptr + tl.program_id(0), tl.log(share).to(tl.float32))
