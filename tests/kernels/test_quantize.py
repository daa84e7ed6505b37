"""Quantizing by the kernel in the interpreter: the bytes of the format, hard tensors included."""

import pytest
import torch
import triton_cpu  # noqa: F401 - prepares the interpreter, before any kernel module
from hard_tensors import CASES

from qerl.errors import FormatError
from qerl.formats import get_format
from qerl.kernels.quantize import quantize
from qerl.kernels.quantize import triton as kernel

pytestmark = pytest.mark.interpret


def assert_equal_bytes(weight: torch.Tensor, segments: tuple[int, ...] | None = None) -> None:
    found = kernel.quantize(weight, "nvfp4", "rtn", "ct", segments, "w")
    expected = get_format("nvfp4").quantize(weight, segments=segments, name="w")
    assert (found.shape, found.segments) == (expected.shape, expected.segments)
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_hard_tensors_have_the_bytes_of_the_format(make):
    assert_equal_bytes(make())


@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (5, 40), (2, 7), (70, 80)])
@pytest.mark.parametrize("size", [1.0, 1e-38, 1e-3, 1e30])
def test_shapes_and_magnitudes(shape, size):
    weight = size * torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    assert_equal_bytes(weight)
    if size > 1e-30:  # the interpreter misreads the subnormal numbers of bfloat16
        assert_equal_bytes(weight.bfloat16())


def test_scales_of_all_binades_and_fused_parts():
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-7, 3, 40)[:, None]
    weight[3], weight[4] = 0.0, -0.0
    assert_equal_bytes(weight, (8, 30, 2))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_by_name(value):
    weight = torch.ones(3, 32)
    weight[1, 5] = value
    with pytest.raises(FormatError, match="'w' holds a value that is not finite"):
        kernel.quantize(weight, "nvfp4", "rtn", "ct", None, "w")


@pytest.mark.parametrize(
    ("name", "method", "rounding"), [("nvfp4", "mse", "ct"), ("nvfp4", "rtn", "torchao"), ("mxfp4", "rtn", "ct")]
)
def test_the_rest_is_done_as_the_format_does_it(name, method, rounding):
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    found = kernel.quantize(weight, name, method, rounding, None, "w")
    expected = quantize(weight, name, method=method, rounding=rounding)
    for key, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[key].view(torch.uint8), tensor.view(torch.uint8))
