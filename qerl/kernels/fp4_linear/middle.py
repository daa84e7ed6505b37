"""Launching the middle kernel: tens to hundreds of rows of x, the weight expanded in registers and multiplied by wgmma."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from qerl.formats import PackedWeight
from qerl.kernels.cuda import Kernel, Launch, TensorMap, tensor_map
from qerl.kernels.fp4_linear import record
from qerl.kernels.fp4_linear.adapter import Placement
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

NARROW, WIDEST = 128, 256
"""Rows of x of an output tile: up to the first, a warp may have two row tiles; the second is the most there are."""
WARPGROUPS = 2
"""Warpgroups of a block that multiply."""
MANY_WARPS = 32
"""Rows of x up to which large weights have twice as many, with one row tile a warp instead of two."""

MOST_STAGES = 16
"""Steps in the ring, at most."""

_PIECE_RANKS = 32
"""Ranks of a piece of h: `PIECE_RANKS` of cuda/adapters.cuh."""
_SPARE_STEPS = 10
"""Steps of a piece, at most, for which the multiprocessors that the tiles leave idle make h by themselves."""
_SPLIT_STEPS = 4
"""What sharing tiles unevenly costs, in steps of a block."""
_FEWEST_STEPS = 3
"""Steps for which a block is worth starting."""


class Device(Protocol):
    """What the choice of a shape asks of a device; a `Workspace` answers."""

    multiprocessors: int
    shared_limit: int

    def resident_clusters(self, launch: Launch) -> int:
        """Most clusters of this geometry that run at the same time."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One way to run the kernel."""

    format: str = "nvfp4"
    tokens: int
    """Rows of x of an output tile."""
    tiles: int
    """Row tiles of a warp."""
    blocks: int
    """Blocks that share the steps of all output tiles."""
    groups: int = WARPGROUPS
    cluster: int = 1
    """Blocks with neighbouring rows that copy x for one another."""
    stages: int = 0
    """Steps in the ring; 0 for as many as fit."""
    most: int = 0
    """Clusters of this shape that run at the same time."""
    spare: int = 0
    """Clusters of a launch that only make pieces of h."""

    @property
    def block_rows(self) -> int:
        """Rows of the weight of a block."""
        return 64 * self.groups * self.tiles

    @property
    def rows(self) -> int:
        """Rows of the weight of an output tile."""
        return self.cluster * self.block_rows

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile of the weight."""
        return TILED[self.format].tile_bytes

    @property
    def stride(self) -> int:
        """Bytes from one pair of codes to the next, where they are looked up."""
        return 256 if self.tokens <= NARROW else 128

    @property
    def stage_bytes(self) -> int:
        """Bytes of a step in the ring."""
        return -(-(128 * self.tokens + self.tile_bytes * self.block_rows // 16) // 1024) * 1024

    @property
    def wide(self) -> bool:
        """Whether all registers of a multiprocessor are taken."""
        return self.tiles * self.tokens > 128

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * self.groups + 128

    @property
    def static(self) -> int:
        """Bytes of static shared memory, at most: staging of outputs, what rows are made with, and barriers."""
        return _round_up(4096 * self.groups + 32 * self.block_rows + 16 * MOST_STAGES + 128, 1024)

    @property
    def adapter_bytes(self) -> int:
        """Bytes of shared memory behind the ring: 32 ranks of B and h of a tile, where there may be adapters."""
        return 0 if TILED[self.format].by_rows else 64 * (self.tokens + self.block_rows)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        table = TILED[self.format].table_bytes(self.stride)
        return table + self.stages * self.stage_bytes + self.adapter_bytes + 1024

    @property
    def launch(self) -> Launch:
        """The geometry of a launch."""
        grid = self.blocks + self.cluster * self.spare
        return Launch(grid=grid, block=self.threads, shared=self.shared, cluster=self.cluster, overlap=True)


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
        and _apart(placements)
    )


def _aligned(placements: Sequence[Placement], a_RI: Sequence[Tensor], b_OR: Sequence[Tensor]) -> bool:
    """Whether rows of adapters can be read 16 bytes at a time."""
    ranks = (rank for place in placements for rank in (place.ranks.start, place.ranks.stop))
    return all(value % 8 == 0 for value in (*ranks, *(a.shape[0] for a in a_RI))) and all(
        matrix.data_ptr() % 16 == 0 for matrix in (*a_RI, *b_OR)
    )


def _apart(placements: Sequence[Placement]) -> bool:
    """Whether no row has two adapters."""
    rows = sorted((place.rows.start, place.rows.stop) for place in placements)
    return all(stop <= start for (_, stop), (start, _) in pairwise(rows))


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
    space = workspace(x_TI.device)
    x_TI = x_TI.contiguous()
    if x_TI.data_ptr() % 16 != 0:
        x_TI = x_TI.clone()
    tiles = weight.tensors["tiles"]
    tokens, (row_tiles, units, _) = x_TI.shape[0], tiles.shape
    shape = choose(tokens, row_tiles, units, space, weight.format)
    token_tiles, row_blocks = -(-tokens // shape.tokens), -(-row_tiles * 16 // shape.rows)
    output_tiles = token_tiles * row_blocks
    assert output_tiles * shape.cluster * shape.groups <= TILE_COUNTERS, (tokens, weight.shape)
    ranks = a_RI[0].shape[0] if a_RI else 0
    slices, pieces = slices_of_h(shape, token_tiles, ranks, units)
    clusters = shape.blocks // shape.cluster
    shape = replace(shape, spare=max(0, min(shape.most - clusters, pieces)))
    shrunk = tuple(torch.empty(tokens, ranks, dtype=torch.bfloat16, device=x_TI.device) for _ in a_RI)
    out_TO = torch.empty(tokens, weight.shape[0], dtype=dtype, device=x_TI.device)
    if bias_O is not None:
        bias_O = bias_O.to(torch.bfloat16).contiguous()
    partial_bytes = 2 * shape.blocks * shape.block_rows * shape.tokens * 4
    h_partial_bytes = pieces * shape.cluster * shape.tokens * _PIECE_RANKS * 4
    partials = space.scratch((partial_bytes + h_partial_bytes) // 1024, 512).data_ptr()
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
            a_RI[0].data_ptr(), (ranks, weight.shape[1]), 2 * weight.shape[1], (_PIECE_RANKS, 64), words=False
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
        h=shrunk[0].data_ptr() if shrunk else None,
        partials=partials,
        h_partials=partials + partial_bytes,
        counters=counters,
        h_counters=counters + 4 * H_COUNTERS,
        m=tokens,
        n=weight.shape[0],
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
        float_out=int(dtype == torch.float32),
        per_units=_per(units),
        per_token_tiles=_per(token_tiles),
        per_slices=_per(slices),
        scale_base=SCALE_BASE,
        segment_stop=record.stops_of(weight),
        part=record.parts_of(placements, b_OR),
    )
    _kernel(space, shape, weight.shape[0] % 8 == 0).launch(shape.launch, params)
    return out_TO, shrunk


def _per(divisor: int) -> int:
    """What `divide` of cuda/middle.cuh multiplies with."""
    return 0 if divisor == 1 else (1 << 32) // divisor + 1


def slices_of_h(shape: Shape, token_tiles: int, ranks: int, units: int) -> tuple[int, int]:
    """(slices of the inputs that each part of h is made from, pieces in all).

    Clusters without tiles make them, if there are enough, and otherwise all clusters about as much of them.
    """
    groups = token_tiles * -(-ranks // (_PIECE_RANKS * shape.cluster))
    if groups == 0:
        return 1, 0
    spare = shape.most - shape.blocks // shape.cluster
    if spare >= groups and groups * units <= _SPARE_STEPS * spare:
        most = spare // groups
    else:
        most = max(1, shape.most // groups)
    slices = -(-units // -(-units // most))
    return slices, groups * slices


def choose(tokens: int, row_tiles: int, units: int, device: Device, name: str = "nvfp4") -> Shape:
    """The shape for `tokens` rows of x and a weight of so many tiles in the format called `name`.

    Widths are few: each is a kernel of its own, compiled in 1 to 4 s, and a batch that shrinks asks for one after the other.
    """
    if tokens > NARROW:
        token_tiles = -(-tokens // WIDEST)
        width = _round_up(-(-tokens // token_tiles), 64)
        return with_blocks(
            Shape(format=name, tokens=width, tiles=1, blocks=0, cluster=2), tokens, row_tiles, units, device
        )
    # Where there are fewer tiles than blocks, sums pass between blocks, and a smaller tile has fewer of them.
    many = -(-row_tiles // 16) >= device.multiprocessors
    # With few rows of x nothing hides a warp's latencies but other warps.
    tiles, groups = (1, 2 * WARPGROUPS) if many and tokens <= MANY_WARPS else (2 if many else 1, WARPGROUPS)
    shape = Shape(format=name, tokens=_round_up(tokens, 32), tiles=tiles, groups=groups, blocks=0)
    return with_blocks(shape, tokens, row_tiles, units, device)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def with_blocks(shape: Shape, tokens: int, row_tiles: int, units: int, device: Device) -> Shape:
    """`shape` with as many blocks as pay, and as deep a ring as fits."""
    output_tiles = -(-tokens // shape.tokens) * -(-row_tiles * 16 // shape.rows)
    shape = _with_ring(shape, device)
    # Blocks wait for one another, so all of them must run at once.
    most = device.multiprocessors
    if shape.cluster > 1:
        most = device.resident_clusters(replace(shape, blocks=shape.cluster).launch)
    even = output_tiles * max(1, min(most // output_tiles, units // _FEWEST_STEPS)) if output_tiles <= most else 0
    uneven = min(most, max(1, output_tiles * units // _FEWEST_STEPS))
    choices = [(-(-output_tiles * units // uneven) + _SPLIT_STEPS, uneven)]
    if even:
        choices.append((-(-output_tiles * units // even), even))
    blocks = min(choices)[1]
    return replace(shape, blocks=blocks * shape.cluster, most=most)


def _with_ring(shape: Shape, device: Device) -> Shape:
    room = device.shared_limit - shape.static - replace(shape, stages=0).shared
    return replace(shape, stages=shape.stages or min(MOST_STAGES, room // shape.stage_bytes))


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
        "VECTORS": int(vectors),
    }


def _kernel(space: Workspace, shape: Shape, vectors: bool) -> Kernel:
    return compiled(space.device, *_code(shape, vectors))


def _code(shape: Shape, vectors: bool) -> Code:
    return Code("middle", tuple(macros(shape, vectors).items()), wgmma_source(shape.tokens))


def code(x_TI: Tensor, weight: PackedWeight) -> Code:
    """What `product` runs for a call that `takes` accepts."""
    row_tiles, units, _ = weight.tensors["tiles"].shape
    shape = choose(x_TI.shape[0], row_tiles, units, workspace(x_TI.device), weight.format)
    return _code(shape, weight.shape[0] % 8 == 0)
