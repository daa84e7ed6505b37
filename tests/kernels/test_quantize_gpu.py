"""What the quantizing kernels write on a real device is what the formats write on the CPU."""

import pytest
import torch
from hard_tensors import CASES
from op_cases import random

from qerl.formats import double_quant, get_format
from qerl.kernels.quantize import mxfp4, quantize
from qerl.kernels.quantize import triton as kernel

pytestmark = pytest.mark.gpu

MORE = {
    "1e-38 rows": lambda: 1e-38 * random(16, 40),
    "large": lambda: random(1000, 3584),
    "odd": lambda: random(37, 131),
    "zeros": lambda: torch.zeros(9, 100),
}


@pytest.fixture(autouse=True)
def needs_a_device():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def assert_equal(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", ["ct", "torchao"])
@pytest.mark.parametrize("case", [*CASES, *MORE])
def test_bytes_are_those_of_the_format_on_the_cpu(case, rounding, dtype):
    weight = (CASES | MORE)[case]().to(dtype)
    parts = (5, len(weight) - 5) if len(weight) > 5 else (len(weight),)
    for name in ("nvfp4", "nf4", "mxfp4", "fp8"):
        found = quantize(weight.cuda(), name, rounding=rounding, segments=parts)
        expected = get_format(name).quantize(weight, rounding=rounding, segments=parts)
        for key, tensor in expected.tensors.items():
            assert_equal(found.tensors[key], tensor, f"{name} {key}")


def test_doubly_quantized_scales_are_made_of_those_of_the_kernel(monkeypatch):
    """Given the mean, which a device sums in an order of its own."""
    weight = random(300, 160)
    plain, doubly = (quantize(weight.cuda(), name, segments=(100, 200)) for name in ("nf4", "nf4_dq"))
    assert torch.equal(plain.tensors["packed"], doubly.tensors["packed"])
    means = iter(doubly.tensors["absmax_offset"].cpu().split(1))
    monkeypatch.setattr(double_quant, "offset", lambda _: next(means))
    scales = double_quant.quantize(plain.tensors["absmax"].cpu(), (250, 500))
    for key, tensor in scales.items():
        assert_equal(doubly.tensors[key], tensor, key)


@pytest.mark.parametrize("d_in", [1, 896, 5120, 12345, 1 << 16])
def test_rows_of_fp8_of_every_length(d_in):
    weight = random(5, d_in).bfloat16()
    found, expected = quantize(weight.cuda(), "fp8"), get_format("fp8").quantize(weight)
    assert_equal(found.tensors["codes"], expected.tensors["codes"], "codes")
    assert_equal(found.tensors["divisor"], expected.tensors["divisor"], "divisor")


def test_a_weight_with_more_elements_than_32_bits_count():
    """4.3e9 weights of bfloat16; the last rows have the bytes that they have alone."""
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB")
    weight = torch.empty(32768 * 8 + 4, 16384, dtype=torch.bfloat16, device="cuda").normal_()
    last = weight[-4:].clone()
    found, expected = (get_format("nf4").quantize(last), kernel.quantize(weight, "nf4", "rtn", "ct", None, "w"))
    assert torch.equal(expected.tensors["packed"][-4 * 8192 :], found.tensors["packed"])
    assert torch.equal(expected.tensors["absmax"][-4 * 256 :], found.tensors["absmax"])
    packed, _ = mxfp4.rounded(weight, (len(weight),))
    alone, _ = mxfp4.rounded(last, (4,))
    assert all(torch.equal(packed.tensors[key][-4:], alone.tensors[key]) for key in alone.tensors)
