"""Grouped-query attention of one query a row against a cache in pages: a decode step.

Legend: B rows of a decode batch, H query heads, K key/value heads (H is a multiple of K), d head size, P pages of the cache, L tokens
a page, N pages a row has at most. Query head h reads key/value head h // (H / K).
"""

from __future__ import annotations

from torch import Tensor

from qerl.kernels import dispatch

__all__ = ["cached_attention"]


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
