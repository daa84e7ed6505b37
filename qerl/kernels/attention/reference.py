"""Attention by torch's scaled_dot_product_attention on padded batches.

Legend: T packed tokens, U their keys, S sequences, L most tokens of one, M most keys, H query heads, K key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qerl.kernels.attention.spans import KeySpans


def packed_attention(
    q_THd: Tensor,
    k_UKd: Tensor,
    v_UKd: Tensor,
    cu_seqlens_S1: Tensor,
    scale: float,
    lengths: Sequence[int] | None = None,
    keys: KeySpans | None = None,
) -> Tensor:
    """See `qerl.kernels.attention.packed_attention`.

    Sequences are padded on the right, so the causal mask already keeps real queries away from padding; what stands in
    the padding (the tokens that follow in the pack) therefore does not matter.
    """
    total, heads, size = q_THd.shape
    starts_S, lengths_S = cu_seqlens_S1[:-1], cu_seqlens_S1.diff()
    sequences, longest = lengths_S.numel(), max(lengths) if lengths else int(lengths_S.max())
    ragged = sequences * longest != total

    def padded(x_THd: Tensor, bounds_S1: Tensor, most: int) -> Tensor:
        if len(x_THd) != sequences * most:
            source_SL = (bounds_S1[:-1, None] + torch.arange(most, device=x_THd.device)).clamp(max=len(x_THd) - 1)
            x_THd = x_THd.index_select(0, source_SL.flatten())
        return x_THd.view(sequences, most, -1, size).transpose(1, 2)

    grouped = heads != k_UKd.shape[1]
    query_SHLd = padded(q_THd, cu_seqlens_S1, longest)
    if keys is None:
        key_SKLd, value_SKLd = (padded(x, cu_seqlens_S1, longest) for x in (k_UKd, v_UKd))
        o_SHLd = scaled_dot_product_attention(
            query_SHLd, key_SKLd, value_SKLd, is_causal=True, scale=scale, enable_gqa=grouped
        )
    else:
        most = max(keys.lengths)
        key_SKMd, value_SKMd = (padded(x, keys.cu_keys_S1, most) for x in (k_UKd, v_UKd))
        before_S = keys.cu_keys_S1.diff() - lengths_S
        last_SL = before_S[:, None] + torch.arange(longest, device=q_THd.device)
        seen_SLM = torch.arange(most, device=q_THd.device) <= last_SL[:, :, None]
        o_SHLd = scaled_dot_product_attention(
            query_SHLd, key_SKMd, value_SKMd, attn_mask=seen_SLM[:, None], scale=scale, enable_gqa=grouped
        )
    o_PHd = o_SHLd.transpose(1, 2).reshape(sequences * longest, heads, size)
    if not ragged:
        return o_PHd
    shift_S = torch.arange(sequences, device=q_THd.device) * longest - starts_S
    slot_T = torch.arange(total, device=q_THd.device) + shift_S.repeat_interleave(lengths_S, output_size=total)
    return o_PHd.index_select(0, slot_T)
