"""What a decoder layer needs of its surroundings to attend, and the packed form used by training passes.

Shape legend: T packed tokens, S sequences, H query heads, K key/value heads, d head dimension.

The decoder hands q, k and v of the new tokens to a context object; where earlier keys live is the context's business.
Training packs whole sequences end to end (``PackedSequences``); generation keeps a KV cache (``qerl.rollout``).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from qerl.kernels.attention import packed_attention


class AttentionContext(Protocol):
    """Positions of the tokens of one forward pass, and causal attention over them and what came before."""

    positions_T: Tensor
    """int64 [T]: position of each token in its own sequence."""

    def attend(self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        """Attention output [T, H, d] of layer ``layer``; q and k are rotated already."""
        ...


class PackedSequences:
    """Whole sequences packed end to end without padding; each token attends to its own sequence up to itself.

    Args:
        cu_seqlens_S1: int64 [S + 1], where each sequence begins, and T.
        positions_T: int64 [T]; counted from each sequence's beginning when not given.
    """

    def __init__(self, cu_seqlens_S1: Tensor, positions_T: Tensor | None = None):
        self.cu_seqlens_S1 = cu_seqlens_S1
        self.positions_T = packed_positions(cu_seqlens_S1) if positions_T is None else positions_T

    def attend(self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        return packed_attention(q_THd, k_TKd, v_TKd, self.cu_seqlens_S1, q_THd.shape[-1] ** -0.5)


def packed_positions(cu_seqlens_S1: Tensor) -> Tensor:
    """Position of each packed token in its own sequence, int64 [T]."""
    lengths_S = cu_seqlens_S1.diff()
    starts_T = torch.repeat_interleave(cu_seqlens_S1[:-1], lengths_S)
    return torch.arange(starts_T.numel(), device=cu_seqlens_S1.device) - starts_T
