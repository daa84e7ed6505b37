"""Grouped-query attention in the two forms the decoder needs: packed sequences, and one query against a cache.

Legend: T packed tokens, S sequences, H query heads, K key/value heads (H is a multiple of K), B cache slots, L cache
length, d head size. Query head h reads key/value head h // (H / K).
"""

from __future__ import annotations

from torch import Tensor

from qerl.kernels import dispatch

__all__ = ["cached_attention", "packed_attention"]


def packed_attention(
    q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cu_seqlens_S1: Tensor, scale: float, *, kernel: str = "auto"
) -> Tensor:
    """Causal attention inside each of S sequences that are packed end to end. Differentiable.

    Args:
        q_THd, k_TKd, v_TKd: one dtype; rotary embedding already applied.
        cu_seqlens_S1: int64 [S + 1], first token of each sequence, and T. No sequence is empty.
        scale: factor of the scores, 1 / sqrt(d) as a rule.
        kernel: implementation by name.

    Returns:
        [T, H, d], dtype of q.

    Raises:
        KernelUnavailableError: `kernel` cannot run here.
    """
    return dispatch.load("attention", q_THd.device, kernel).packed_attention(q_THd, k_TKd, v_TKd, cu_seqlens_S1, scale)


def cached_attention(
    q_BHd: Tensor, k_cache_BLKd: Tensor, v_cache_BLKd: Tensor, lengths_B: Tensor, scale: float, *, kernel: str = "auto"
) -> Tensor:
    """One query a slot against the first `lengths_B` entries of its cache: a decode step. No gradient is needed.

    Args:
        q_BHd: queries.
        k_cache_BLKd, v_cache_BLKd: caches, the query's own key and value already written. Entries at or beyond a
            slot's length have no influence but must be finite.
        lengths_B: int64 [B], from 0 to L, at least one of them above 0; a slot of length 0 gives zeros.
        scale: factor of the scores.
        kernel: implementation by name.

    Returns:
        [B, H, d], dtype of q.

    Raises:
        KernelUnavailableError: `kernel` cannot run here.
    """
    implementation = dispatch.load("attention", q_BHd.device, kernel)
    return implementation.cached_attention(q_BHd, k_cache_BLKd, v_cache_BLKd, lengths_B, scale)
