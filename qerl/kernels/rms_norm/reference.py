"""RMSNorm in plain torch: forward and backward formulas. Legend: T tokens, D channels."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_type(x: Tensor) -> torch.dtype:
    """Arithmetic is float32, or float64 when the input is."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def scale(weight_D: Tensor, noise: Tensor | None, dtype: torch.dtype) -> Tensor:
    """w + z: [D], or [T, D] when every token has its own noise."""
    weight_D = weight_D.to(dtype)
    return weight_D if noise is None else weight_D + noise.to(dtype)


def forward(x_TD: Tensor, weight_D: Tensor, eps: float, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """(h [T, D] in x's dtype, inverse root mean square [T, 1])."""
    x = x_TD.to(wide_type(x_TD))
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * inverse * scale(weight_D, noise, x.dtype)).to(x_TD.dtype), inverse


def backward(
    grad_TD: Tensor, x_TD: Tensor, weight_D: Tensor, inverse_T1: Tensor, noise: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients to x (its dtype) and to w [D] (its dtype).

    With u = x r, r = 1 / rms:  du = dh (w + z),  dx = r (du - u mean(du u)),  dw = sum over tokens of dh u.
    """
    wide = wide_type(x_TD)
    grad = grad_TD.to(wide)
    u = x_TD.to(wide) * inverse_T1
    grad_u = grad * scale(weight_D, noise, wide)
    grad_x = inverse_T1 * (grad_u - u * (grad_u * u).mean(-1, keepdim=True))
    grad_weight = (grad * u).flatten(0, -2).sum(0)
    return grad_x.to(x_TD.dtype), grad_weight.to(weight_D.dtype)
