"""Records of what products are given beside x, and the flat form of adapters, which autograd and kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from qerl.formats import PackedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPart:
    """A LoRA adapter of some output rows: y[:, start:stop] += scale * (x A^T) B^T, rank r = columns of B.

    Parts that read the same x can hand over the SAME stacked `a_RI` tensor (the same object) with their own
    `rank_start`; x A^T is then one product for all of them.
    """

    start: int
    """First output row."""
    stop: int
    """One past the last output row."""
    a_RI: Tensor
    """[R, d_in], R >= rank_start + r."""
    b_OR: Tensor
    """[stop - start, r]."""
    scale: float
    """alpha / rank."""
    rank_start: int = 0
    """First row of `a_RI` that belongs to this part."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one part reads and writes; tensors are held apart, by index."""

    rows: slice
    ranks: slice
    a_index: int
    scale: float

    def __hash__(self) -> int:
        # Slices have none before Python 3.12.
        return hash((self.rows.start, self.rows.stop, self.ranks.start, self.ranks.stop, self.a_index, self.scale))


class AdapterParts(tuple[AdapterPart, ...]):
    """Parts that are given to many products: their flat form is made once."""

    @cached_property
    def flat(self) -> tuple[tuple[Placement, ...], list[Tensor], list[Tensor]]:
        """As of `flatten`."""
        return _flat(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A packed weight with what products with it are given beside x, as of `qerl.kernels.fp4_linear.fp4_linear`."""

    weight: PackedWeight
    bias_O: Tensor | None
    adapters: Sequence[AdapterPart]
    dense_OI: Tensor | None
    dtype: torch.dtype
    """Of y."""


def columns_of(matrix: Tensor, part: slice) -> Tensor:
    """The columns of a part: the matrix itself where it has no others, since a view takes the host a good part of a launch."""
    return matrix if part.start == 0 and part.stop == matrix.shape[1] else matrix[:, part]


def rows_of(matrix: Tensor, part: slice) -> Tensor:
    """As `columns_of`, for rows."""
    return matrix if part.start == 0 and part.stop == matrix.shape[0] else matrix[part]


def flatten(parts: Sequence[AdapterPart]) -> tuple[tuple[Placement, ...], list[Tensor], list[Tensor]]:
    """(placements, distinct A tensors, one B a part)."""
    return parts.flat if isinstance(parts, AdapterParts) else _flat(parts)


def _flat(parts: Sequence[AdapterPart]) -> tuple[tuple[Placement, ...], list[Tensor], list[Tensor]]:
    distinct: list[Tensor] = []
    placements = []
    for part in parts:
        index = next((i for i, a in enumerate(distinct) if a is part.a_RI), len(distinct))
        if index == len(distinct):
            distinct.append(part.a_RI)
        ranks = slice(part.rank_start, part.rank_start + part.b_OR.shape[1])
        assert part.b_OR.shape[0] == part.stop - part.start, "rows of B are the part's output rows"
        assert ranks.stop <= part.a_RI.shape[0], "A holds the part's ranks"
        placements.append(Placement(slice(part.start, part.stop), ranks, index, part.scale))
    return tuple(placements), distinct, [part.b_OR for part in parts]
