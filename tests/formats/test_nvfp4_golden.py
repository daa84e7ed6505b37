"""NVFP4 by hand: every number here was worked out on paper from the format's definition."""

import itertools

import pytest
import torch

from qerl.formats import dequantize, get_format

NVFP4 = get_format("nvfp4")
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def codes_of(packed: torch.Tensor) -> list[int]:
    """Low nibble first."""
    return [code for byte in packed.flatten().tolist() for code in (byte & 15, byte >> 4)]


def with_largest_448_times_6(row: list[float]) -> torch.Tensor:
    """Two blocks: `row`, which must reach 6, and one that holds 2688. Then G = 1 and the first block's scale is 1."""
    assert len(row) == 16
    assert max(map(abs, row)) == 6.0
    return torch.tensor([row + [2688.0] + [0.0] * 15])


@pytest.mark.parametrize("rounding", ["ct", "torchao"])
def test_the_sixteen_values_have_their_codes_and_come_back(rounding):
    row = MAGNITUDES + [-m for m in MAGNITUDES[1:]] + [6.0]
    packed = NVFP4.quantize(with_largest_448_times_6(row), rounding=rounding)
    assert codes_of(packed.tensors["packed"])[:16] == [*range(8), *range(9, 16), 7]
    assert packed.tensors["global_scale"].tolist() == [1.0]
    assert packed.tensors["block_scales"].float().tolist() == [[1.0, 448.0]]
    assert dequantize(packed)[0, :16].tolist() == row


@pytest.mark.parametrize("rounding", ["ct", "torchao"])
def test_ties_go_to_the_even_code(rounding):
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    row = [*ties, *(-t for t in ties), 6.0, -6.0]
    values = dequantize(NVFP4.quantize(with_largest_448_times_6(row), rounding=rounding))[0, :16]
    assert values.tolist() == [*ties.values(), *(-v for v in ties.values()), 6.0, -6.0]


@pytest.mark.parametrize("rounding", ["ct", "torchao"])
def test_one_float_beside_a_tie_goes_to_the_nearer_value(rounding):
    for low, high in itertools.pairwise(MAGNITUDES):
        middle = torch.tensor((low + high) / 2)
        below, above = torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(9.0))
        row = [float(below), float(above), 6.0] + [0.0] * 13
        values = dequantize(NVFP4.quantize(with_largest_448_times_6(row), rounding=rounding))
        assert values[0, :2].tolist() == [low, high]


def test_the_even_element_is_in_the_low_nibble():
    row = [0.5, 6.0, -6.0, 1.0] + [0.0] * 12
    packed = NVFP4.quantize(with_largest_448_times_6(row)).tensors["packed"]
    assert packed[0, :2].tolist() == [0x71, 0x2F]


@pytest.mark.parametrize(("rounding", "minus_zero"), [("ct", 0), ("torchao", 8)])
def test_negative_zero_follows_the_named_rounding(rounding, minus_zero):
    row = [-0.0, -0.1, 0.0, 6.0] + [0.0] * 12
    codes = codes_of(NVFP4.quantize(with_largest_448_times_6(row), rounding=rounding).tensors["packed"])
    assert codes[:4] == [minus_zero, 8, 0, 7], "a negative that rounds to 0 keeps its sign under either name"


@pytest.mark.parametrize(("rounding", "scale"), [("ct", 0.125), ("torchao", 2.0**-6)])
def test_a_zero_block_gets_the_smallest_scale_of_the_rounding_and_stays_zero(rounding, scale):
    packed = NVFP4.quantize(torch.tensor([[0.0] * 16 + [1.0] * 16]), rounding=rounding)
    assert packed.tensors["block_scales"].float()[0].tolist() == [scale, 448.0]
    assert codes_of(packed.tensors["packed"])[:16] == [0] * 16
    assert dequantize(packed)[0, :16].tolist() == [0.0] * 16


@pytest.mark.parametrize("rounding", ["ct", "torchao"])
def test_an_all_zero_tensor_stays_zero(rounding):
    packed = NVFP4.quantize(torch.zeros(3, 32), rounding=rounding)
    assert packed.tensors["global_scale"].tolist() == [1.0]
    assert torch.equal(dequantize(packed), torch.zeros(3, 32))


@pytest.mark.parametrize("rounding", ["ct", "torchao"])
@pytest.mark.parametrize("size", [1e-45, 1e-38, 7.8e-36, 1e-34, 3e38])
def test_extreme_magnitudes_stay_finite_and_close(rounding, size):
    weight = size * torch.linspace(-1, 1, 32).view(2, 16)
    values = dequantize(NVFP4.quantize(weight, rounding=rounding), torch.float64)
    assert (values - weight.double()).abs().max() <= max(1e-35, 0.17 * size)


def test_the_global_scale_is_2688_over_the_largest_magnitude_not_a_reciprocal():
    weight = torch.tensor([[3.3] + [0.0] * 15])
    (scale,) = NVFP4.quantize(weight).tensors["global_scale"]
    assert scale == torch.tensor(2688.0) / torch.tensor(3.3)
    assert scale != 1 / (torch.tensor(3.3) / torch.tensor(2688.0))


def test_dequantize_multiplies_the_code_by_the_quotient_of_the_scales():
    packed = NVFP4.quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)))
    table = torch.tensor(MAGNITUDES + [-m for m in MAGNITUDES])
    q = table[torch.tensor(codes_of(packed.tensors["packed"]))].view(8, 4, 16)
    expected = q * (packed.tensors["block_scales"].float() / packed.tensors["global_scale"])[..., None]
    assert torch.equal(dequantize(packed), expected.view(8, 64))
    assert torch.equal(dequantize(packed, torch.bfloat16), expected.view(8, 64).bfloat16())


def test_factored_values_are_exact_in_bfloat16():
    packed = NVFP4.quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(1)), segments=(12, 20))
    narrow, divisor = NVFP4.factored(packed, torch.bfloat16)
    wide, _ = NVFP4.factored(packed, torch.float64)
    assert torch.equal(narrow.double(), wide)
    torch.testing.assert_close(wide / divisor[:, None], dequantize(packed, torch.float64), rtol=2e-7, atol=0)
