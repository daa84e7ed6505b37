"""Differentiable RMSNorm: keeps the input, one number a token and the scale; recomputes the rest."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class RmsNorm(torch.autograd.Function):
    """Gradients to x and w; the noise is a given draw and gets none."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float, noise: Tensor | None, kernel: ModuleType
    ) -> Tensor:
        y_TD, inverse_T1 = kernel.forward(x_TD, weight_D, eps, noise)
        ctx.save_for_backward(x_TD, weight_D, inverse_T1, noise)
        ctx.kernel = kernel
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_D, inverse_T1, noise = ctx.saved_tensors
        grad_x, grad_weight = ctx.kernel.backward(grads[0], x_TD, weight_D, inverse_T1, noise)
        return grad_x, grad_weight if ctx.needs_input_grad[1] else None, None, None, None
