"""RMSNorm with the noise of adaptive quantization noise inside: h = x / sqrt(mean(x^2) + eps) * (w + z)."""

from __future__ import annotations

from torch import Tensor

from qerl.kernels import dispatch
from qerl.kernels.rms_norm.autograd import RmsNorm

__all__ = ["rms_norm"]


def rms_norm(
    x_TD: Tensor, weight_D: Tensor, eps: float, noise: Tensor | None = None, *, kernel: str = "auto"
) -> Tensor:
    """Normalize the last dimension and scale it.

    Args:
        x_TD: [..., D], any floating type. Arithmetic is float32 (float64 for float64), cast back once.
        weight_D: clean scale w [D].
        eps: added to the mean square.
        noise: z, float32 [D] (one draw for all tokens) or of x's shape (a draw a token); None adds nothing and gives
            the same bits as z = 0. Constant: gets no gradient.
        kernel: implementation by name.

    Returns:
        h, shape and dtype of x. For w != 0 a projection W of it equals that of the clean norm with row j of W scaled
        by 1 + z_j / w_j.

    Raises:
        KernelUnavailableError: `kernel` cannot run here.
    """
    return RmsNorm.apply(x_TD, weight_D, eps, noise, dispatch.load("rms_norm", x_TD.device, kernel))
