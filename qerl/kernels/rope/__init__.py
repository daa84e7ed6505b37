"""Rotary position embedding of q and k, with the norm over each head or the bias where a model has one.

Legend: T tokens, H query heads, K key/value heads, d head size, X = (H + 2 K) d, P rows of the rotation tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qerl.kernels import dispatch
from qerl.kernels.rope.norms import CachePlaces, HeadBias, HeadNorms
from qerl.kernels.rope.reference import rotate

__all__ = ["CachePlaces", "HeadBias", "HeadNorms", "rope", "rotate"]


def rope(
    qkv_TX: Tensor,
    positions_T: Tensor | None,
    cos_Pd: Tensor,
    sin_Pd: Tensor,
    heads: int,
    kv_heads: int,
    *,
    norms: HeadNorms | None = None,
    bias: HeadBias | None = None,
    dtype: torch.dtype | None = None,
    stored: CachePlaces | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the fused projections into heads, normalize q and k if the model does, and rotate them. Differentiable.

    Args:
        qkv_TX: rows of q, k, v side by side.
        positions_T: int64 [T], row of the tables for each token; None when the tables hold one row a token, in their order.
        cos_Pd, sin_Pd: float32 tables; the sines of the first half of d carry a minus sign.
        heads, kv_heads: H and K.
        norms: scales of the norm over each head, and their noise. Gradients go to qkv and to the scales that ask for one.
        bias: added to the projections, where these come without it; constant. Not with norms.
        dtype: of q, k and v; that of qkv when not given.
        stored: where k and v are stored as well, in the same launch; not where gradients are wanted.
        kernel: implementation by name.

    Returns:
        (q [T, H, d], k [T, K, d], v [T, K, d]). The norm's output is rounded to the type of qkv, the rotation is computed in
        float32, bias and shift included, and rounded to ``dtype`` once, without a fused multiply-add. What is beyond its range is infinite.

    Raises:
        KernelUnavailableError: `kernel` cannot run here.
    """
    assert norms is None or bias is None
    assert stored is None or not torch.is_grad_enabled()
    implementation = dispatch.load("rope", qkv_TX.device, kernel)
    return implementation.rope(qkv_TX, positions_T, cos_Pd, sin_Pd, heads, kv_heads, norms, bias, dtype, stored)
