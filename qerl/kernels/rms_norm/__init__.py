"""RMSNorm with the noise of adaptive quantization noise inside: h = x / sqrt(mean(x^2) + eps) * (w + z).

Legend: T tokens, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qerl.kernels import dispatch
from qerl.kernels.rms_norm.autograd import AddRmsNorm, RmsNorm
from qerl.kernels.rms_norm.noise import KeyedNoise, NormNoise, TableNoise, noise_values

__all__ = ["KeyedNoise", "NormNoise", "TableNoise", "add_rms_norm", "noise_values", "rms_norm"]


def rms_norm(
    x_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    noise: NormNoise | None = None,
    *,
    dtype: torch.dtype | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Normalize the last dimension and scale it.

    Args:
        x_TD: [..., D], any floating type. Arithmetic is float32 (float64 for float64), cast back once.
        weight_D: clean scale w [D].
        eps: added to the mean square.
        noise: z, float32 [D] (one draw for all tokens) or of x's shape (a draw a token), or a record of the draws of a
            two-dimensional x; None adds nothing and gives the same bits as z = 0. Constant: gets no gradient.
        dtype: of h; that of x when not given.
        kernel: implementation by name.

    Returns:
        h, shape of x. For w != 0 a projection W of it equals that of the clean norm with row j of W scaled
        by 1 + z_j / w_j.

    Raises:
        KernelUnavailableError: `kernel` cannot run here.
    """
    implementation = dispatch.load("rms_norm", x_TD.device, kernel)
    z, record = implementation.prepare(noise, x_TD)
    dtype = dtype or x_TD.dtype
    if not torch.is_grad_enabled():
        return implementation.forward(x_TD, weight_D, eps, z if record is None else record, dtype)[0]
    return RmsNorm.apply(x_TD, weight_D, eps, z, record, dtype, implementation)


def add_rms_norm(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    noise: NormNoise | None = None,
    *,
    dtype: torch.dtype | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Add to the residual stream and normalize the sum: what stands between two blocks of a decoder.

    Args:
        x_TD: output of the last block, [T, D].
        residual_TD: the stream before it, of x's type or another; None when x is the stream itself.
        weight_D, eps, noise, dtype: as of `rms_norm`.
        kernel: implementation by name.

    Returns:
        (h, stream): stream = residual + x, rounded once to the wider of their types, x itself without a residual; h = `rms_norm` of
        the stream as it was rounded, bit for bit.

    Raises:
        KernelUnavailableError: `kernel` cannot run here.
    """
    if residual_TD is None:
        return rms_norm(x_TD, weight_D, eps, noise, dtype=dtype, kernel=kernel), x_TD
    implementation = dispatch.load("rms_norm", x_TD.device, kernel)
    z, record = implementation.prepare(noise, x_TD)
    dtype = dtype or x_TD.dtype
    if not torch.is_grad_enabled():
        noise = z if record is None else record
        return implementation.add_forward(x_TD, residual_TD, weight_D, eps, noise, dtype)[:2]
    return AddRmsNorm.apply(x_TD, residual_TD, weight_D, eps, z, record, dtype, implementation)
