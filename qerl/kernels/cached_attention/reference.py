"""Decode attention by torch's scaled_dot_product_attention over the pages of each row.

Legend: B rows, H query heads, K key/value heads, G = H / K query heads that share one, d head size, P pages, L tokens a page,
N pages a row has at most.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def cached_attention(
    q_BHd: Tensor,
    k_cache_PLKd: Tensor,
    v_cache_PLKd: Tensor,
    lengths_B: Tensor,
    scale: float,
    table_BN: Tensor | None = None,
) -> Tensor:
    """See `qerl.kernels.cached_attention.cached_attention`.

    The G query heads of one key/value head stand in the place of query positions, so nothing of an unpaged cache is copied;
    pages are gathered, all that the table has room for: a caller who knows the longest row gives fewer columns.
    """
    rows, heads, size = q_BHd.shape
    page, kv_heads = k_cache_PLKd.shape[1:3]
    longest = int(lengths_B.max()) if table_BN is None else table_BN.shape[1] * page
    q_BKGd = q_BHd.view(rows, kv_heads, heads // kv_heads, size)

    def of_rows(cache_PLKd: Tensor) -> Tensor:
        if table_BN is None:
            return cache_PLKd[:rows, :longest].transpose(1, 2)
        return cache_PLKd[table_BN].flatten(1, 2).transpose(1, 2)

    visible_B11L = (torch.arange(longest, device=q_BHd.device) < lengths_B[:, None])[:, None, None]
    o_BKGd = scaled_dot_product_attention(
        q_BKGd, of_rows(k_cache_PLKd), of_rows(v_cache_PLKd), attn_mask=visible_B11L, scale=scale
    )
    return o_BKGd.reshape(rows, heads, size)
