"""silu(gate) * up in plain torch. Legend: T tokens, F width of the MLP, X = 2 F."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def forward(gate_up_TX: Tensor) -> Tensor:
    """See `qerl.kernels.activation.silu_mul`."""
    gate_TF, up_TF = gate_up_TX.chunk(2, dim=-1)
    return F.silu(gate_TF).mul_(up_TF)


def backward(grad_TF: Tensor, gate_up_TX: Tensor) -> Tensor:
    """Gradient [T, 2 F]: silu'(g) = s (1 + g (1 - s)), s = sigmoid(g); grad * up and silu(gate) are rounded as in forward."""
    gate_TF, up_TF = gate_up_TX.chunk(2, dim=-1)
    grad_gate_TF = torch.ops.aten.silu_backward(grad_TF * up_TF, gate_TF)
    return torch.cat((grad_gate_TF, grad_TF * F.silu(gate_TF)), dim=-1)
