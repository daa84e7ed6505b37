"""How the decode kernel cuts a product into blocks, clusters and rounds. Plain arithmetic, free of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ROWS, COLUMNS = 16, 64
_TILE_BYTES = 576
LORA_WARPS = 4

_FRAGMENT = 512
_X_COST = 0.3
"""The cost of a byte that other blocks read too, and that comes from the cache, against one of the weight."""
_ROUND_COST = 40_000
"""Bytes that could be read in the time of a round's barriers."""
_STATIC = 128
_RINGS = (6, 4)
"""Units that a warp's ring may hold, the preferred number first."""
_CHUNKS = 8
"""Partial sums of h that every block adds up, about: as many as a thread of the kernel watches together (`PIECES_AT_ONCE`)."""


def warps(columns: int) -> int:
    """Main warps of a block; fewer where each needs more registers."""
    return 16 if columns <= 2 else 12


def threads(columns: int) -> int:
    """Threads of a block, the adapters' warps with them."""
    return 32 * (warps(columns) + LORA_WARPS)


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
    rank_slots: int
    """Partial sums that one block sends to another in a round, at most."""
    groups: int
    """Groups of 16 rows of the stacked A."""
    chunks: int
    """Runs of a block's slice of the inputs that h is summed over."""
    ring: int
    """Units of a warp's ring."""
    shared: int
    """Bytes of shared memory."""
    tile_bytes: int
    """Bytes of a tile."""

    def cost(self) -> float:
        """Bytes that the busiest block reads, those from the cache at a discount."""
        most_tiles = -(-self.row_tiles // self.clusters)
        rounds = -(-most_tiles // self.round_tiles)
        x_bytes = 16 * self.columns * COLUMNS * self.slice_units
        return rounds * _ROUND_COST + most_tiles * self.slice_units * self.tile_bytes + _X_COST * x_bytes


def decode_geometry(
    rows: int,
    shape: tuple[int, int],
    ranks: int,
    *,
    cluster: int,
    clusters: int,
    limit: int,
    ring: int = _RINGS[0],
    tile_bytes: int = _TILE_BYTES,
    table_bytes: int = 0,
) -> Geometry | None:
    """The geometry for `rows` rows of x, or None where x and the ring do not fit into shared memory.

    Args:
        rows: M.
        shape: [d_out, d_in].
        ranks: rows of the stacked A.
        cluster: blocks of a cluster.
        clusters: clusters that run at the same time.
        limit: bytes of shared memory that a block may have.
        ring: units of a warp's ring.
        tile_bytes: bytes of a tile.
        table_bytes: shared memory of a block that the table of codes takes.
    """
    columns = -(-rows // 8)
    row_tiles, units = -(-shape[0] // ROWS), -(-shape[1] // COLUMNS)
    if units < cluster:
        return None
    clusters = min(clusters, row_tiles)
    slice_units = -(-units // cluster)
    most_tiles = -(-row_tiles // clusters)
    groups = -(-ranks // ROWS)
    chunks = max(1, min(_CHUNKS // cluster, clusters // max(1, groups), 2 * (units // cluster)))
    fixed = table_bytes + warps(columns) * ring * tile_bytes + 16 * columns * (slice_units * COLUMNS + 8)
    fixed += (warps(columns) + LORA_WARPS) * columns * _FRAGMENT + 16 * columns * (groups * ROWS + 8)

    for rounds in range(1, most_tiles + 1):
        round_tiles = -(-most_tiles // rounds)
        last = {tiles % round_tiles or round_tiles for tiles in (most_tiles, row_tiles // clusters) if tiles}
        slots = max(_rank_slots(tiles, units, cluster, warps(columns)) for tiles in {round_tiles, *last})
        share = -(-round_tiles // cluster)
        shared = fixed + cluster * slots * columns * _FRAGMENT + share * (columns * _FRAGMENT + 64)
        if shared + _STATIC <= limit:
            return Geometry(
                columns=columns,
                cluster=cluster,
                clusters=clusters,
                row_tiles=row_tiles,
                units=units,
                slice_units=slice_units,
                round_tiles=round_tiles,
                rank_slots=slots,
                groups=groups,
                chunks=chunks,
                ring=ring,
                shared=shared,
                tile_bytes=tile_bytes,
            )
    return None


def best_geometry(
    rows: int,
    shape: tuple[int, int],
    ranks: int,
    *,
    clusters: Callable[[int], int],
    limit: int,
    tile_bytes: int = _TILE_BYTES,
    table_bytes: int = 0,
) -> Geometry | None:
    """Of the cluster sizes that fit, the one whose busiest block reads least; see `decode_geometry`.

    Args:
        clusters: cluster size -> clusters that run at the same time, 0 where the device has none.
    """
    found = []
    for cluster in (8, 4, 2, 1):
        if (count := clusters(cluster)) > 0:
            tried = (
                decode_geometry(
                    rows,
                    shape,
                    ranks,
                    cluster=cluster,
                    clusters=count,
                    limit=limit,
                    ring=ring,
                    tile_bytes=tile_bytes,
                    table_bytes=table_bytes,
                )
                for ring in _RINGS
            )
            found += [geometry for geometry in tried if geometry is not None][:1]
    return min(found, key=Geometry.cost, default=None)


def _share(index: int, of: int, total: int) -> int:
    return index * total // of


def _holder(element: int, of: int, total: int) -> int:
    return ((element + 1) * of - 1) // total


def _rank_slots(tiles: int, units: int, cluster: int, main_warps: int) -> int:
    """Most partial sums that one block of a cluster sends to another in a round of `tiles` row tiles."""
    most = 1
    for source in range(cluster):
        slice_units = _share(source + 1, cluster, units) - _share(source, cluster, units)
        total = tiles * slice_units
        active = min(main_warps, total)
        for owner in range(cluster):
            first, last = _share(owner, cluster, tiles), _share(owner + 1, cluster, tiles)
            if last > first:
                crossed = _holder(last * slice_units - 1, active, total) - _holder(first * slice_units, active, total)
                most = max(most, last - first + crossed)
    return most
