"""The gated activation of the MLP. Legend: T tokens, F width of the MLP, X = 2 F."""

from __future__ import annotations

import torch
from torch import Tensor

from qerl.kernels import dispatch
from qerl.kernels.activation.autograd import SiluMul

__all__ = ["silu_mul"]


def silu_mul(gate_up_TX: Tensor, *, kernel: str = "auto") -> Tensor:
    """silu(gate) * up, where gate is the first half of each row and up the second.

    Args:
        gate_up_TX: [T, 2 F], any floating type. Arithmetic is float32 (float64 for float64); silu(gate) is rounded to the
            input's type before the product is.
        kernel: implementation by name.

    Returns:
        [T, F], dtype of the input. Differentiable; the input alone is kept for that.

    Raises:
        KernelUnavailableError: `kernel` cannot run here.
    """
    implementation = dispatch.load("activation", gate_up_TX.device, kernel)
    if not torch.is_grad_enabled():
        return implementation.forward(gate_up_TX)
    return SiluMul.apply(gate_up_TX, implementation)
