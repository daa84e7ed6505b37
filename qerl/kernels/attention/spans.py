"""Keys of sequences that have more of them than tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySpans:
    """Where the keys of each of S packed sequences stand."""

    cu_keys_S1: Tensor
    """int32 or int64 [S + 1], first key of each sequence, and U."""
    lengths: tuple[int, ...]
    """Keys of each sequence, at least as many as it has tokens."""
