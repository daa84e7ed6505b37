"""Launching the middle kernel: tens to thousands of rows of x, the weight expanded in registers and multiplied by wgmma."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from qerl.formats import PackedWeight
from qerl.kernels.cuda import Kernel, Launch, TensorMap, tensor_map
from qerl.kernels.fp4_linear import record
from qerl.kernels.fp4_linear.adapter import Placement, rows_of
from qerl.kernels.fp4_linear.middle_shape import (
    CLUSTER,
    PIECE_RANKS,
    WARPGROUPS,
    Shape,
    choose,
    runs_of,
    slices_of_h,
    with_blocks,
)
from qerl.kernels.fp4_linear.tiled import TILED, by_rows
from qerl.kernels.fp4_linear.workspace import (
    H_COUNTERS,
    SCALE_BASE,
    TILE_COUNTERS,
    Code,
    Workspace,
    compiled,
    workspace,
)


class _Params(ctypes.Structure):
    """`MiddleParams` of cuda/middle.cuh."""

    __slots__ = ()  # a name that is no field is an error
    _fields_ = (
        ("x_map", TensorMap),
        ("a_map", TensorMap),
        ("tile_map", TensorMap),
        *((name, ctypes.c_void_p) for name in ("out", "bias", "side", "a", "h")),
        *((name, ctypes.c_void_p) for name in ("partials", "h_partials", "counters", "h_counters")),
        *(
            (name, ctypes.c_int)
            for name in (
                *("m", "n", "k", "units", "token_tiles", "clusters", "steps", "ranks"),
                *("h_slices", "h_pieces", "h_steps", "segments", "parts", "float_out"),
            )
        ),
        *((name, ctypes.c_uint) for name in ("per_units", "per_token_tiles", "per_slices", "scale_base")),
        ("segment_stop", record.Stops),
        ("part", record.Parts),
        ("unused", ctypes.c_ubyte * 64),
    )


def takes(
    x_TI: Tensor, weight: PackedWeight, placements: Sequence[Placement], a_RI: Sequence[Tensor], b_OR: Sequence[Tensor]
) -> bool:
    """Whether the kernel can run this call, whatever its speed."""
    return (
        torch.cuda.get_device_capability(x_TI.device) == (9, 0)
        and x_TI.shape[0] > 0
        and weight.shape[1] % 8 == 0
        and record.fits(weight, placements, a_RI, b_OR)
        and not (placements and by_rows(weight))
        and _aligned(placements, a_RI, b_OR)
        and _apart(tuple(placements))
    )


def _aligned(placements: Sequence[Placement], a_RI: Sequence[Tensor], b_OR: Sequence[Tensor]) -> bool:
    """Whether rows of adapters can be read 16 bytes at a time."""
    return (
        _even(tuple(placements))
        and all(a.shape[0] % 8 == 0 for a in a_RI)
        and all(matrix.data_ptr() % 16 == 0 for matrix in (*a_RI, *b_OR))
    )


@lru_cache(maxsize=1024)
def _even(placements: tuple[Placement, ...]) -> bool:
    return all(rank % 8 == 0 for place in placements for rank in (place.ranks.start, place.ranks.stop))


@lru_cache(maxsize=1024)
def _apart(placements: tuple[Placement, ...]) -> bool:
    """Whether no row has two adapters."""
    rows = sorted((place.rows.start, place.rows.stop) for place in placements)
    return all(stop <= start for (_, stop), (start, _) in pairwise(rows))


def _most_ranks(placements: Sequence[Placement]) -> int:
    """Ranks of the largest part."""
    return max([place.ranks.stop - place.ranks.start for place in placements], default=0)


def product(
    x_TI: Tensor,
    weight: PackedWeight,
    bias_O: Tensor | None,
    placements: Sequence[Placement],
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(y [T, O] in `dtype` (bfloat16 or float32), rounded once, x A^T [T, R] of the one A) for what `takes` accepts."""
    out_TO = torch.empty(x_TI.shape[0], weight.shape[0], dtype=dtype, device=x_TI.device)
    return out_TO, _run(x_TI, weight, bias_O, placements, a_RI, b_OR, out_TO)


def shrunk(
    x_TI: Tensor, weight: PackedWeight, placements: Sequence[Placement], a_RI: Sequence[Tensor], b_OR: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The second of what `product` returns, with the same bits, at the price of the first rows of the weight."""
    if not a_RI:
        return ()
    some = min(weight.shape[0], 64 * WARPGROUPS * CLUSTER)
    out_TO = torch.empty(x_TI.shape[0], some, dtype=torch.bfloat16, device=x_TI.device)
    return _run(x_TI, weight, None, placements, a_RI, b_OR, out_TO)


def _run(
    x_TI: Tensor,
    weight: PackedWeight,
    bias_O: Tensor | None,
    placements: Sequence[Placement],
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
    out_TO: Tensor,
) -> tuple[Tensor, ...]:
    """Writes y, or as many of its first columns as `out_TO` has, and returns h."""
    x_TI = x_TI.contiguous()
    if x_TI.data_ptr() % 16 != 0:
        x_TI = x_TI.clone()
    if bias_O is not None:
        bias_O = bias_O.to(torch.bfloat16).contiguous()
    h = tuple(torch.empty(x_TI.shape[0], len(a), dtype=torch.bfloat16, device=x_TI.device) for a in a_RI)
    for rows in runs_of(x_TI.shape[0], weight.tensors["tiles"].shape[0]):
        some_h = tuple(rows_of(h_TR, rows) for h_TR in h)
        _launch(rows_of(x_TI, rows), weight, bias_O, placements, a_RI, b_OR, rows_of(out_TO, rows), some_h)
    return h


def _launch(
    x_TI: Tensor,
    weight: PackedWeight,
    bias_O: Tensor | None,
    placements: Sequence[Placement],
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
    out_TO: Tensor,
    h: Sequence[Tensor],
) -> None:
    """One launch, for rows of x that `runs_of` gives."""
    space = workspace(x_TI.device)
    tiles = weight.tensors["tiles"]
    tokens, (row_tiles, units, _) = x_TI.shape[0], tiles.shape
    ranks, outputs = a_RI[0].shape[0] if a_RI else 0, out_TO.shape[1]
    some = outputs if outputs < weight.shape[0] else None
    plan = _plan(choose, space, weight.format, tokens, row_tiles, units, ranks, _most_ranks(placements), some)
    shape, row_tiles, token_tiles = plan.shape, plan.row_tiles, plan.token_tiles
    slices, pieces, output_tiles, clusters = plan.slices, plan.pieces, plan.output_tiles, plan.clusters
    partial_bytes = 2 * shape.blocks * shape.block_rows * shape.tokens * 4
    h_partial_bytes = pieces * shape.cluster * shape.tokens * PIECE_RANKS * 4
    in_scratch = 0 if shape.watched else partial_bytes
    scratch = space.scratch((in_scratch + h_partial_bytes) // 1024, 512).data_ptr()
    counters = space.counters().data_ptr()
    params = _Params(
        x_map=tensor_map(
            x_TI.data_ptr(),
            (tokens, weight.shape[1]),
            2 * weight.shape[1],
            (shape.tokens // shape.cluster, 64),
            words=False,
        ),
        a_map=tensor_map(
            a_RI[0].data_ptr(), (ranks, weight.shape[1]), 2 * weight.shape[1], (PIECE_RANKS, 64), words=False
        )
        if a_RI
        else TensorMap(),
        tile_map=tensor_map(
            tiles.data_ptr(),
            (row_tiles, shape.tile_bytes // 8 * units),
            shape.tile_bytes * units,
            (shape.block_rows // 16, shape.tile_bytes // 8),
            words=True,
        ),
        out=out_TO.data_ptr(),
        bias=None if bias_O is None else bias_O.data_ptr(),
        side=record.side_of(weight),
        a=a_RI[0].data_ptr() if a_RI else None,
        h=h[0].data_ptr() if h else None,
        partials=space.sums(partial_bytes // 4).data_ptr() if shape.watched else scratch,
        h_partials=scratch + in_scratch,
        counters=counters,
        h_counters=counters + 4 * H_COUNTERS,
        m=tokens,
        n=outputs,
        k=weight.shape[1],
        units=units,
        token_tiles=token_tiles,
        clusters=clusters,
        steps=output_tiles * units,
        ranks=ranks,
        h_slices=slices,
        h_pieces=pieces,
        h_steps=-(-units // slices),
        segments=len(weight.segments),
        parts=len(placements),
        float_out=int(out_TO.dtype == torch.float32),
        per_units=_per(units),
        per_token_tiles=_per(token_tiles),
        per_slices=_per(slices),
        scale_base=SCALE_BASE,
        segment_stop=record.stops_of(weight),
        part=record.parts_of(placements, b_OR),
    )
    _kernel(space, shape, outputs % 8 == 0).launch(plan.launch, params)


class _Plan(NamedTuple):
    """What of a launch the sizes decide."""

    shape: Shape
    launch: Launch
    row_tiles: int
    token_tiles: int
    slices: int
    pieces: int
    output_tiles: int
    clusters: int


@lru_cache(maxsize=4096)
def _plan(
    choose: Callable[..., Shape],
    space: Workspace,
    name: str,
    tokens: int,
    row_tiles: int,
    units: int,
    ranks: int,
    most_ranks: int,
    some: int | None,
) -> _Plan:
    """`ranks`: of A; `most_ranks`: of a part; `some`: outputs that are made, where not all are. Kept, since a pass asks for each of its products, and choosing takes the host several launches' time."""
    shape = choose(tokens, row_tiles, units, space, name, most_ranks)
    token_tiles = -(-tokens // shape.tokens)
    # Of h the same slices whatever is made beside it.
    slices, pieces = slices_of_h(shape, token_tiles, ranks, units)
    if some is not None:
        row_tiles = -(-some // 16)
        shape = with_blocks(replace(shape, blocks=0), tokens, row_tiles, units, space)
    output_tiles = token_tiles * -(-row_tiles * 16 // shape.rows)
    assert output_tiles * shape.cluster * shape.groups <= TILE_COUNTERS, (tokens, row_tiles)
    clusters = shape.blocks // shape.cluster
    shape = replace(shape, spare=max(0, min(shape.most - clusters, pieces)))
    return _Plan(shape, shape.launch, row_tiles, token_tiles, slices, pieces, output_tiles, clusters)


def _per(divisor: int) -> int:
    """What `divide` of cuda/middle.cuh multiplies with."""
    return 0 if divisor == 1 else (1 << 32) // divisor + 1


@cache
def wgmma_source(tokens: int) -> str:
    """CUDA C++ of `multiply`: the product of 64 rows x 16 inputs in registers with [16, tokens] in shared memory."""
    count = tokens // 2
    outputs = ",".join(f"%{index}" for index in range(count))
    operands = ",".join(f'"+f"(d[{index}])' for index in range(count))
    a = ",".join(f"%{count + index}" for index in range(4))
    return f"""
__device__ __forceinline__ void multiply(float (&d)[{count}], const u32 (&a)[4], u64 b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16 {{{outputs}}}, {{{a}}}, %{count + 4}, 1, 1, 1, 0;"
               : {operands}
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}}
"""


def macros(shape: Shape, vectors: bool = True) -> dict[str, int]:
    """Compile-time constants of cuda/middle.cu; `vectors`: rows of y are whole chunks of 16 bytes."""
    return {
        **TILED[shape.format].macros(shape.stride),
        "TOKENS": shape.tokens,
        "TILES": shape.tiles,
        "GROUPS": shape.groups,
        "STAGES": shape.stages,
        "CLUSTER": shape.cluster,
        "PLACES": shape.places,
        "VECTORS": int(vectors),
    }


def _kernel(space: Workspace, shape: Shape, vectors: bool) -> Kernel:
    return compiled(space.device, *_code(shape, vectors))


@lru_cache(maxsize=1024)
def _code(shape: Shape, vectors: bool) -> Code:
    return Code("middle", tuple(macros(shape, vectors).items()), wgmma_source(shape.tokens))


def code(x_TI: Tensor, weight: PackedWeight, placements: Sequence[Placement]) -> Code:
    """What `product` runs for a call that `takes` accepts."""
    row_tiles, units, _ = weight.tensors["tiles"].shape
    space = workspace(x_TI.device)
    shape = choose(x_TI.shape[0], row_tiles, units, space, weight.format, _most_ranks(placements))
    return _code(shape, weight.shape[0] % 8 == 0)
