"""What is done to heads before they turn (a bias is added, or a norm over each head of q and of k is taken), and where keys and values go besides.

Legend: d head size, K key/value heads, X = rows of q, k and v, T tokens, M places, P pages of a cache, L tokens a page."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from qerl.kernels.rms_norm import NormNoise


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Scales of the two norms; all heads of one share the scale, and so its noise, which is one draw or one a token."""

    q_weight_d: Tensor
    k_weight_d: Tensor
    eps: float
    q_noise: NormNoise | None = None
    """z of d channels: float32 [d], or [T, d], or a record."""
    k_noise: NormNoise | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBias:
    """A bias of the projections that is added in float32 where heads are made, and a vector that every rotated key is made smaller by.

    Attention's weights do not see what all keys have in common. A large bias of k, most of which turns slowly or not at all, would have k
    rounded more coarsely than what tells the keys apart.
    """

    bias_X: Tensor
    shift_Kd: Tensor
    """float32 [K, d]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlaces:
    """Where rotated keys, and values, are stored beside what is returned: in pages of a cache, in the type of heads."""

    k_PLKd: Tensor
    v_PLKd: Tensor
    source_M: Tensor
    """int64 [M], M at least T: which token is stored. The first T are all tokens in their order; others are tokens that go to further places."""
    place_M: Tensor
    """int64 [M], where to: page * L + offset, each once."""
