"""Decode attention by torch's scaled_dot_product_attention over the pages of each row.

Legend: B rows, H query heads, K key/value heads, G = H / K query heads that share one, d head size, P pages, L tokens a page.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qerl.kernels.cached_attention.rows import CacheRows
from qerl.kernels.cached_attention.storage import raw, write
from qerl.kernels.rope import HeadBias, HeadNorms
from qerl.kernels.rope import reference as rope
from qerl.kernels.types import as_type


def cached_attention(
    qkv_BX: Tensor,
    rotation: tuple[Tensor, Tensor],
    heads: int,
    kv_heads: int,
    k_cache_PLKd: Tensor,
    v_cache_PLKd: Tensor,
    rows: CacheRows,
    scale: float,
    norms: HeadNorms | None = None,
    *,
    bias: HeadBias | None = None,
    dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """See `qerl.kernels.cached_attention.cached_attention`."""
    q_BHd, k_BKd, v_BKd = rope.rope(qkv_BX, None, *rotation, heads, kv_heads, norms, bias, dtype)
    for cache_PLKd, values_BKd in ((k_cache_PLKd, k_BKd), (v_cache_PLKd, v_BKd)):
        write(cache_PLKd, rows.place_B, values_BKd)
    return as_type(attend(q_BHd, k_cache_PLKd, v_cache_PLKd, rows, scale), output_dtype or q_BHd.dtype)


def attend(q_BHd: Tensor, k_cache_PLKd: Tensor, v_cache_PLKd: Tensor, rows: CacheRows, scale: float) -> Tensor:
    """One query a row against its tokens, the last of which is at the row's length: [B, H, d].

    The G query heads of one key/value head stand in the place of query positions, so nothing of an unpaged cache is copied;
    pages are gathered, all that the table has room for: a caller who knows the longest row gives fewer columns.
    """
    batch, heads, size = q_BHd.shape
    kv_heads = k_cache_PLKd.shape[2]

    def of_rows(cache_PLKd: Tensor) -> Tensor:
        if rows.table_BN is None:
            of_rows_BLKd = cache_PLKd[:batch, : rows.end]
        else:
            of_rows_BLKd = raw(cache_PLKd)[rows.table_BN].view(cache_PLKd.dtype).flatten(1, 2)
        return as_type(of_rows_BLKd, q_BHd.dtype).transpose(1, 2)

    o_BKGd = scaled_dot_product_attention(
        q_BHd.view(batch, kv_heads, heads // kv_heads, size),
        of_rows(k_cache_PLKd),
        of_rows(v_cache_PLKd),
        attn_mask=rows.mask_B11L(q_BHd.dtype),
        scale=scale,
    )
    return o_BKGd.reshape(batch, heads, size)
