"""The kernels of NF4 and FP8, and of the rounding `torchao`, in the interpreter: the bytes of the formats, hard tensors included."""

import pytest
import torch
import triton_cpu  # noqa: F401 - prepares the interpreter, before any kernel module
from hard_tensors import CASES

from qerl.errors import FormatError
from qerl.formats import dequantize, double_quant, get_format
from qerl.formats.nf4 import QUANTILES
from qerl.kernels.quantize import mxfp4, nf4
from qerl.kernels.quantize import triton as kernel

pytestmark = pytest.mark.interpret

KINDS = [("nf4", "ct"), ("nf4_dq", "ct"), ("fp8", "ct"), ("nvfp4", "torchao"), ("mxfp4", "torchao")]


@pytest.fixture(autouse=True)
def kernels_alone(monkeypatch):
    def no_reference(*_):
        raise AssertionError("the reference's arithmetic")

    monkeypatch.setattr(kernel.reference, "quantize", no_reference)


def assert_equal_bytes(weight: torch.Tensor, name: str, rounding: str, segments: tuple[int, ...] | None = None) -> None:
    found = kernel.quantize(weight, name, "rtn", rounding, segments, "w")
    expected = get_format(name).quantize(weight, rounding=rounding, segments=segments, name="w")
    assert (found.format, found.shape, found.segments) == (expected.format, expected.shape, expected.segments)
    assert found.tensors.keys() == expected.tensors.keys()
    for key, tensor in expected.tensors.items():
        assert (found.tensors[key].dtype, found.tensors[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found.tensors[key].view(torch.uint8), tensor.view(torch.uint8)), key
    assert torch.equal(dequantize(found), dequantize(expected))


@pytest.mark.parametrize(("name", "rounding"), KINDS)
@pytest.mark.parametrize("case", CASES)
def test_hard_tensors_have_the_bytes_of_the_format(name, rounding, case):
    assert_equal_bytes(CASES[case](), name, rounding)


SHAPES = [((7, 9), (3, 1, 3)), ((12, 64), (2, 9, 1)), ((3, 150), (2, 1))]


@pytest.mark.parametrize(
    ("name", "rounding", "shape", "segments"),
    [
        *((*kind, *shape) for kind in KINDS for shape in SHAPES),
        ("nf4", "ct", (1, 1), None),
        ("nf4", "ct", (5, 40), (2, 3)),
        ("nvfp4", "torchao", (70, 16), None),
        ("fp8", "ct", (2, 1500), None),
    ],
)
def test_shapes_parts_and_magnitudes(name, rounding, shape, segments):
    """Blocks that straddle rows, last blocks that are not whole, parts of odd counts."""
    for size in (1.0, 1e-38):
        weight = size * torch.randn(*shape, generator=torch.Generator().manual_seed(0))
        weight[0, 0], weight[-1, -1] = 0.0, -0.0
        assert_equal_bytes(weight, name, rounding, segments)
        if size == 1.0:  # the interpreter misreads the subnormal numbers of bfloat16
            assert_equal_bytes(weight.bfloat16(), name, rounding, segments)
    assert_equal_bytes(torch.zeros(shape), name, rounding, segments)


def test_the_lower_of_two_quantiles_that_are_as_near():
    """Every middle and its neighbors, with scales that are powers of two, so that products are exact; and the quantiles themselves."""
    middles = torch.tensor(nf4._middles())
    values = torch.cat(
        [middles, *(torch.nextafter(middles, torch.tensor(side)) for side in (-2.0, 2.0)), torch.tensor(QUANTILES)]
    )
    for scale in (1.0, 2.0**-100, 2.0**90):
        block = torch.cat([values, torch.tensor([1.0, -0.0, 0.0])]) * scale
        assert len(block) == 64
        assert_equal_bytes(torch.stack([block, -block, block.flip(0)]), "nf4", "ct")
    found = kernel.quantize(torch.cat([middles, torch.ones(1)])[None], "nf4", "rtn", "ct", None, "w")
    codes = torch.stack((found.tensors["packed"] >> 4, found.tensors["packed"] & 15), 1).view(-1)
    assert codes.tolist() == list(range(16)), "a middle has the code below it"


def test_a_code_is_the_number_of_middles_below_in_a_fine_sweep():
    sweep = torch.ones(1 << 9, 64)
    sweep[:, :63] = torch.linspace(-1, 1, 63 << 9).view(-1, 63)
    assert_equal_bytes(sweep, "nf4", "ct")


def test_a_number_at_the_edge_of_a_cell_has_its_code_on_either_side():
    edges = ((torch.arange(30) - 14.5).double() / nf4._CELLS_OF_ONE).float()
    for side in (-2.0, 2.0):
        beside = torch.nextafter(edges, torch.tensor(side))
        assert_equal_bytes(torch.cat((edges, beside, torch.tensor([1.0, -1.0, 0.0, 0.5])))[None], "nf4", "ct")


@pytest.mark.parametrize("rounding", ["ct", "torchao"])
@pytest.mark.parametrize("name", ["nf4", "mxfp4", "nvfp4", "fp8"])
@pytest.mark.parametrize(("value", "said"), [(float("nan"), "NaN"), (-float("inf"), "infinity")])
def test_values_that_are_not_finite_are_refused_by_name(name, rounding, value, said):
    weight = torch.ones(3, 40)
    weight[2, 35] = value
    with pytest.raises(FormatError, match=f"'w' holds a value that is not finite.*{said}"):
        kernel.quantize(weight, name, "rtn", rounding, None, "w")


def test_every_e4m3_number_and_the_middles_between_them():
    """With a divisor of 1: all codes, all halves between neighbors, and what is next to those."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(side)) for side in (0.0, 500.0)]
    row = torch.cat([numbers, middles, *beside])
    assert_equal_bytes(torch.stack([row, -row]), "fp8", "ct")


def test_doubly_quantized_scales_from_all_over_the_table():
    """Blocks of one magnitude each, so that the scales are given: 37 places apart or so (their mean and largest decide where they lie), and alike."""
    edges = (torch.arange(0, 65536, 37).double() - 0.5) / double_quant.TABLE_STEP - 1
    for part in edges.float().split(255):
        scales = 2 + torch.cat([part, -part.sum().clamp(-1, 1).view(1)])
        assert_equal_bytes(scales[:, None].expand(-1, 64).contiguous(), "nf4_dq", "ct")
    for scale in (0.0, 1.0, 3e38):
        assert_equal_bytes(torch.full((300, 64), scale), "nf4_dq", "ct")


def test_the_largest_block_of_mxfp4_saturates_and_its_smallest_divisor_is_2_to_the_minus_126():
    weight = torch.full((4, 32), 3.0e38)
    weight[1], weight[2], weight[3] = 2.0**-128, -(2.0**-149), 5 * 2.0**-127
    weight[3, ::3] = -0.0
    for rounding in ("ct", "torchao"):
        expected = get_format("mxfp4").quantize(weight, rounding=rounding)
        for fused in (False, True):
            found, _ = mxfp4.rounded(weight, (4,), rounding, fused=fused)
            assert all(torch.equal(found.tensors[key], tensor) for key, tensor in expected.tensors.items())
