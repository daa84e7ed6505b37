# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The kept regime: one launch for a product with V that is kept in memory (`PackedWeight.kept_OI`), adapters inside.

Every output tile makes the h that it needs itself, in the loop over the inputs in which it is multiplied: x is there already, and a part of A has
few rows. So no block waits for another, and h never leaves the multiprocessor. Where there are few tiles, several blocks share one (`splits`): each
adds up a run of the inputs, and the one that comes last adds their float32 sums in order. h is rounded to bfloat16, and the output once.

Legend: T tokens, I inputs, O output rows, R adapter ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from qerl.formats import PackedWeight
from qerl.kernels.fp4_linear import record
from qerl.kernels.fp4_linear.adapter import Placement
from qerl.kernels.fp4_linear.dense import row_alphas
from qerl.kernels.fp4_linear.kept_shape import (
    MOST_PIECES,
    MOST_RANKS,
    NO_ADAPTER,
    SHAPES,
    Piece,
    Shape,
    choose,
    pieces_of,
)
from qerl.kernels.fp4_linear.workspace import TILE_COUNTERS, workspace
from qerl.kernels.overlap import launch_next, overlap, wait
from qerl.kernels.sizes import ceil_div, power_of_2

__all__ = [
    "NO_ADAPTER",
    "SHAPES",
    "Piece",
    "Shape",
    "compile_call",
    "forget",
    "pieces_of",
    "product",
    "run",
    "takes",
    "variant",
]


def takes(
    x_TI: Tensor, weight: PackedWeight, placements: Sequence[Placement], a_RI: Sequence[Tensor], b_OR: Sequence[Tensor]
) -> bool:
    """Whether the kernel can run this call, whatever its speed."""
    if weight.kept_OI is None or not record.fits(weight, placements, a_RI, b_OR):
        return False
    aligned = weight.shape[1] % 8 == 0 and all(t.data_ptr() % 16 == 0 for t in (x_TI, *a_RI))
    return aligned and x_TI.shape[0] > 0 and _cut(x_TI, weight, placements) is not None


def product(
    x_TI: Tensor,
    weight: PackedWeight,
    bias_O: Tensor | None,
    placements: Sequence[Placement],
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """y [T, O] in `dtype` (bfloat16 or float32), rounded once, for what `takes` accepts."""
    found = _cut(x_TI, weight, placements)
    assert found is not None and weight.kept_OI is not None, (x_TI.shape, weight.shape)
    return run(x_TI, weight.kept_OI, bias_O, found[0], placements, a_RI, b_OR, found[1], dtype=dtype)


def _cut(x_TI: Tensor, weight: PackedWeight, placements: Sequence[Placement]) -> tuple[tuple[Piece, ...], Shape] | None:
    processors = workspace(x_TI.device).multiprocessors
    return _cut_of(x_TI.shape[0], weight.shape, weight.segments, row_alphas(weight), tuple(placements), processors)


@lru_cache(maxsize=4096)
def _cut_of(
    tokens: int,
    shape: tuple[int, int],
    segments: tuple[int, ...],
    alphas: tuple[float, ...],
    placements: tuple[Placement, ...],
    processors: int,
) -> tuple[tuple[Piece, ...], Shape] | None:
    """Kept, since a pass asks several times for each of its products, which takes the host as long as a launch."""
    ranks = {place.ranks.stop - place.ranks.start for place in placements}
    if len(ranks) > 1 or max(ranks, default=0) > MOST_RANKS or not all(place.scale for place in placements):
        return None
    pieces = pieces_of(segments, placements, alphas)
    if pieces is None or len(pieces) > MOST_PIECES:
        return None
    cut = choose(tokens, *shape, [piece.stop for piece in pieces[:-1]], processors)
    return None if cut is None else (pieces, cut)


def run(
    x_TI: Tensor,
    values_OI: Tensor,
    bias_O: Tensor | None,
    pieces: Sequence[Piece],
    placements: Sequence[Placement],
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
    shape: Shape,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """y [T, O] in `dtype`, cut by `shape`, whose columns end with every piece but the last."""
    x_TI = x_TI.contiguous()
    y_TO, grid, arguments, options = _launch(x_TI, values_OI, bias_O, pieces, placements, a_RI, b_OR, shape, dtype)
    _product[grid](*arguments, **options)
    return y_TO


def compile_call(
    x_TI: Tensor,
    weight: PackedWeight,
    bias_O: Tensor | None,
    placements: Sequence[Placement],
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
    *,
    dtype: torch.dtype,
) -> None:
    """Have the code that `product` would run for this call, which `takes` accepts, and run nothing."""
    found = _cut(x_TI, weight, placements)
    assert found is not None and weight.kept_OI is not None, (x_TI.shape, weight.shape)
    pieces, shape = found
    _, grid, arguments, options = _launch(x_TI, weight.kept_OI, bias_O, pieces, placements, a_RI, b_OR, shape, dtype)
    _product.warmup(*arguments, grid=grid, **options)


def variant(x_TI: Tensor, weight: PackedWeight, placements: Sequence[Placement]) -> Shape:
    """What of the number of rows of x decides which code a product with one layer runs."""
    found = _cut(x_TI, weight, placements)
    assert found is not None, (x_TI.shape, weight.shape)
    return replace(found[1], splits=min(found[1].splits, 2))


def forget() -> None:
    """Drop what this process has compiled, or failed to compile; what the disk has is read again. Triton's interpreter keeps nothing."""
    getattr(_product, "device_caches", {}).clear()


def _launch(
    x_TI: Tensor,
    values_OI: Tensor,
    bias_O: Tensor | None,
    pieces: Sequence[Piece],
    placements: Sequence[Placement],
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
    shape: Shape,
    dtype: torch.dtype,
) -> tuple[Tensor, tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """(y, whose numbers are still to be made, and grid, arguments and options of the kernel that makes them)."""
    assert all(piece.stop % shape.columns == 0 for piece in pieces[:-1]), (shape, pieces)
    (tokens, d_in), d_out = x_TI.shape, values_OI.shape[0]
    rank = max((place.ranks.stop - place.ranks.start for place in placements), default=0)
    slots = max(16, power_of_2(rank)) if rank else 0
    tiles = ceil_div(tokens, shape.rows) * ceil_div(d_out, shape.columns)
    y_TO = torch.empty(tokens, d_out, dtype=dtype, device=x_TI.device)
    sums, counters = y_TO, y_TO
    if shape.splits > 1:
        assert tiles <= TILE_COUNTERS, tiles
        numbers = tiles * shape.splits * shape.rows * (shape.columns + slots)
        sums = torch.empty(numbers, dtype=torch.float32, device=x_TI.device)
        counters = workspace(x_TI.device).counters()

    def tiles_of(matrix: Tensor, rows: int) -> TensorDescriptor:
        # All are contiguous; what torch says of one row's way to the next may be anything.
        return TensorDescriptor(matrix, list(matrix.shape), [d_in, 1], [rows, shape.depth])

    parts, told = _numbers(tuple(pieces), tuple(placements))
    arguments = (
        tiles_of(x_TI, shape.rows),
        tiles_of(values_OI, shape.columns),
        tiles_of(a_RI[0], slots) if a_RI else x_TI,
        x_TI if bias_O is None else bias_O.to(torch.bfloat16).contiguous(),
        y_TO,
        sums,
        counters,
        *[x_TI if part == NO_ADAPTER else b_OR[part] for part in parts],
        *told,
        tokens,
        d_out,
        d_in,
        rank,
        shape.splits,
    )
    options = {
        "RANKS": slots,
        "BIAS": bias_O is not None,
        "ROWS": shape.rows,
        "COLUMNS": shape.columns,
        "DEPTH": shape.depth,
        "SPLIT": shape.splits > 1,
        "num_warps": shape.warps,
        "num_stages": shape.stages_of(slots),
        **overlap(x_TI.device),
    }
    return y_TO, (tiles, shape.splits), arguments, options


@lru_cache(maxsize=1024)
def _numbers(
    pieces: tuple[Piece, ...], placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int | float, ...]]:
    """(adapter part of each piece that the kernel is told of, what it is told of them beside tensors)."""
    filled = [pieces[min(index, len(pieces) - 1)] for index in range(MOST_PIECES)]
    places = [None if piece.part == NO_ADAPTER else placements[piece.part] for piece in filled]
    scales = [1.0 if place is None else float(place.scale) for place in places]
    return tuple(piece.part for piece in filled), (
        *(piece.stop for piece in filled[:-1]),
        *(piece.alpha / scale for piece, scale in zip(filled, scales, strict=True)),
        *scales,
        *(0 if place is None else place.rows.start for place in places),
        *(NO_ADAPTER if place is None else place.ranks.start for place in places),
    )


_RUNTIME = ["tokens", "splits", "stop0", "stop1", "stop2"]
_RUNTIME += [f"{name}{index}" for name in ("start", "rank") for index in range(MOST_PIECES)]


@triton.jit(do_not_specialize=_RUNTIME)
def _product(
    x,
    values,
    a,
    bias,
    y,
    sums,
    counters,
    b0,
    b1,
    b2,
    b3,
    stop0,
    stop1,
    stop2,
    alpha0,
    alpha1,
    alpha2,
    alpha3,
    scale0,
    scale1,
    scale2,
    scale3,
    start0,
    start1,
    start2,
    start3,
    rank0,
    rank1,
    rank2,
    rank3,
    tokens,
    d_out,
    d_in,
    rank,
    splits,
    RANKS: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A run of the inputs of one output tile. Of a piece: the B of its adapter, one past its last row, the divisor's inverse over the scale, the
    scale, the first row of B, and the adapter's first rank, negative where there is none."""
    launch_next(OVERLAP)
    row_tiles = tl.cdiv(tokens, ROWS)
    tile, split = tl.program_id(0), tl.program_id(1)
    # Neighbouring blocks read the same weights.
    m0, n0 = tile % row_tiles * ROWS, tile // row_tiles * COLUMNS
    b, alpha, scale, b_start, rank_start = b0, alpha0, scale0, start0, rank0
    if n0 >= stop0:
        b, alpha, scale, b_start, rank_start = b1, alpha1, scale1, start1, rank1
    if n0 >= stop1:
        b, alpha, scale, b_start, rank_start = b2, alpha2, scale2, start2, rank2
    if n0 >= stop2:
        b, alpha, scale, b_start, rank_start = b3, alpha3, scale3, start3, rank3
    # Where there is no adapter, h of the first ranks is made all the same, and multiplied by zeros.
    a0 = tl.maximum(rank_start, 0)
    steps = tl.cdiv(d_in, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    h = tl.zeros((ROWS, RANKS if RANKS > 0 else 16), dtype=tl.float32)
    wait(OVERLAP)
    for step in range(steps * split // splits, steps * (split + 1) // splits):
        x_part = x.load([m0, step * DEPTH])
        total = tl.dot(x_part, values.load([n0, step * DEPTH]).T, total)
        if RANKS > 0:
            h = tl.dot(x_part, a.load([a0, step * DEPTH]).T, h)
    last = True
    if SPLIT:
        SIZE: tl.constexpr = ROWS * (COLUMNS + RANKS)
        own = sums + tile.to(tl.int64) * splits * SIZE
        i = tl.arange(0, ROWS)[:, None]
        at = i * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        tl.store(own + split * SIZE + at, total)
        if RANKS > 0:
            h_at = ROWS * COLUMNS + i * RANKS + tl.arange(0, RANKS)[None, :]
            tl.store(own + split * SIZE + h_at, h)
        # All threads have stored before one of them counts.
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == splits - 1
        if last:
            total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for other in range(splits):
                total += tl.load(own + other * SIZE + at, cache_modifier=".cg")
            if RANKS > 0:
                h = tl.zeros((ROWS, RANKS), dtype=tl.float32)
                for other in range(splits):
                    h += tl.load(own + other * SIZE + h_at, cache_modifier=".cg")
            tl.store(counters + tile, 0)
    if last:
        m, n = m0 + tl.arange(0, ROWS), n0 + tl.arange(0, COLUMNS)
        # The product with B goes on from the sums, so that it needs no others: by alpha / scale before it, by the scale behind it.
        total *= alpha
        if RANKS > 0:
            r = tl.arange(0, RANKS)
            known = (rank_start >= 0) & (r[:, None] < rank) & (n[None, :] < d_out)
            up = tl.load(b + (n[None, :] - b_start) * rank + r[:, None], mask=known, other=0.0)
            total = tl.dot(h.to(tl.bfloat16).to(up.dtype), up, total) * scale
        if BIAS:
            total += tl.load(bias + n, mask=n < d_out, other=0.0).to(tl.float32)[None, :]
        place = y + m.to(tl.int64)[:, None] * d_out + n[None, :]
        tl.store(place, total.to(y.dtype.element_ty), mask=(m[:, None] < tokens) & (n[None, :] < d_out))
