"""What a decoder layer needs of its surroundings to attend, and the packed form used by training passes.

Shape legend: T packed tokens, U their keys, S sequences, H query heads, K key/value heads, d head dimension, X = (H + 2 K) d.

The decoder hands the projections of the new tokens, and how they are rotated, to a context object; where keys and values go, and
where earlier ones live, is the context's business.
Training packs whole sequences end to end (``PackedSequences``); generation keeps a KV cache (``qerl.rollout``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from qerl.kernels.attention import (
    KeySpans,
    Repeats,
    enlarge_from,
    enlarge_inside,
    packed_attention,
    repeat_prefixes,
)
from qerl.kernels.rope import CachePlaces, HeadBias, HeadNorms, rope


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """Which samples the sequences of a pass belong to: what noise that differs between samples is keyed by."""

    keys_S: Tensor
    """int64 [S]: sample key of each sequence, unique within the rollout."""
    prompt_lengths_S: Tensor
    """int64 [S]: a position below it is of the prompt."""
    sequence_T: Tensor | None = None
    """int64 [T]: which sequence each token is of; None when there is one token a sequence, in their order."""

    def of_tokens(self, values_S: Tensor) -> Tensor:
        """Spread values (or rows) of the sequences over their tokens, [T, ...]."""
        return values_S if self.sequence_T is None else values_S.index_select(0, self.sequence_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """How projections become heads: norms over each head where the model has them, the rotation of a token's position, and the types of
    attention."""

    cos_Td: Tensor
    """float32 [T, d], of each token."""
    sin_Td: Tensor
    """float32 [T, d]; the first half of d carries a minus sign."""
    heads: int
    """H."""
    kv_heads: int
    """K."""
    norms: HeadNorms | None = None
    bias: HeadBias | None = None
    """What the projections lack."""
    dtype: torch.dtype | None = None
    """Of q, k and v; that of the projections when not given."""
    output_dtype: torch.dtype | None = None
    """Of attention's output; that of q when not given."""

    def split(self, qkv_TX: Tensor, stored: CachePlaces | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(q [T, H, d], k [T, K, d], v [T, K, d]), rotated; k and v are stored as well, if asked. Differentiable otherwise."""
        return rope(
            qkv_TX,
            None,
            self.cos_Td,
            self.sin_Td,
            self.heads,
            self.kv_heads,
            norms=self.norms,
            bias=self.bias,
            dtype=self.dtype,
            stored=stored,
        )


class AttentionContext(Protocol):
    """Positions of the tokens of one forward pass, and causal attention over them and what came before."""

    positions_T: Tensor
    """int64 [T]: position of each token in its own sequence."""
    samples: SampleRows | None
    """Whose the tokens are; None where no noise asks for it."""

    def attend(self, layer: int, qkv_TX: Tensor, rotary: Rotary) -> Tensor:
        """Attention output [T, H, d] of layer ``layer`` for its projections, rows of q, k and v side by side."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrompts:
    """How some sequences of a pack continue another, the prompt that they share. Its tokens stand there once."""

    sequence_T: Tensor
    """int64 [T]: the sample that a token counts as; one of a shared prompt as the first that continues it."""
    repeats: Repeats
    keys: KeySpans


class PackedSequences:
    """Sequences packed end to end without padding; each token attends to its own sequence up to itself, and to the prompt that the
    sequence continues, if it does.

    Args:
        cu_seqlens_S1: int64 [S + 1], where each sequence begins, and T.
        positions_T: int64 [T]; counted from each sequence's beginning when not given.
        sample_keys_S: int64 [S], sample key of each sample, with ``prompt_lengths_S``; needed by noise that differs
            between samples or between prompt and answer.
        prompt_lengths_S: int64 [S].
        shared: which sequences continue which; the samples are then fewer than the sequences. None: each sample is one sequence.
        lengths: tokens of each sequence, where the host knows them; else the device is asked, which waits for it.
    """

    def __init__(
        self,
        cu_seqlens_S1: Tensor,
        positions_T: Tensor | None = None,
        *,
        sample_keys_S: Tensor | None = None,
        prompt_lengths_S: Tensor | None = None,
        shared: SharedPrompts | None = None,
        lengths: tuple[int, ...] | None = None,
    ):
        self.cu_seqlens_S1 = cu_seqlens_S1
        self.shared = shared
        # Asked of the device, and given the type that kernels take, once a pack and not once a layer.
        self.lengths = tuple(cu_seqlens_S1.diff().tolist()) if lengths is None else lengths
        self._bounds_S1 = cu_seqlens_S1.int()
        self.positions_T = packed_positions(cu_seqlens_S1) if positions_T is None else positions_T
        self.samples: SampleRows | None = None
        if sample_keys_S is not None and prompt_lengths_S is not None:
            if shared is not None:
                sequence_T = shared.sequence_T
            else:
                sequence_T = torch.arange(len(sample_keys_S), device=cu_seqlens_S1.device).repeat_interleave(
                    cu_seqlens_S1.diff(), output_size=self.positions_T.numel()
                )
            self.samples = SampleRows(keys_S=sample_keys_S, prompt_lengths_S=prompt_lengths_S, sequence_T=sequence_T)

    def attend(self, layer: int, qkv_TX: Tensor, rotary: Rotary) -> Tensor:
        if rotary.dtype != torch.float16:
            return self.attend_heads(*rotary.split(qkv_TX))
        norms = rotary.norms
        if norms is not None and norms.q_weight_d.requires_grad:
            qkv_TX, q_weight_d, k_weight_d, mark = enlarge_inside(qkv_TX, norms.q_weight_d, norms.k_weight_d)
            rotary = replace(rotary, norms=replace(norms, q_weight_d=q_weight_d, k_weight_d=k_weight_d))
        else:
            qkv_TX, mark = enlarge_inside(qkv_TX)
        o_THd = self.attend_heads(*rotary.split(qkv_TX))
        return enlarge_from(o_THd, mark, rotary.output_dtype or o_THd.dtype)

    def attend_heads(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        """Attention output [T, H, d] of heads that are rotated already."""
        scale = q_THd.shape[-1] ** -0.5
        if self.shared is None:
            return packed_attention(q_THd, k_TKd, v_TKd, self._bounds_S1, scale, lengths=self.lengths)
        k_UKd, v_UKd = repeat_prefixes(k_TKd, v_TKd, self.shared.repeats)
        keys = self.shared.keys
        return packed_attention(q_THd, k_UKd, v_UKd, self._bounds_S1, scale, lengths=self.lengths, keys=keys)


def packed_positions(cu_seqlens_S1: Tensor) -> Tensor:
    """Position of each packed token in its own sequence, int64 [T]."""
    lengths_S = cu_seqlens_S1.diff()
    starts_T = torch.repeat_interleave(cu_seqlens_S1[:-1], lengths_S)
    return torch.arange(starts_T.numel(), device=cu_seqlens_S1.device) - starts_T
