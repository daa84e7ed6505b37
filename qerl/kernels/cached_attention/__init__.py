"""The attention of a decode step: one new token a row, rotated, stored in the row's cache, and compared with all that is there.

Legend: B rows of a decode batch, H query heads, K key/value heads (H is a multiple of K), d head size, X = (H + 2 K) d, P pages of the
cache, L tokens a page. Query head h reads key/value head h // (H / K).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qerl.kernels import dispatch
from qerl.kernels.cached_attention.plan import members_for
from qerl.kernels.cached_attention.rows import CacheRows, SharedPages
from qerl.kernels.cached_attention.storage import FP8
from qerl.kernels.rope import HeadBias, HeadNorms

__all__ = ["FP8", "CacheRows", "SharedPages", "cached_attention", "members_for"]


def cached_attention(
    qkv_BX: Tensor,
    rotation: tuple[Tensor, Tensor],
    heads: int,
    kv_heads: int,
    k_cache_PLKd: Tensor,
    v_cache_PLKd: Tensor,
    rows: CacheRows,
    scale: float,
    *,
    norms: HeadNorms | None = None,
    bias: HeadBias | None = None,
    dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Split the projections into heads and rotate them as `qerl.kernels.rope.rope` does, append k and v to the cache, and attend with q to
    each row's tokens, the new one included. No gradient.

    Args:
        qkv_BX: rows of q, k, v side by side.
        rotation: cosines and sines of each row's position, float32 [B, d] each; the sines of the first half of d carry a minus sign.
        heads, kv_heads: H and K.
        k_cache_PLKd, v_cache_PLKd: contiguous, in ``dtype`` or, each, in `FP8` (`storage`); changed in place. Entries beyond a row's end have no influence but must be finite.
        rows: lengths before this step, and pages.
        scale: factor of the scores.
        norms: scales of the norm over each head of q and k, and their noise.
        bias: of the projections, where these come without it. Not with norms.
        dtype: of the heads and of attention's products; that of qkv when not given.
        output_dtype: that of the heads when not given.
        kernel: implementation by name. On CUDA nothing is asked of the host, so a call can be captured; what a graph runs just before it must
            not write lengths, pages, or keys and values of earlier tokens.

    Returns:
        [B, H, d] in ``output_dtype``.

    Raises:
        KernelUnavailableError: `kernel` cannot run here.
    """
    assert k_cache_PLKd.is_contiguous() and v_cache_PLKd.is_contiguous()
    implementation = dispatch.load("cached_attention", qkv_BX.device, kernel)
    dtype = dtype or qkv_BX.dtype
    options = {"bias": bias, "dtype": dtype, "output_dtype": output_dtype or dtype}
    return implementation.cached_attention(
        qkv_BX, rotation, heads, kv_heads, k_cache_PLKd, v_cache_PLKd, rows, scale, norms, **options
    )
