"""Packed attention by torch's FlashAttention for sequences of varying length: no padding, grouped heads as they are.

It takes bfloat16 and float16 with d at most 256 and a multiple of 8; other input (float32 tests, odd heads) goes to the
reference. The gradient is made without atomics, so the same input gives the same bits.

Legend: T packed tokens, S sequences, H query heads, K key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl.kernels.attention import reference

__all__ = ["packed_attention"]


def packed_attention(
    q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cu_seqlens_S1: Tensor, scale: float, longest: int | None = None
) -> Tensor:
    """See `qerl.kernels.attention.packed_attention`."""
    size = q_THd.shape[-1]
    if q_THd.dtype not in (torch.bfloat16, torch.float16) or size > 256 or size % 8:
        return reference.packed_attention(q_THd, k_TKd, v_TKd, cu_seqlens_S1, scale, longest)
    if longest is None:
        longest = int(cu_seqlens_S1.diff().max())
    return _PackedAttention.apply(q_THd, k_TKd, v_TKd, cu_seqlens_S1.int(), scale, longest)


class _PackedAttention(torch.autograd.Function):
    """Keeps q, k, v, the output, and one number a token and head."""

    @staticmethod
    def forward(
        ctx: Any, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cu_seqlens_S1: Tensor, scale: float, longest: int
    ) -> Tensor:
        output, lse, state, unused = forward(q_THd, k_TKd, v_TKd, cu_seqlens_S1, scale, longest)
        ctx.save_for_backward(q_THd, k_TKd, v_TKd, output, lse, cu_seqlens_S1, state, unused)
        ctx.scale, ctx.longest = scale, longest
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, lse, bounds, state, unused = ctx.saved_tensors
        scale, longest = ctx.scale, ctx.longest
        found = gradients(grads[0].contiguous(), q, k, v, output, lse, bounds, scale, longest, state, unused)
        return *found, None, None, None


def forward(
    q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cu_seqlens_S1: Tensor, scale: float, longest: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(output, log of the sums of the softmax, and two tensors that the backward pass asks for); bounds are int32."""
    bounds = (cu_seqlens_S1, cu_seqlens_S1, longest, longest)
    found = torch.ops.aten._flash_attention_forward(q_THd, k_TKd, v_TKd, *bounds, 0.0, True, False, scale=scale)
    return found[0], found[1], found[2], found[3]


def gradients(
    grad_THd: Tensor,
    q_THd: Tensor,
    k_TKd: Tensor,
    v_TKd: Tensor,
    output_THd: Tensor,
    lse: Tensor,
    cu_seqlens_S1: Tensor,
    scale: float,
    longest: int,
    state: Tensor,
    unused: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients to q, k and v from what `forward` took and gave."""
    bounds = (cu_seqlens_S1, cu_seqlens_S1, longest, longest)
    with _without_atomics():
        return torch.ops.aten._flash_attention_backward(
            grad_THd, q_THd, k_TKd, v_TKd, output_THd, lse, *bounds, 0.0, True, state, unused, scale=scale
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
