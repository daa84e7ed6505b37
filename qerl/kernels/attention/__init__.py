"""Grouped-query attention over packed sequences: prefill and training.

Legend: T packed tokens, U their keys, S sequences, H query heads, K key/value heads (H is a multiple of K), d head size. Query head
h reads key/value head h // (H / K).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qerl.kernels import dispatch
from qerl.kernels.attention.enlarged import enlarge_from, enlarge_inside
from qerl.kernels.attention.prefix import Repeats, repeat_prefixes
from qerl.kernels.attention.spans import KeySpans

__all__ = ["KeySpans", "Repeats", "enlarge_from", "enlarge_inside", "packed_attention", "repeat_prefixes"]


def packed_attention(
    q_THd: Tensor,
    k_UKd: Tensor,
    v_UKd: Tensor,
    cu_seqlens_S1: Tensor,
    scale: float,
    *,
    lengths: Sequence[int] | None = None,
    keys: KeySpans | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Causal attention inside each of S sequences that are packed end to end. Differentiable.

    Args:
        q_THd, k_UKd, v_UKd: one dtype; rotary embedding already applied.
        cu_seqlens_S1: int64 or int32, which the CUDA kernel takes as it is, [S + 1]: first token of each sequence, and T. No sequence is empty.
        scale: factor of the scores, 1 / sqrt(d) as a rule.
        lengths: tokens of each sequence, where the host knows them; else the device is asked, which waits for it.
        keys: where the keys of each sequence stand that has more of them than tokens: its tokens are the last ones then, and the
            keys before them are seen by all. None when a token has one key, its own.
        kernel: implementation by name.

    Returns:
        [T, H, d], dtype of q.

    Raises:
        KernelUnavailableError: `kernel` cannot run here.
    """
    implementation = dispatch.load("attention", q_THd.device, kernel)
    return implementation.packed_attention(q_THd, k_UKd, v_UKd, cu_seqlens_S1, scale, lengths, keys)
