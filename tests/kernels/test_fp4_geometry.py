"""How the decode kernels cut a product: every partial sum has a place of its own, and every reader finds those of its tile."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from fp4_builders import PUBLISHED, projections

from qerl.kernels.fp4_linear import middle
from qerl.kernels.fp4_linear.geometry import best_geometry, decode_geometry, warps
from qerl.kernels.fp4_linear.middle_shape import runs_of
from qerl.kernels.fp4_linear.regimes import RUN_ROWS
from qerl.kernels.fp4_linear.tiled import TILED
from qerl.kernels.fp4_linear.workspace import TILE_COUNTERS

LIMIT = 232448  # of an H200
CLUSTERS = {1: 132, 2: 66, 4: 30, 8: 15}  # as an H200 answers
# q k v, o, gate up and down of Qwen2.5 7B and 0.5B, and odd ones.
SHAPES = [(4608, 3584), (3584, 18944), (37888, 3584), (1152, 896), (896, 4864), (40, 100), (17, 16), (2000, 576)]


def share(index, of, total):
    return index * total // of


def holder(element, of, total):
    return ((element + 1) * of - 1) // total


def slices(geometry):
    bounds = [share(rank, geometry.cluster, geometry.units) for rank in range(geometry.cluster + 1)]
    return [stop - start for start, stop in pairwise(bounds)]


def rounds(geometry):
    """(row tiles of a round) for every round of every cluster, each number once."""
    found = set()
    for cluster in range(geometry.clusters):
        left = share(cluster + 1, geometry.clusters, geometry.row_tiles) - share(
            cluster, geometry.clusters, geometry.row_tiles
        )
        while left > 0:
            found.add(min(geometry.round_tiles, left))
            left -= geometry.round_tiles
    return found


def written(geometry, tiles):
    """(owner, slot) -> (row tile, block) of all partial sums of a round, walked as a warp of the kernel walks."""
    places = {}
    main = warps(geometry.columns)
    for rank, slice_units in enumerate(slices(geometry)):
        total = tiles * slice_units
        active = min(main, total)
        units = 0
        for warp in range(active):
            start, stop = share(warp, active, total), share(warp + 1, active, total)
            units += stop - start
            for tile in range(start // slice_units, (stop - 1) // slice_units + 1):
                owner = holder(tile, geometry.cluster, tiles)
                first = share(owner, geometry.cluster, tiles)
                slot = tile - first + warp - holder(first * slice_units, active, total)
                assert 0 <= slot < geometry.rank_slots
                key = (owner, rank * geometry.rank_slots + slot)
                assert key not in places, "two partial sums in one place"
                places[key] = (tile, rank)
        assert units == total, "every unit is read once"
    return places


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [8, 16, 32])
def test_every_partial_sum_is_read_where_it_was_written(shape, rows):
    for cluster, count in CLUSTERS.items():
        geometry = decode_geometry(rows, shape, 0, cluster=cluster, clusters=count, limit=LIMIT, ring=4)
        if geometry is None:
            continue
        assert geometry.shared <= LIMIT
        for tiles in rounds(geometry):
            places = written(geometry, tiles)
            for owner in range(cluster):
                first, last = share(owner, cluster, tiles), share(owner + 1, cluster, tiles)
                for tile in range(first, last):
                    for rank, slice_units in enumerate(slices(geometry)):
                        total = tiles * slice_units
                        active = min(warps(geometry.columns), total)
                        base = holder(first * slice_units, active, total)
                        begin = holder(tile * slice_units, active, total) - base
                        end = holder((tile + 1) * slice_units - 1, active, total) - base
                        for slot in range(begin, end + 1):
                            place = (owner, rank * geometry.rank_slots + tile - first + slot)
                            assert places.pop(place) == (tile, rank)
            assert not places, "written and never read"


@pytest.mark.parametrize("name", TILED)
def test_a_fit_is_found_for_every_projection_of_published_models(name):
    tile = TILED[name]
    # FP8 is for LM heads, which have no adapters.
    heads = [((151936,), widths[0]) for widths in PUBLISHED.values()]
    for segments, d_in in heads if name == "fp8" else projections():
        for ranks in (0,) if name == "fp8" else (0, 32, 96):
            for rows in (8, 16):
                if name.startswith("nf4") and rows == 16 and d_in >= 27648:
                    continue  # its table leaves no room for 16 rows of so many inputs: two launches of 8
                shape = (sum(segments), d_in)
                found = best_geometry(
                    rows,
                    shape,
                    ranks,
                    clusters=CLUSTERS.get,
                    limit=LIMIT,
                    tile_bytes=tile.tile_bytes,
                    table_bytes=tile.table_bytes(2048 // rows),
                )
                assert found is not None, (shape, ranks, rows)
                assert found.shared <= LIMIT


def test_without_clusters_small_inputs_still_fit():
    """As before sm_90: one block a row tile."""
    geometry = best_geometry(8, (4608, 3584), 0, clusters=lambda cluster: 108 * (cluster == 1), limit=166912)
    assert geometry is not None
    assert geometry.cluster == 1


@pytest.mark.parametrize("ranks", [8, 32, 96, 1024])
def test_every_piece_of_h_has_a_block(ranks):
    for cluster, count in CLUSTERS.items():
        geometry = decode_geometry(8, (4608, 3584), ranks, cluster=cluster, clusters=count, limit=LIMIT)
        assert geometry is not None
        assert geometry.groups * 16 >= ranks
        taken = [range(first, geometry.groups * geometry.chunks, count) for first in range(count)]
        assert sorted(i for pieces in taken for i in pieces) == list(range(geometry.groups * geometry.chunks))
        assert geometry.groups > count or max(map(len, taken)) == 1, "in one go where there are enough clusters"
        assert geometry.chunks <= 2 * (geometry.units // cluster), "no piece is empty"


@pytest.mark.parametrize("d_in", [8, 64, 72, 120, 128, 896, 1000, 3584, 4104, 18944, 27648])
def test_every_block_has_inputs_to_copy_in_whole_chunks(d_in):
    """As `expect_x` and `load_x` of cuda/decode.cuh count them: a copy of no bytes, or of part of 16, would never come."""
    for cluster, count in CLUSTERS.items():
        geometry = decode_geometry(8, (4608, d_in), 0, cluster=cluster, clusters=count, limit=LIMIT, ring=4)
        if geometry is None:
            continue
        first, copied = 0, 0
        for units in slices(geometry):
            inputs = min(units * 64, d_in - first * 64)
            assert inputs > 0 and inputs % 8 == 0, "an inner block's end is that of a unit"
            assert (geometry.slice_units * 64 + 8) % 8 == 0 and units <= geometry.slice_units
            first, copied = first + units, copied + inputs
        assert copied == d_in


H200 = SimpleNamespace(
    multiprocessors=132, shared_limit=LIMIT, resident_clusters=lambda launch: CLUSTERS[launch.cluster]
)


@pytest.mark.parametrize("tokens", [1, 17, 32, 64, 100, 128, 129, 200, 500, 2048])
@pytest.mark.parametrize("name", TILED)
def test_the_middle_kernel_gets_a_shape_that_fits(name, tokens):
    sizes = {(-(-sum(segments) // 16), -(-d_in // 64)) for segments, d_in in projections()}
    for row_tiles, units in sorted(sizes | {(56, 14), (2, 1)}):
        shape = middle.choose(tokens, row_tiles, units, H200, name)
        assert shape.stages >= 4
        output_tiles = -(-tokens // shape.tokens) * -(-row_tiles * 16 // shape.rows)
        assert shape.tokens % (8 * shape.cluster) == 0
        assert shape.tokens * shape.tiles <= 256, "its sums fit into registers"
        assert shape.shared + shape.static <= LIMIT
        assert shape.blocks <= 132, "all blocks run at once: they wait for one another"
        assert shape.blocks <= output_tiles * units * shape.cluster, "none is without work"


@pytest.mark.parametrize("tokens", [1, 17, 32, 64, 96, 128, 192, 256, 300, 2048])
@pytest.mark.parametrize("name", ["nvfp4", "nf4"])
def test_more_than_32_ranks_have_several_places_and_change_nothing_but_the_ring(name, tokens):
    for row_tiles, units in ((288, 56), (224, 296), (2368, 56), (56, 14)):
        before = middle.choose(tokens, row_tiles, units, H200, name)
        assert before.places == 1
        for rank in (8, 16, 32):
            assert middle.choose(tokens, row_tiles, units, H200, name, rank) == before
        for rank in (40, 64, 96, 128, 160, 512):
            shape = middle.choose(tokens, row_tiles, units, H200, name, rank)
            assert shape.places <= min(4, -(-rank // 32))
            assert shape.places > 1 or name == "nf4", "a tile's next 32 ranks are laid beside those that are multiplied"
            assert shape.stages >= min(before.stages, 8 if shape.places > 2 else 4)
            assert shape.shared + shape.static <= LIMIT
            # So sums have the same order.
            assert replace(shape, places=1, stages=before.stages) == before


def test_few_output_tiles_are_cut_along_the_inputs_and_many_are_shared_out():
    o, gate_up = (middle.choose(64, rows, 56, H200) for rows in (224, 2368))
    assert o.blocks % (3584 // o.rows) == 0
    few = middle.choose(32, 2368, 56, H200)
    assert (few.tiles, few.groups) == (1, 4) and (gate_up.tiles, gate_up.groups) == (2, 2)
    assert few.rows == gate_up.rows
    assert o.blocks > 100
    assert gate_up.blocks == 132


@pytest.mark.parametrize("ranks", [0, 8, 32, 96, 384])
@pytest.mark.parametrize("tokens", [1, 17, 64, 256, 1024])
@pytest.mark.parametrize(("row_tiles", "units"), [(2, 1), (288, 56), (224, 296), (2368, 56)])
def test_every_slice_of_h_has_inputs(tokens, ranks, row_tiles, units):
    shape = middle.choose(tokens, row_tiles, units, H200)
    token_tiles, clusters = -(-tokens // shape.tokens), shape.most
    slices, pieces = middle.slices_of_h(shape, token_tiles, ranks, units)
    assert pieces == slices * token_tiles * -(-ranks // (32 * shape.cluster))
    assert 1 <= slices <= units
    assert slices == 1 or pieces <= clusters, "in one go where there are enough clusters"


def test_multiprocessors_without_tiles_make_h_where_it_is_little():
    o, gate_up = (middle.choose(64, rows, 56, H200) for rows in (224, 2368))
    slices, pieces = middle.slices_of_h(o, 1, 32, 56)
    assert pieces <= o.most - o.blocks
    assert 8 < slices <= 28, "some steps each"
    slices, pieces = middle.slices_of_h(gate_up, 1, 64, 56)
    assert (slices, pieces) == (56, 112), "one step of nearly every block"
    many = middle.choose(64, 224, 56, H200)
    assert middle.slices_of_h(many, 1, 512, 56)[1] > many.most - many.blocks


@pytest.mark.parametrize("divisor", [1, 2, 3, 5, 7, 14, 56, 64, 80, 99, 296, 432, 4096, 65535])
def test_division_by_multiplication_is_exact(divisor):
    """As `divide` of cuda/middle.cuh does it, near every multiple up to where n * d is 2^32."""
    per = middle._per(divisor)
    largest = ((1 << 32) - 1) // divisor // divisor
    step = max(1, largest // 1000)
    for multiple in (*range(0, largest, step), largest):
        for n in (multiple * divisor - 1, multiple * divisor, multiple * divisor + 1):
            if n >= 0 and n * divisor < 1 << 32:
                assert (n if per == 0 else n * per >> 32) == n // divisor


@pytest.mark.parametrize("row_tiles", [1, 17, 288, 3456, 3696, 9504, 16384])
def test_launches_of_the_middle_kernel_have_all_rows_once_and_a_counter_for_every_tile(row_tiles):
    for tokens in (1, 16, 256, 1000, 1024, 1025, 2047, 2048, 2049, 8192, 65536):
        runs = runs_of(tokens, row_tiles)
        assert [row for run in runs for row in range(run.start, run.stop)] == list(range(tokens))
        for run in runs:
            rows = run.stop - run.start
            shape = middle.choose(rows, row_tiles, 56, H200)
            tiles = -(-rows // shape.tokens) * -(-row_tiles * 16 // shape.rows)
            assert rows <= RUN_ROWS and tiles * shape.cluster * shape.groups <= TILE_COUNTERS
            assert run.start % 256 == 0, "pointers of later rows are aligned, whatever the width"
            if len(runs) > 1 and row_tiles <= 3696:
                assert shape.tokens == middle.choose(tokens, row_tiles, 56, H200).tokens, "what `middle.code` says"
        if len(runs) > 1:
            assert min(run.stop - run.start for run in runs) > max(run.stop - run.start for run in runs) - 512
    assert len(runs_of(1024, row_tiles)) == 1, "a captured step is one launch"
