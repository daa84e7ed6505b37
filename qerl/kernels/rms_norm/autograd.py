"""Differentiable RMSNorm: keeps the input, one number a token and the scale; recomputes the rest."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl.kernels.rms_norm.noise import NormNoise

# Noise comes as a tensor z, which is kept for the backward pass, or as a record, which is read (or drawn) again there.


class RmsNorm(torch.autograd.Function):
    """Gradients to x and w; the noise is a given draw and gets none."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_D: Tensor,
        eps: float,
        z: Tensor | None,
        record: NormNoise | None,
        dtype: torch.dtype,
        kernel: ModuleType,
    ) -> Tensor:
        y_TD, inverse_T1 = kernel.forward(x_TD, weight_D, eps, z if record is None else record, dtype)
        ctx.save_for_backward(x_TD, weight_D, inverse_T1, z)
        ctx.record, ctx.kernel = record, kernel
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_D, inverse_T1, z = ctx.saved_tensors
        noise = z if ctx.record is None else ctx.record
        grad_x, grad_weight = ctx.kernel.backward(
            grads[0], x_TD, weight_D, inverse_T1, noise, needs_weight=ctx.needs_input_grad[1]
        )
        return grad_x, grad_weight, None, None, None, None, None


class AddRmsNorm(torch.autograd.Function):
    """Gradients to x and the residual, which are the same numbers but for their types, and to w. Keeps the sum instead of its two terms."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        residual_TD: Tensor,
        weight_D: Tensor,
        eps: float,
        z: Tensor | None,
        record: NormNoise | None,
        dtype: torch.dtype,
        kernel: ModuleType,
    ) -> tuple[Tensor, Tensor]:
        noise = z if record is None else record
        h_TD, stream_TD, inverse_T1 = kernel.add_forward(x_TD, residual_TD, weight_D, eps, noise, dtype)
        ctx.save_for_backward(stream_TD, weight_D, inverse_T1, z)
        ctx.record, ctx.kernel, ctx.dtypes = record, kernel, (x_TD.dtype, residual_TD.dtype)
        ctx.set_materialize_grads(False)
        return h_TD, stream_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_h, grad_stream = grads
        if grad_h is None:
            return *_of_terms(ctx, grad_stream), None, None, None, None, None, None
        stream_TD, weight_D, inverse_T1, z = ctx.saved_tensors
        noise = z if ctx.record is None else ctx.record
        grad_x, grad_weight = ctx.kernel.backward(
            grad_h, stream_TD, weight_D, inverse_T1, noise, grad_stream, needs_weight=ctx.needs_input_grad[2]
        )
        return *_of_terms(ctx, grad_x), grad_weight, None, None, None, None, None


def _of_terms(ctx: Any, grad_TD: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradient of a sum for each of its two terms, in that term's type."""
    needs = ctx.needs_input_grad[:2]
    return tuple(
        grad_TD.to(dtype) if needed and grad_TD is not None else None
        for needed, dtype in zip(needs, ctx.dtypes, strict=True)
    )
