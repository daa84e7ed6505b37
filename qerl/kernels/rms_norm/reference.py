"""RMSNorm in plain torch: forward and backward formulas. Legend: T tokens, D channels."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from qerl.kernels.rms_norm.noise import NormNoise, noise_values
from qerl.kernels.types import as_type


def wide_type(x: Tensor) -> torch.dtype:
    """Arithmetic is float32, or float64 when the input is."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def prepare(noise: NormNoise | None, x_TD: Tensor) -> tuple[Tensor | None, None]:
    """Noise as (tensor to keep for the backward pass, record to keep): here always the values."""
    return noise_values(noise), None


def scale(weight_D: Tensor, noise: Tensor | None, dtype: torch.dtype) -> Tensor:
    """w + z: [D], or [T, D] when every token has its own noise."""
    weight_D = as_type(weight_D, dtype)
    return weight_D if noise is None else weight_D + as_type(noise, dtype)


def forward(
    x_TD: Tensor, weight_D: Tensor, eps: float, noise: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(h [T, D] in `dtype`, inverse root mean square [T, 1])."""
    x = as_type(x_TD, wide_type(x_TD))
    sum_T1 = x.square().sum(-1, keepdim=True)
    inverse = torch.add(_number(eps, x.dtype, x.device), sum_T1, alpha=1.0 / x.shape[-1]).rsqrt_()
    return as_type((x * inverse).mul_(scale(weight_D, noise, x.dtype)), dtype), inverse


@cache
def _number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[1]. Of a plain number torch makes a tensor wherever it meets one, and a mean and a sum with one are a fifth of a norm of few tokens on a CPU."""
    return torch.full((1,), value, dtype=dtype, device=device)


def add_forward(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, noise: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(h in `dtype`, stream, inverse root mean square of the stream)."""
    stream_TD = residual_TD + x_TD
    h_TD, inverse_T1 = forward(stream_TD, weight_D, eps, noise, dtype)
    return h_TD, stream_TD, inverse_T1


def backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    weight_D: Tensor,
    inverse_T1: Tensor,
    noise: Tensor | None,
    grad_stream_TD: Tensor | None = None,
    *,
    needs_weight: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Gradients to x (its dtype; with that of the stream beside the norm added) and to w [D] (its dtype), if needed.

    With u = x r, r = 1 / rms:  du = dh (w + z),  dx = r (du - u mean(du u)),  dw = sum over tokens of dh u.
    """
    wide = wide_type(x_TD)
    grad = grad_TD.to(wide)
    u = x_TD.to(wide) * inverse_T1
    grad_u = grad * scale(weight_D, noise, wide)
    grad_x = (inverse_T1 * (grad_u - u * (grad_u * u).mean(-1, keepdim=True))).to(x_TD.dtype)
    if grad_stream_TD is not None:
        grad_x = grad_stream_TD + grad_x
    grad_weight = (grad * u).flatten(0, -2).sum(0).to(weight_D.dtype) if needs_weight else None
    return grad_x, grad_weight
