"""What the norm over each head of q and of k needs. Legend: d head size."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from qerl.kernels.rms_norm import NormNoise


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Scales of the two norms; all heads of one share the scale, and so its noise, which is one draw or one a token."""

    q_weight_d: Tensor
    k_weight_d: Tensor
    eps: float
    q_noise: NormNoise | None = None
    """z of d channels: float32 [d], or [T, d], or a record."""
    k_noise: NormNoise | None = None
