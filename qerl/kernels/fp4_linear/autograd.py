"""Differentiable product with a frozen packed weight and its adapters.

Keeps for the backward pass: the packed bytes (or the caller's dense copy), the input and, from a kernel that gives them, the
shrunk activations when an adapter trains. Never a dense weight of its own. Legend: T tokens, I inputs, O output rows, R adapter ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl.formats import PackedWeight
from qerl.kernels.fp4_linear.adapter import Placement, columns_of

_ADAPTERS = 8
"""Arguments in front of the adapters'."""


class Fp4Linear(torch.autograd.Function):
    """Gradients to x, bias, every A and every B; the base weight is frozen. All are made of the output's gradient in x's type."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        bias_O: Tensor | None,
        weight: PackedWeight,
        dense_OI: Tensor | None,
        placements: Sequence[Placement],
        dtype: torch.dtype,
        kernel: ModuleType,
        output: bool,
        *adapters: Tensor,
    ) -> Tensor:
        split = len(adapters) - len(placements)
        a_RI, b_OR = adapters[:split], adapters[split:]
        if output:
            y_TO, shrunk = kernel.forward(x_TI, weight, bias_O, placements, a_RI, b_OR, dense_OI, dtype)
        else:
            shrunk = kernel.shrunk(x_TI, weight, placements, a_RI, b_OR, dense_OI)
            y_TO = x_TI.new_full((), torch.nan, dtype=dtype).expand(x_TI.shape[0], weight.shape[0])
        needs = ctx.needs_input_grad[_ADAPTERS:]
        kept_x = x_TI if any(needs[:split]) or (shrunk is None and any(needs[split:])) else None
        kept_shrunk = shrunk if shrunk is not None and any(needs[split:]) else ()
        ctx.save_for_backward(kept_x, *adapters, *kept_shrunk)
        ctx.weight, ctx.dense_OI, ctx.placements, ctx.kernel, ctx.split = weight, dense_OI, placements, kernel, split
        ctx.bias_dtype = None if bias_O is None else bias_O.dtype
        ctx.dtype = x_TI.dtype
        return y_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_TO = grads[0].to(ctx.dtype)
        x_TI, *rest = ctx.saved_tensors
        count = ctx.split + len(ctx.placements)
        a_RI, b_OR, shrunk = rest[: ctx.split], rest[ctx.split : count], rest[count:]
        needs = ctx.needs_input_grad
        if not shrunk and any(needs[_ADAPTERS + ctx.split :]):
            shrunk = [x_TI @ a.T for a in a_RI]

        grad_b: list[Tensor | None] = []
        grad_h, written = [], _each_rank_once(ctx.placements, a_RI)
        for once, a in zip(written, a_RI, strict=True):
            grad_h.append((grad_TO.new_empty if once else grad_TO.new_zeros)(grad_TO.shape[0], a.shape[0]))
        for index, (place, b) in enumerate(zip(ctx.placements, b_OR, strict=True)):
            part_TO, beta = columns_of(grad_TO, place.rows), float(not written[place.a_index])
            columns_of(grad_h[place.a_index], place.ranks).addmm_(part_TO, b, beta=beta, alpha=place.scale)
            grad = None
            if needs[_ADAPTERS + ctx.split + index]:
                h_TR = columns_of(shrunk[place.a_index], place.ranks)
                grad = b.new_empty(b.shape).addmm_(part_TO.T, h_TR, beta=0.0, alpha=place.scale)
            grad_b.append(grad)
        grad_a = [h.T @ x_TI if needs[_ADAPTERS + index] else None for index, h in enumerate(grad_h)]

        grad_x = None
        if needs[0]:
            grad_x = ctx.kernel.input_gradient(grad_TO, ctx.weight, ctx.dense_OI, grad_h, a_RI)
        grad_bias = grad_TO.sum(0).to(ctx.bias_dtype) if needs[1] else None
        return grad_x, grad_bias, *[None] * (_ADAPTERS - 2), *grad_a, *grad_b


def _each_rank_once(placements: Sequence[Placement], a_RI: Sequence[Tensor]) -> list[bool]:
    """For every A, whether parts read its ranks one after another, each once: what flows back to them is then written, not added up."""
    stops = [0] * len(a_RI)
    for place in placements:
        stops[place.a_index] = place.ranks.stop if place.ranks.start == stops[place.a_index] else -1
    return [stop == len(a) for stop, a in zip(stops, a_RI, strict=True)]
