"""How the decode kernel cuts a product into blocks, clusters and rounds. Plain arithmetic, free of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ROWS, COLUMNS, TILE_BYTES = 16, 64, 576
WARPS = 12
STAGES = 6
LORA_WARPS = 4
THREADS = 32 * (WARPS + LORA_WARPS)
MAX_PARTS = 4
MAX_SEGMENTS = 4

_FRAGMENT = 512
_FEW_SLICES = 16
"""Partial sums of h that every block adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """One way to run the decode kernel for a weight [d_out, d_in]."""

    columns: int
    """Rows of x, in eights (NT)."""
    cluster: int
    """Blocks that share a row tile, each with a slice of the inputs."""
    clusters: int
    row_tiles: int
    units: int
    """Tiles along the inputs."""
    slice_units: int
    """Most units of a block's slice."""
    round_tiles: int
    """Row tiles of a cluster between two reductions."""
    sub_slices: int
    """Parts of a slice for the adapters' A."""
    shared: int
    """Bytes of shared memory."""

    @property
    def partial_floats(self) -> int:
        """float32 numbers exchanged for 16 adapter rows."""
        return self.cluster * self.sub_slices * self.columns * _FRAGMENT // 4

    def cost(self) -> int:
        """Units that the busiest block reads."""
        return -(-self.row_tiles // self.clusters) * self.slice_units


def decode_geometry(
    rows: int, shape: tuple[int, int], ranks: int, *, cluster: int, clusters: int, limit: int
) -> Geometry | None:
    """The geometry for `rows` rows of x, or None where x and the ring do not fit into shared memory.

    Args:
        rows: M.
        shape: [d_out, d_in].
        ranks: adapter rows of all parts together.
        cluster: blocks of a cluster.
        clusters: clusters that run at the same time.
        limit: bytes of shared memory that a block may have.
    """
    columns = -(-rows // 8)
    row_tiles, units = -(-shape[0] // ROWS), -(-shape[1] // COLUMNS)
    if units < cluster:
        return None
    clusters = min(clusters, row_tiles)
    slice_units = -(-units // cluster)
    most_tiles = -(-row_tiles // clusters)
    groups = -(-ranks // ROWS)
    fixed = WARPS * STAGES * TILE_BYTES + 16 * columns * (slice_units * COLUMNS + 8)
    fixed += LORA_WARPS * columns * _FRAGMENT + 16 * columns * (groups * ROWS + 8)

    def shared(round_tiles: int) -> int:
        slots = round_tiles + WARPS - 1 + -(-round_tiles // cluster)
        return fixed + slots * columns * _FRAGMENT

    rounds = next((n for n in range(1, most_tiles + 1) if shared(-(-most_tiles // n)) <= limit), None)
    if rounds is None:
        return None
    round_tiles = -(-most_tiles // rounds)
    return Geometry(
        columns=columns,
        cluster=cluster,
        clusters=clusters,
        row_tiles=row_tiles,
        units=units,
        slice_units=slice_units,
        round_tiles=round_tiles,
        sub_slices=max(1, min(_FEW_SLICES // cluster, clusters // max(groups, 1), slice_units)),
        shared=shared(round_tiles),
    )


def best_geometry(
    rows: int, shape: tuple[int, int], ranks: int, *, clusters: Callable[[int], int], limit: int
) -> Geometry | None:
    """Of the cluster sizes that fit, the one whose busiest block reads least; the larger of equals, which shares x better.

    Args:
        clusters: cluster size -> clusters that run at the same time, 0 where the device has none.
    """
    found = []
    for cluster in (8, 4, 2, 1):
        if (count := clusters(cluster)) > 0:
            geometry = decode_geometry(rows, shape, ranks, cluster=cluster, clusters=count, limit=limit)
            if geometry is not None:
                found.append(geometry)
    return min(found, key=Geometry.cost, default=None)
