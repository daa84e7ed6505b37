"""How the middle kernel cuts a product into launches, output tiles, blocks and pieces of h. Plain arithmetic, free of torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from qerl.kernels.cuda import Launch
from qerl.kernels.fp4_linear.regimes import RUN_ROWS
from qerl.kernels.fp4_linear.tiled import TILED
from qerl.kernels.fp4_linear.workspace import TILE_COUNTERS

NARROW, WIDEST = 128, 256
"""Rows of x of an output tile: up to the first, a warp may have two row tiles; the second is the most there are."""
WARPGROUPS = 2
"""Warpgroups of a block that multiply."""
CLUSTER = 2
"""Blocks with neighbouring rows, of a tile of more than `NARROW` rows of x."""
MANY_WARPS = 32
"""Rows of x up to which large weights have twice as many, with one row tile a warp instead of two."""

MOST_STAGES = 16
"""Steps in the ring, at most."""

PIECE_RANKS = 32
"""Ranks of a piece of h: `PIECE_RANKS` of cuda/adapters.cuh."""
MOST_PLACES = 4
"""Places in shared memory for 32 ranks of B and h of a tile, at most; one for ranks up to 32."""
_STAGES_FOR_TWO, _STAGES_FOR_MORE = 4, 8
"""Steps that the ring keeps where there are two such places, and more."""
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
    places: int = 1
    """Places for 32 ranks of B and h of a tile."""
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
    def watched(self) -> bool:
        """Whether sums of shared tiles go through `Workspace.sums`, without counters: `WATCHED` of cuda/middle.cuh."""
        return self.tiles * self.tokens <= 64

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
        """Bytes of shared memory behind the ring: places for 32 ranks of B and h of a tile, where there may be adapters."""
        return 0 if TILED[self.format].by_rows else 64 * (self.tokens + self.block_rows) * self.places

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


def runs_of(tokens: int, row_tiles: int) -> list[slice]:
    """The rows of x of each launch: whole output tiles, about as many in each, and no more than are counted."""
    row_blocks = -(-row_tiles * 16 // (64 * WARPGROUPS * CLUSTER))
    most = max(1, min(RUN_ROWS // WIDEST, TILE_COUNTERS // (row_blocks * CLUSTER * WARPGROUPS)))
    tiles = -(-tokens // WIDEST)
    count = -(-tiles // most)
    stops = [min(tokens, WIDEST * (index * tiles // count)) for index in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(stops)]


def slices_of_h(shape: Shape, token_tiles: int, ranks: int, units: int) -> tuple[int, int]:
    """(slices of the inputs that each part of h is made from, pieces in all).

    Clusters without tiles make them, if there are enough, and otherwise all clusters about as much of them.
    """
    groups = token_tiles * -(-ranks // (PIECE_RANKS * shape.cluster))
    if groups == 0:
        return 1, 0
    spare = shape.most - shape.blocks // shape.cluster
    if spare >= groups and groups * units <= _SPARE_STEPS * spare:
        most = spare // groups
    else:
        most = max(1, shape.most // groups)
    slices = -(-units // -(-units // most))
    return slices, groups * slices


def choose(tokens: int, row_tiles: int, units: int, device: Device, name: str = "nvfp4", rank: int = 0) -> Shape:
    """The shape for `tokens` rows of x, a weight of so many tiles in the format called `name` and adapters of at most so many ranks each.

    Widths are few: each is a kernel of its own, compiled in 1 to 4 s, and a batch that shrinks asks for one after the other.
    """
    if tokens > NARROW:
        token_tiles = -(-tokens // WIDEST)
        width = _round_up(-(-tokens // token_tiles), 64)
        shape = Shape(format=name, tokens=width, tiles=1, blocks=0, cluster=CLUSTER)
        return with_blocks(_with_places(shape, rank, device), tokens, row_tiles, units, device)
    # Where there are fewer tiles than blocks, sums pass between blocks, and a smaller tile has fewer of them.
    many = -(-row_tiles // 16) >= device.multiprocessors
    # With few rows of x nothing hides a warp's latencies but other warps.
    tiles, groups = (1, 2 * WARPGROUPS) if many and tokens <= MANY_WARPS else (2 if many else 1, WARPGROUPS)
    shape = Shape(format=name, tokens=_round_up(tokens, 32), tiles=tiles, groups=groups, blocks=0)
    return with_blocks(_with_places(shape, rank, device), tokens, row_tiles, units, device)


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


def _with_places(shape: Shape, rank: int, device: Device) -> Shape:
    """`shape` with a place for each 32 ranks of a part, as far as the ring stays deep enough: the next 32 of a tile wait for an empty one."""
    for places in range(min(MOST_PLACES, -(-rank // PIECE_RANKS)), 1, -1):
        found = replace(shape, places=places)
        if _with_ring(found, device).stages >= (_STAGES_FOR_TWO if places == 2 else _STAGES_FOR_MORE):
            return found
    return shape


def _with_ring(shape: Shape, device: Device) -> Shape:
    room = device.shared_limit - shape.static - replace(shape, stages=0).shared
    return replace(shape, stages=shape.stages or min(MOST_STAGES, room // shape.stage_bytes))
