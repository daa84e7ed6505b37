"""The middle kernel and its shrink, called by themselves, against float64: ragged shapes, every way to share tiles, and who may depend on whom."""

from dataclasses import replace
from functools import partial

import fp4_builders
import pytest
import torch
from fp4_builders import cuda, exact_product

from qerl.formats import dequantize, get_format
from qerl.kernels.fp4_linear import middle
from qerl.kernels.fp4_linear.adapter import flatten
from qerl.kernels.fp4_linear.middle_shape import runs_of
from qerl.kernels.fp4_linear.shrink import shrink
from qerl.kernels.fp4_linear.workspace import workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
    ),
]

FORMAT = get_format("nvfp4")
# One rounding to bfloat16 leaves a relative error of 1.67e-3 on normal results.
ONE_ROUNDING = 1.9e-3
FLOAT32_SUMS = 2.0e-6
ROWS_OF_X = (1, 17, 31, 33, 63, 64, 65, 100, 128, 200, 256, 512, 1000)
# (segments, inputs): projections of Qwen2.5 0.5B, 7B and 32B, and odd ones.
WEIGHTS = (
    ((3584, 512, 512), 3584),
    ((3584,), 18944),
    ((5120, 1024, 1024), 5120),
    ((896, 128, 128), 896),
    ((4864, 4864), 896),
    ((20, 13, 7), 104),
    ((33,), 136),
    ((17,), 16),
    ((1000, 1000), 576),
)


adapters_of = partial(fp4_builders.adapters_of, scales=(1.5, 0.3, 2.0))


class Case:
    """A quantized weight, its tiles, and what the product should be."""

    def __init__(self, segments, d_in):
        scales = torch.cat([torch.full((rows,), 0.05 * 7.0**i) for i, rows in enumerate(segments)]).cuda()
        values = (
            torch.randn(sum(segments), d_in, generator=torch.Generator("cuda").manual_seed(7), device="cuda")
            * scales[:, None]
        )
        weight = FORMAT.quantize(values.bfloat16(), segments=segments)
        self.tiled, self.dense_OI = FORMAT.for_device(weight), dequantize(weight, torch.float64)

    def exact(self, x, bias, parts):
        return exact_product(x, self.dense_OI, bias, parts)

    def ours(self, x, bias, parts, **options):
        placements, a_RI, b_OR = flatten(parts)
        assert middle.takes(x, self.tiled, placements, a_RI, b_OR)
        return middle.product(x, self.tiled, bias, placements, a_RI, b_OR, **options)[0]


def error(y, reference) -> float:
    """Relative, less what a handful of numbers may have by chance: of 20,000 draws of n normal numbers, rounded to bfloat16, none was off by
    more than 1.66e-3 times 1 + 3.7 / sqrt(n), for n from 8 to 1000."""
    assert y.isfinite().all()
    chance = 1 + 3 / y.numel() ** 0.5
    return float((y.double() - reference).norm() / reference.norm()) / chance


@pytest.mark.parametrize(("segments", "d_in"), WEIGHTS)
@pytest.mark.parametrize("rank", [0, 8, 32, 64, 128])
def test_it_agrees_with_float64(segments, d_in, rank):
    case, bias = Case(segments, d_in), cuda(sum(segments), seed=9)
    parts = adapters_of(segments, d_in, rank) if rank else []
    for rows in ROWS_OF_X if rank in (0, 32) else (17, 64, 200):
        x, other = cuda(rows, d_in, seed=rows), cuda(rows, d_in, seed=rows + 1)
        other[-1] = x[-1]
        y, again, moved = (case.ours(t, bias, parts) for t in (x, x, other))
        reference = case.exact(x, bias, parts)
        for mine, theirs in zip(y.split(segments, 1), reference.split(segments, 1), strict=True):
            assert error(mine, theirs) < ONE_ROUNDING, rows
        assert torch.equal(y, again), f"{rows} rows: same input, same bits"
        assert torch.equal(y[-1], moved[-1]), f"{rows} rows: a row does not depend on the others"


@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("blocks", [4, 12, 20, 36, 64, 100, 120])
def test_tiles_may_be_shared_in_any_way(monkeypatch, blocks, tiles, cluster):
    """One block a tile, several, shares that end inside a tile or at its end, and blocks that go on to the next."""
    segments, d_in = (1000, 600), 1088
    case, parts, bias = Case(segments, d_in), adapters_of(segments, d_in, 32), cuda(1600, seed=9)
    choose = middle.choose

    def chosen(*arguments):
        shape = replace(choose(*arguments), tiles=tiles, cluster=cluster, stages=0, blocks=0)
        return replace(middle.with_blocks(shape, *arguments[:4]), blocks=blocks)

    monkeypatch.setattr(middle, "choose", chosen)
    for rows in (20, 40, 120 if tiles == 2 else 200):
        x = cuda(rows, d_in, seed=rows)
        y = case.ours(x, bias, parts)
        assert error(y, case.exact(x, bias, parts)) < ONE_ROUNDING
        assert torch.equal(y, case.ours(x, bias, parts))


@pytest.mark.parametrize(
    "ranks", [(64, 32, 64), (64, 128, 8), (96, 40, 96), (128, 64, 96), (128, 128, 128), (160, 24, 128)]
)
@pytest.mark.parametrize(
    ("segments", "d_in"), [((3584, 512, 512), 3584), ((9000, 8500, 700), 576), ((300, 61, 200), 136)]
)
def test_parts_of_unequal_ranks_agree_with_float64(segments, d_in, ranks):
    """More than 32 ranks have several places in shared memory, which blocks go through at rates of their own."""
    case, bias, parts = Case(segments, d_in), cuda(sum(segments), seed=9), adapters_of(segments, d_in, ranks)
    for rows in (17, 33, 64, 100, 256, 300):
        x = cuda(rows, d_in, seed=rows)
        y, reference = case.ours(x, bias, parts), case.exact(x, bias, parts)
        for mine, theirs in zip(y.split(segments, 1), reference.split(segments, 1), strict=True):
            assert error(mine, theirs) < ONE_ROUNDING, rows
        assert torch.equal(y, case.ours(x, bias, parts)), f"{rows} rows: same input, same bits"


@pytest.mark.parametrize(("tiles", "cluster"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("blocks", [4, 12, 36, 120])
@pytest.mark.parametrize(("members", "ranks"), [((0, 2), (160, 96)), ((0, 1, 2), (64, 8, 128)), ((1,), (96,))])
def test_any_number_of_places_for_adapters_gives_the_same_bits(monkeypatch, members, ranks, blocks, tiles, cluster):
    """With one, each 32 ranks wait for those before; a block begins several tiles, some without an adapter, or none."""
    segments, d_in = (1000, 600, 300), 1088
    case, parts, bias = Case(segments, d_in), adapters_of(segments, d_in, ranks, members), cuda(1900, seed=9)
    choose = middle.choose
    for rows in (40, 120 if tiles == 2 else 200):
        x, found = cuda(rows, d_in, seed=rows), []
        for places in (1, 2, 3):

            def chosen(*arguments, places=places):
                shape = replace(choose(*arguments), tiles=tiles, cluster=cluster, places=places, stages=0, blocks=0)
                return replace(middle.with_blocks(shape, *arguments[:4]), blocks=blocks)

            monkeypatch.setattr(middle, "choose", chosen)
            found += [case.ours(x, bias, parts) for _ in range(2)]
        assert error(found[0], case.exact(x, bias, parts)) < ONE_ROUNDING
        assert all(torch.equal(found[0], y) for y in found[1:]), rows


@pytest.mark.parametrize("rows", [20, 50, 120])
def test_sums_that_are_no_numbers_pass_between_blocks(rows):
    """Nothing waits for ever for them, they stay in their rows, and nothing of them is left for the next call."""
    segments, d_in = (3584, 512, 512), 3584
    case, x = Case(segments, d_in), cuda(rows, d_in, seed=rows)
    before, odd = case.ours(x, None, []), x.clone()
    odd[1] = torch.full((d_in,), -1, dtype=torch.int16, device="cuda").view(torch.bfloat16)  # NaN, all bits set
    odd[3, 5] = torch.inf
    y, again = case.ours(odd, None, []), case.ours(x, None, [])
    others = [row for row in range(rows) if row not in (1, 3)]
    assert y[1].isnan().all() and not y[3].isfinite().all()
    assert torch.equal(y[others], before[others]) and torch.equal(again, before)
    assert bool((workspace(x.device).sums(1).view(torch.int32) == -1).all())


@pytest.mark.parametrize("members", [(0,), (1, 2), (2,)])
def test_adapters_on_some_members_leave_the_others_alone(members):
    segments, d_in = (3584, 512, 520), 1024
    case, parts = Case(segments, d_in), adapters_of(segments, d_in, 32, members)
    for rows in (40, 130):
        x = cuda(rows, d_in, seed=3)
        y, expected = case.ours(x, None, parts), case.exact(x, None, parts)
        for ours, theirs in zip(y.split(segments, 1), expected.split(segments, 1), strict=True):
            assert error(ours, theirs) < ONE_ROUNDING


@pytest.mark.parametrize("rank", [8, 24, 40, 72, 104])
def test_ranks_that_are_no_multiple_of_32(rank):
    segments, d_in = (300, 61), 136
    case, parts = Case(segments, d_in), adapters_of(segments, d_in, rank)
    x = cuda(50, d_in, seed=3)
    assert error(case.ours(x, None, parts), case.exact(x, None, parts)) < ONE_ROUNDING


@pytest.mark.parametrize("rank", [8, 32, 96])
@pytest.mark.parametrize(
    ("segments", "d_in"),
    [((3584, 512, 512), 3584), ((3584,), 18944), ((896, 128, 128), 896), ((300, 61), 136)],
)
def test_h_is_given_back(segments, d_in, rank):
    """However it was made: by blocks with nothing else to do or by all, added up by each for itself or by all together."""
    case, parts = Case(segments, d_in), adapters_of(segments, d_in, rank)
    placements, a_RI, b_OR = flatten(parts)
    for rows in (1, 2, 3, 17, 20, 33, 64, 90, 127, 200, 255, 256, 1000):
        # No seed of A's: the h of x beside itself is so large that its one rounding would be all that is seen.
        x = cuda(rows, d_in, seed=100 + rows)
        (h,) = middle.product(x, case.tiled, None, placements, a_RI, b_OR)[1]
        assert error(h, x.double() @ a_RI[0].double().T) < ONE_ROUNDING, rows


@pytest.mark.parametrize(
    ("segments", "d_in"),
    [((3584, 512, 512), 3584), ((3584,), 18944), ((896, 128, 128), 896), ((300, 61), 136)],
)
@pytest.mark.parametrize("rank", [32, 96])
def test_h_alone_has_the_bits_of_h_beside_y(segments, d_in, rank):
    case, parts = Case(segments, d_in), adapters_of(segments, d_in, rank)
    call = (case.tiled, *flatten(parts))
    for rows in (1, 17, 33, 64, 127, 200, 1000, 2049):
        x = cuda(rows, d_in, seed=100 + rows)
        (h,) = middle.shrunk(x, *call)
        (beside,) = middle.product(x, case.tiled, None, *call[1:])[1]
        assert torch.equal(h, beside), rows


@pytest.mark.parametrize(("segments", "d_in"), [WEIGHTS[0], WEIGHTS[1], WEIGHTS[3], WEIGHTS[5]])
def test_many_rows_are_several_launches(segments, d_in):
    case, bias, parts = Case(segments, d_in), cuda(sum(segments), seed=9), adapters_of(segments, d_in, 32)
    for rows in (1025, 2048, 2049, 4500, 8192):
        x, other = cuda(rows, d_in, seed=rows), cuda(rows, d_in, seed=rows + 1)
        other[-1] = x[-1]
        y, reference = case.ours(x, bias, parts), case.exact(x, bias, parts)
        for mine, theirs in zip(y.split(segments, 1), reference.split(segments, 1), strict=True):
            assert error(mine, theirs) < ONE_ROUNDING, rows
        assert torch.equal(y, case.ours(x, bias, parts)), rows
        assert torch.equal(y[-1], case.ours(other, bias, parts)[-1]), rows
        for run in runs_of(rows, case.tiled.tensors["tiles"].shape[0]):
            assert torch.equal(y[run], case.ours(x[run], bias, parts)), (rows, run)


def test_ranks_that_are_no_multiple_of_8_are_left_to_another_kernel():
    case, parts = Case((64,), 128), adapters_of((64,), 128, 20)
    assert not middle.takes(cuda(40, 128), case.tiled, *flatten(parts))


def test_an_adapter_without_weight_adds_nothing():
    case, parts = Case((64,), 128), [replace(part, scale=0.0) for part in adapters_of((64,), 128, 16)]
    x = cuda(40, 128, seed=3)
    assert torch.equal(case.ours(x, None, parts), case.ours(x, None, []))


def test_rows_with_two_adapters_are_left_to_another_kernel():
    case, parts = Case((64,), 128), adapters_of((64,), 128, 16)
    assert not middle.takes(cuda(40, 128), case.tiled, *flatten([*parts, *parts]))


@pytest.mark.parametrize("rows", [7, 64, 300])
def test_float32_results(rows):
    case = Case((2000,), 896)
    x = cuda(rows, 896, seed=5)
    assert error(case.ours(x, None, [], dtype=torch.float32), case.exact(x, None, [])) < FLOAT32_SUMS


@pytest.mark.parametrize(
    ("rows", "d_in", "rank"), [(1, 16, 16), (17, 3584, 32), (64, 18944, 96), (33, 130, 8), (100, 104, 20)]
)
def test_shrunk_activations_agree_with_float64(rows, d_in, rank):
    x, a = cuda(rows, d_in, seed=1), cuda(rank, d_in, seed=2, scale=d_in**-0.5)
    h = shrink(x, a)
    assert error(h, x.double() @ a.double().T) < ONE_ROUNDING
    assert torch.equal(h, shrink(x, a))


def test_a_captured_graph_follows_its_inputs():
    segments, d_in = (96, 40), 192
    case, parts, x = Case(segments, d_in), adapters_of(segments, d_in, 16), cuda(40, d_in)
    case.ours(x, None, parts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = case.ours(x, None, parts)
    for seed in (1, 2):
        x.copy_(cuda(40, d_in, seed=seed))
        y.fill_(torch.nan)
        graph.replay()
        assert error(y, case.exact(x, None, parts)) < ONE_ROUNDING
