"""Grouped-query attention in the two forms the decoder needs: packed sequences, and one query against a cache.

Legend: T packed tokens, S sequences, H query heads, K key/value heads (H is a multiple of K), B rows of a decode batch, P pages
of the cache, L tokens a page, N pages a row has at most, d head size. Query head h reads key/value head h // (H / K).
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
    q_BHd: Tensor,
    k_cache_PLKd: Tensor,
    v_cache_PLKd: Tensor,
    lengths_B: Tensor,
    scale: float,
    *,
    table_BN: Tensor | None = None,
    kernel: str = "auto",
) -> Tensor:
    """One query a row against the first `lengths_B` tokens of its cache: a decode step. No gradient is needed.

    Args:
        q_BHd: queries.
        k_cache_PLKd, v_cache_PLKd: P pages of L tokens, the query's own key and value already written. Entries at or beyond a
            row's length have no influence but must be finite.
        lengths_B: int64 [B], tokens of each row, at least one of them above 0; a row of length 0 gives zeros.
        scale: factor of the scores.
        table_BN: int32 [B, N], the pages of each row in order; None when row b has page b alone (P >= B).
        kernel: implementation by name. On CUDA nothing is asked of the host, so a call can be captured.

    Returns:
        [B, H, d], dtype of q.

    Raises:
        KernelUnavailableError: `kernel` cannot run here.
    """
    implementation = dispatch.load("cached_attention", q_BHd.device, kernel)
    return implementation.cached_attention(q_BHd, k_cache_PLKd, v_cache_PLKd, lengths_B, scale, table_BN)
