"""Packed attention by torch's FlashAttention for sequences of varying length: no padding, grouped heads as they are.

It takes bfloat16 and float16 with d at most 256 and a multiple of 8; other input (float32 tests, odd heads) goes to the
reference. The gradient is made without atomics, so the same input gives the same bits; a sequence that is much longer than the
others is then given a call of its own (`balanced_runs`). Where there is no gradient to come, and no sequence has other keys than its own, one call has all
of them: it gives each the bits that it has in a call of its own.

Legend: T packed tokens, U their keys, S sequences, H query heads, K key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl.kernels.attention import reference
from qerl.kernels.attention.spans import KeySpans
from qerl.kernels.sizes import ceil_div

__all__ = ["packed_attention"]


def packed_attention(
    q_THd: Tensor,
    k_UKd: Tensor,
    v_UKd: Tensor,
    cu_seqlens_S1: Tensor,
    scale: float,
    lengths: Sequence[int] | None = None,
    keys: KeySpans | None = None,
) -> Tensor:
    """See `qerl.kernels.attention.packed_attention`."""
    heads, size = q_THd.shape[1:]
    if q_THd.dtype not in (torch.bfloat16, torch.float16) or size > 256 or size % 8:
        return reference.packed_attention(q_THd, k_UKd, v_UKd, cu_seqlens_S1, scale, lengths, keys)
    if lengths is None:
        lengths = cu_seqlens_S1.diff().tolist()
    if keys is None and not torch.is_grad_enabled():
        bounds_S1, longest_one = cu_seqlens_S1.int(), max(lengths)
        return forward(q_THd, k_UKd, v_UKd, (bounds_S1, bounds_S1, longest_one, longest_one), scale)[0]
    cu_keys_S1, key_lengths = (cu_seqlens_S1, lengths) if keys is None else (keys.cu_keys_S1, keys.lengths)
    runs = balanced_runs(lengths, heads, _processors(q_THd.device), key_lengths)
    if len(runs) == 1:
        longest = max(lengths), max(key_lengths)
        return _PackedAttention.apply(q_THd, k_UKd, v_UKd, cu_seqlens_S1.int(), cu_keys_S1.int(), scale, longest)
    tokens, counts = ([sum(sizes[run]) for run in runs] for sizes in (lengths, key_lengths))
    outputs = [
        _PackedAttention.apply(
            *pieces,
            *((bounds[run.start : run.stop + 1] - bounds[run.start]).int() for bounds in (cu_seqlens_S1, cu_keys_S1)),
            scale,
            (max(lengths[run]), max(key_lengths[run])),
        )
        for run, *pieces in zip(runs, q_THd.split(tokens), k_UKd.split(counts), v_UKd.split(counts), strict=True)
    ]
    return torch.cat(outputs)


def balanced_runs(
    lengths: Sequence[int], heads: int, processors: int, key_lengths: Sequence[int] | None = None
) -> list[slice]:
    """Neighboring sequences that go into one call.

    The gradient without atomics gives each head of each sequence the same number of programs, which walk over its keys one after
    another: processors / (sequences * heads), at least one. A sequence with more than 1.5 times the work (its tokens times its keys)
    that an even spread would give its programs keeps them busy long after the others are done. It gets a call, and so all
    programs, to itself.
    """
    each = [tokens * keys for tokens, keys in zip(lengths, key_lengths or lengths, strict=True)]
    work = sum(each)
    programs = ceil_div(processors, len(lengths) * heads)
    alone = [2 * own * processors > 3 * programs * work * heads for own in each]
    runs: list[slice] = []
    for index in range(len(lengths)):
        if runs and not alone[index] and not alone[index - 1]:
            runs[-1] = slice(runs[-1].start, index + 1)
        else:
            runs.append(slice(index, index + 1))
    return runs


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class _PackedAttention(torch.autograd.Function):
    """Keeps q, k, v, the output, and one number a token and head."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THd: Tensor,
        k_UKd: Tensor,
        v_UKd: Tensor,
        cu_seqlens_S1: Tensor,
        cu_keys_S1: Tensor,
        scale: float,
        longest: tuple[int, int],
    ) -> Tensor:
        bounds = (cu_seqlens_S1, cu_keys_S1, *longest)
        output, lse, state, unused = forward(q_THd, k_UKd, v_UKd, bounds, scale)
        ctx.save_for_backward(q_THd, k_UKd, v_UKd, output, lse, cu_seqlens_S1, cu_keys_S1, state, unused)
        ctx.scale, ctx.longest = scale, longest
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, lse, cu_seqlens, cu_keys, state, unused = ctx.saved_tensors
        bounds = (cu_seqlens, cu_keys, *ctx.longest)
        found = gradients(grads[0].contiguous(), q, k, v, output, lse, bounds, ctx.scale, state, unused)
        return *found, None, None, None, None


def forward(
    q_THd: Tensor, k_UKd: Tensor, v_UKd: Tensor, bounds: tuple[Tensor, Tensor, int, int], scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(output, log of the sums of the softmax, and two tensors that the backward pass asks for). Bounds are those of tokens and of
    keys, int32, and the most of each."""
    found = torch.ops.aten._flash_attention_forward(q_THd, k_UKd, v_UKd, *bounds, 0.0, True, False, scale=scale)
    return found[0], found[1], found[2], found[3]


def gradients(
    grad_THd: Tensor,
    q_THd: Tensor,
    k_UKd: Tensor,
    v_UKd: Tensor,
    output_THd: Tensor,
    lse: Tensor,
    bounds: tuple[Tensor, Tensor, int, int],
    scale: float,
    state: Tensor,
    unused: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients to q, k and v from what `forward` took and gave."""
    with _without_atomics():
        return torch.ops.aten._flash_attention_backward(
            grad_THd, q_THd, k_UKd, v_UKd, output_THd, lse, *bounds, 0.0, True, state, unused, scale=scale
        )


@contextmanager
def _without_atomics() -> Iterator[None]:
    """FlashAttention reads torch's global switch when it is called; it is put back at once."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic
    fill = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = fill
