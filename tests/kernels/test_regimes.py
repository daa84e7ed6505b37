"""Which kernel takes how many rows: each one's results are compared with float64, by the tests on a GPU, the benchmark and the gate."""

import importlib
from pathlib import Path

import pytest
import test_fp4_linear_gpu
import torch

from qerl.formats import PackedWeight
from qerl.kernels.fp4_linear import cuda, regimes
from qerl.kernels.fp4_linear.regimes import DECODE, DENSE, KEPT, MIDDLE

ROOT = Path(__file__).resolve().parents[2]
SMALL, BIG = 896 * 896, 3584 * 18944
REGIMES = pytest.mark.parametrize(
    ("capability", "names"), [((9, 0), {DECODE, MIDDLE, DENSE}), ((8, 0), {DECODE, DENSE}), ((10, 0), {DECODE, DENSE})]
)


def first(rows: int, numbers: int, capability: tuple[int, int], kept: bool = False) -> str:
    return (*regimes.preferred(rows, numbers, capability, kept=kept), DENSE)[0]


@REGIMES
@pytest.mark.parametrize("big", [False, True])
def test_every_regime_of_small_and_of_big_weights_is_compared_with_float64(capability, names, big):
    sizes = [sum(segments) * inputs for segments, inputs in test_fp4_linear_gpu.WEIGHTS]
    sizes = [numbers for numbers in sizes if (numbers >= regimes.SMALL_WEIGHT) == big]
    assert len(sizes) >= 2
    for numbers in sizes:
        assert {first(rows, numbers, capability) for rows in test_fp4_linear_gpu.ROWS_OF_X} == names


@REGIMES
def test_the_gate_asks_every_regime_of_a_big_weight(capability, names):
    assert {first(rows, BIG, capability) for rows in regimes.one_of_each(capability)} == names


@pytest.mark.parametrize("numbers", [SMALL, BIG])
def test_kept_values_are_read_on_hopper_alone_and_the_gate_asks_all_that_reads_them(numbers):
    assert {first(rows, numbers, (9, 0), kept=True) for rows in regimes.one_of_each((9, 0), kept=True)} == {
        DECODE,
        KEPT,
        DENSE,
    }
    assert first(regimes.DECODE_ROWS, numbers, (9, 0), kept=True) == DECODE
    for capability in ((8, 0), (10, 0)):
        for rows in (1, 17, 100, 5000):
            assert first(rows, numbers, capability, kept=True) == first(rows, numbers, capability)
        assert regimes.one_of_each(capability, kept=True) == regimes.one_of_each(capability)
    assert first(1000, numbers, (9, 0), kept=True) == KEPT
    base = regimes.preferred(1000, numbers, (9, 0), kept=True, adapters=False)
    assert base == regimes.preferred(1000, numbers, (9, 0)), "cuBLAS multiplies with kept V"
    # Without tiles nothing else reads few rows; without adapters, too, one product of cuBLAS's is as fast.
    for rows, adapters, expected in ((1, True, KEPT), (2048, True, KEPT), (16, False, DENSE), (17, False, KEPT)):
        found = regimes.preferred(rows, numbers, (9, 0), kept=True, adapters=adapters, tiled=False)
        assert found == (() if expected == DENSE else (KEPT,))
    for capability in ((9, 0), (8, 0)):
        assert not any(regimes.preferred(rows, numbers, capability, tiled=False) for rows in (1, 17, 100, 5000))
    # What the kernel refuses goes where it went.
    assert regimes.preferred(100, numbers, (9, 0), kept=True)[1:] == regimes.preferred(100, numbers, (9, 0))


@pytest.mark.parametrize(
    ("name", "head", "most"),
    [
        ("nvfp4", False, 16),
        ("mxfp4", False, 16),
        ("nf4", False, 8),
        ("nf4_dq", False, 8),
        ("nvfp4", True, 8),
        ("fp8", True, 8),
    ],
)
def test_decode_ends_earlier_where_a_tile_costs_it_more_and_of_heads_and_so_does_middle_of_heads(
    monkeypatch, name, head, most
):
    weight = PackedWeight(
        format=name, shape=(40_000, 896), tensors={"tiles": torch.empty(1)}, segments=(40_000,), order="tiles"
    )
    for module in (cuda.decode, cuda.middle):
        monkeypatch.setattr(module, "takes", lambda *call: True)
    for capability, after in (((9, 0), MIDDLE), ((8, 0), DECODE)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, has=capability: has)
        found = [
            cuda.regime_of(torch.empty(rows, 896), weight, (), (), (), head=head) for rows in (1, most, most + 1, 64)
        ]
        assert found == [DECODE, DECODE, after, after]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    many = regimes.MIDDLE_ROWS_OF_HEAD if head else regimes.MIDDLE_ROWS
    for rows, expected in ((many, MIDDLE), (many + 1, DENSE)):
        assert cuda.regime_of(torch.empty(rows, 896), weight, (), (), (), head=head) == expected


@pytest.mark.parametrize("capability", [(9, 0), (8, 0), (10, 0)])
@pytest.mark.parametrize("numbers", [SMALL, BIG])
def test_the_benchmark_of_linear_layers_checks_the_dense_regime(capability, numbers, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    benchmark = importlib.import_module("benchmarks.kernels")
    assert first(benchmark.MOST_CHECKED, numbers, capability) == DENSE
    assert max(benchmark.ROWS) > benchmark.MOST_CHECKED, "so that a check of all rows has that many"
