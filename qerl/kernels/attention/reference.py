"""Attention by torch's scaled_dot_product_attention on padded batches.

Legend: T packed tokens, S sequences, L longest sequence, H query heads, K key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def packed_attention(
    q_THd: Tensor,
    k_TKd: Tensor,
    v_TKd: Tensor,
    cu_seqlens_S1: Tensor,
    scale: float,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """See `qerl.kernels.attention.packed_attention`.

    Sequences are padded on the right, so the causal mask already keeps real queries away from padding; what stands in
    the padding (the tokens that follow in the pack) therefore does not matter.
    """
    total, heads, size = q_THd.shape
    starts_S, lengths_S = cu_seqlens_S1[:-1], cu_seqlens_S1.diff()
    sequences, longest = lengths_S.numel(), max(lengths) if lengths else int(lengths_S.max())
    steps_L = torch.arange(longest, device=q_THd.device)
    source_SL = (starts_S[:, None] + steps_L).clamp(max=total - 1)
    ragged = sequences * longest != total

    def padded(x_THd: Tensor) -> Tensor:
        x_PHd = x_THd.index_select(0, source_SL.flatten()) if ragged else x_THd
        return x_PHd.view(sequences, longest, -1, size).transpose(1, 2)

    o_SHLd = scaled_dot_product_attention(
        padded(q_THd), padded(k_TKd), padded(v_TKd), is_causal=True, scale=scale, enable_gqa=heads != k_TKd.shape[1]
    )
    o_PHd = o_SHLd.transpose(1, 2).reshape(sequences * longest, heads, size)
    if not ragged:
        return o_PHd
    shift_S = torch.arange(sequences, device=q_THd.device) * longest - starts_S
    slot_T = torch.arange(total, device=q_THd.device) + shift_S.repeat_interleave(lengths_S, output_size=total)
    return o_PHd.index_select(0, slot_T)
