"""Chunked and differentiable: holds one chunk of logits at a time and saves two numbers a token.

Legend: N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl.kernels.token_logprobs.choices import Wanted
from qerl.kernels.token_logprobs.head import Head


class Parts(NamedTuple):
    """The three functions of an implementation that goes chunk by chunk; see the reference."""

    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    logits_gradient: Callable[..., Tensor]
    hidden_gradient: Callable[..., Tensor]


def keep(ctx: Any, hidden_ND: Tensor, head: Head, *tensors: Tensor | None) -> None:
    """Save for the backward pass; a packed head is no tensor and stays on the context."""
    head_VD, ctx.packed = (head, None) if isinstance(head, Tensor) else (None, head)
    ctx.save_for_backward(hidden_ND, head_VD, *tensors)
    ctx.set_materialize_grads(False)


def kept(ctx: Any) -> tuple[Any, ...]:
    """What `keep` was given."""
    hidden_ND, head_VD, *tensors = ctx.saved_tensors
    return hidden_ND, head_VD if ctx.packed is None else ctx.packed, *tensors


class TokenLogprobs(torch.autograd.Function):
    """Gradients to hidden, head (if dense) and bias, from both outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head: Head,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature: float,
        chunk: int,
        kernel: Parts,
        wanted: Wanted | None,
    ) -> tuple[Tensor, Tensor]:
        parts = []
        for start in range(0, max(len(hidden_ND), 1), chunk):
            rows = slice(start, start + chunk)
            chosen = None if wanted is None else wanted.part(rows)
            parts.append(kernel.forward(hidden_ND[rows], head, bias_V, targets_N[rows], temperature, chosen))
        logp_N, entropy_N, lse_N = (torch.cat(column) for column in zip(*parts, strict=True))
        keep(ctx, hidden_ND, head, bias_V, targets_N, lse_N, entropy_N)
        ctx.temperature, ctx.chunk, ctx.kernel = temperature, chunk, kernel
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, head, bias_V, targets_N, lse_N, entropy_N = kept(ctx)
        needs_hidden, needs_head, needs_bias = ctx.needs_input_grad[:3]
        wide = lse_N.dtype
        head_wide = head.to(hidden_ND.dtype).to(wide) if needs_hidden and ctx.packed is None else None
        grad_hidden = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_head = torch.zeros(head.shape, dtype=wide, device=head.device) if needs_head else None
        grad_bias = torch.zeros(bias_V.shape, dtype=wide, device=bias_V.device) if needs_bias else None
        for start in range(0, hidden_ND.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            upstream = (None if grad is None else grad[part] for grad in grads)
            grad_NV = ctx.kernel.logits_gradient(
                hidden_ND[part],
                head,
                bias_V,
                targets_N[part],
                ctx.temperature,
                lse_N[part],
                entropy_N[part],
                *upstream,
            )
            if grad_hidden is not None and head_wide is not None:
                grad_hidden[part] = grad_NV @ head_wide
            elif grad_hidden is not None:
                grad_hidden[part] = ctx.kernel.hidden_gradient(grad_NV, ctx.packed, hidden_ND.dtype)
            if grad_head is not None:
                grad_head.addmm_(grad_NV.T, hidden_ND[part].to(wide))
            if grad_bias is not None:
                grad_bias += grad_NV.sum(0)
        return (
            grad_hidden,
            None if grad_head is None else grad_head.to(head.dtype),
            None if grad_bias is None else grad_bias.to(bias_V.dtype),
            None,
            None,
            None,
            None,
            None,
        )
