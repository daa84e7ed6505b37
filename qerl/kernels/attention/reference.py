"""Attention by torch's scaled_dot_product_attention on padded batches.

Legend: T packed tokens, S sequences, L longest sequence, H query heads, K key/value heads, G = H / K query heads that
share one, B slots of the cache, d head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def packed_attention(q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cu_seqlens_S1: Tensor, scale: float) -> Tensor:
    """See `qerl.kernels.attention.packed_attention`.

    Sequences are padded on the right, so the causal mask already keeps real queries away from padding.
    """
    total, heads, size = q_THd.shape
    lengths_S = cu_seqlens_S1.diff()
    sequences, longest = lengths_S.numel(), int(lengths_S.max())
    ragged = sequences * longest != total
    if ragged:
        shift_S = torch.arange(sequences, device=q_THd.device) * longest - cu_seqlens_S1[:-1]
        slot_T = torch.arange(total, device=q_THd.device) + shift_S.repeat_interleave(lengths_S, output_size=total)

    def padded(x_THd: Tensor) -> Tensor:
        if ragged:
            x_THd = x_THd.new_zeros(sequences * longest, *x_THd.shape[1:]).index_copy(0, slot_T, x_THd)
        return x_THd.view(sequences, longest, -1, size).transpose(1, 2)

    k_SHLd, v_SHLd = (_repeat_heads(padded(x), heads) for x in (k_TKd, v_TKd))
    o_SHLd = scaled_dot_product_attention(padded(q_THd), k_SHLd, v_SHLd, is_causal=True, scale=scale)
    o_PHd = o_SHLd.transpose(1, 2).reshape(sequences * longest, heads, size)
    return o_PHd.index_select(0, slot_T) if ragged else o_PHd


def cached_attention(q_BHd: Tensor, k_cache_BLKd: Tensor, v_cache_BLKd: Tensor, lengths_B: Tensor, scale: float) -> Tensor:
    """See `qerl.kernels.attention.cached_attention`.

    The G query heads of one key/value head stand in the place of query positions, so nothing of the cache is copied.
    """
    slots, heads, size = q_BHd.shape
    kv_heads = k_cache_BLKd.shape[2]
    longest = int(lengths_B.max())
    q_BKGd = q_BHd.view(slots, kv_heads, heads // kv_heads, size)
    k_BKLd, v_BKLd = (cache[:, :longest].transpose(1, 2) for cache in (k_cache_BLKd, v_cache_BLKd))
    visible_B11L = (torch.arange(longest, device=q_BHd.device) < lengths_B[:, None])[:, None, None]
    o_BKGd = scaled_dot_product_attention(q_BKGd, k_BKLd, v_BKLd, attn_mask=visible_B11L, scale=scale)
    return o_BKGd.reshape(slots, heads, size)


def _repeat_heads(x_SKLd: Tensor, heads: int) -> Tensor:
    """Each key/value head once for every query head that reads it."""
    repeats = heads // x_SKLd.shape[1]
    if repeats == 1:
        return x_SKLd
    return x_SKLd[:, :, None].expand(-1, -1, repeats, -1, -1).flatten(1, 2)
