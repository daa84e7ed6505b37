"""Differentiable silu(gate) * up: keeps the input and computes silu(gate) again in the backward pass."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class SiluMul(torch.autograd.Function):
    """Gradient to gate and up, side by side as they came."""

    @staticmethod
    def forward(ctx: Any, gate_up_TX: Tensor, kernel: ModuleType) -> Tensor:
        ctx.save_for_backward(gate_up_TX)
        ctx.kernel = kernel
        return kernel.forward(gate_up_TX)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up_TX,) = ctx.saved_tensors
        return ctx.kernel.backward(grads[0], gate_up_TX), None
