"""How the kernel of kept values cuts a product into tiles, and its output rows into pieces. Plain arithmetic, free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from qerl.kernels.fp4_linear.adapter import Placement
from qerl.kernels.sizes import ceil_div

MOST_PIECES, MOST_RANKS = 4, 128
NO_ADAPTER = -1
_SHARED_BYTES = 220_000
"""Of a block, at most."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a product is cut."""

    rows: int
    """Rows of x of a tile."""
    columns: int
    """Outputs of a tile."""
    depth: int
    """Inputs of a step."""
    stages: int
    """Steps that are loaded ahead, at most."""
    warps: int
    splits: int = 1
    """Blocks that share a tile."""

    def stages_of(self, slots: int) -> int:
        """Steps that are loaded ahead where a tile makes h for `slots` ranks."""
        return min(self.stages, _SHARED_BYTES // (2 * self.depth * (self.rows + self.columns + slots)))


@dataclass(frozen=True, slots=True)
class Piece:
    """Output rows with one divisor and at most one adapter."""

    stop: int
    alpha: float
    """What sums with V are multiplied by."""
    part: int
    """Index of the adapter part; NO_ADAPTER for none."""


DEEP, SMALL, WIDE, LARGE = (
    Shape(64, 64, 128, 4, 4),
    Shape(64, 64, 64, 4, 4),
    Shape(64, 128, 64, 4, 4),
    Shape(128, 128, 64, 4, 4),
)
SHAPES = (DEEP, SMALL, WIDE, LARGE)
_LONG = 4096
"""Inputs from which on large tiles are faster than wide ones."""
_STEPS_OF_A_SPLIT = 9
"""Steps that pay for adding up a tile's sums, at least."""


def choose(tokens: int, d_out: int, d_in: int, borders: Sequence[int], processors: int) -> Shape | None:
    """The fastest way to cut a product whose pieces end at `borders`, by times on an H200; None where they are too narrow for every one."""
    shape = _by_tiles(tokens, d_out, d_in, processors)
    if any(border % shape.columns for border in borders):
        shape = SMALL
    return None if any(border % shape.columns for border in borders) else shape


def _by_tiles(tokens: int, d_out: int, d_in: int, processors: int) -> Shape:
    def tiles(shape: Shape) -> int:
        return ceil_div(tokens, shape.rows) * ceil_div(d_out, shape.columns)

    def shared(shape: Shape) -> Shape:
        most = ceil_div(d_in, shape.depth) // _STEPS_OF_A_SPLIT
        return replace(shape, splits=max(1, min(processors // tiles(shape), most)))

    if tiles(DEEP) <= processors:
        return shared(DEEP)
    if d_in >= _LONG:
        return shared(LARGE)
    # Two blocks of small tiles stand on a multiprocessor.
    return SMALL if tiles(SMALL) <= 2 * processors and tokens > SMALL.rows else WIDE


def pieces_of(
    segments: Sequence[int], placements: Sequence[Placement], alphas: Sequence[float]
) -> tuple[Piece, ...] | None:
    """The output rows in order, cut where the divisor (`alphas`, one a segment) or the adapter changes; None where two adapters meet in a row."""
    stops = list(accumulate(segments))
    borders = {0, *stops} | {border for place in placements for border in (place.rows.start, place.rows.stop)}
    pieces: list[Piece] = []
    for start, stop in pairwise(sorted(borders)):
        alpha = alphas[next(index for index, end in enumerate(stops) if start < end)]
        own = [i for i, place in enumerate(placements) if place.rows.start <= start and stop <= place.rows.stop]
        if len(own) > 1:
            return None
        part = own[0] if own else NO_ADAPTER
        if pieces and (pieces[-1].alpha, pieces[-1].part) == (alpha, part):
            pieces.pop()
        pieces.append(Piece(stop, alpha, part))
    return tuple(pieces)
