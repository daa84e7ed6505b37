"""A CUDA device makes the same bytes as the CPU, and searches as well."""

import pytest
import torch
from hard_tensors import CASES, random

from qerl.formats import FORMAT_NAMES, dequantize, get_format

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [name for name in FORMAT_NAMES if name != "nf4_dq"])
@pytest.mark.parametrize("rounding", ["ct", "torchao"])
@pytest.mark.parametrize("case", CASES)
def test_rounded_bytes_are_those_of_the_cpu(name, rounding, case):
    weight, fmt = CASES[case](), get_format(name)
    here, there = fmt.quantize(weight, rounding=rounding), fmt.quantize(weight.cuda(), rounding=rounding).to("cpu")
    for key, tensor in here.tensors.items():
        assert torch.equal(tensor.view(torch.uint8), there.tensors[key].view(torch.uint8)), key
    assert torch.equal(dequantize(there.to("cuda")).cpu(), dequantize(here))


def test_doubly_quantized_scales_differ_by_the_rounding_of_their_mean_only():
    weight, fmt = random(300, 160), get_format("nf4_dq")
    here, there = fmt.quantize(weight), fmt.quantize(weight.cuda()).to("cpu")
    assert torch.equal(here.tensors["packed"], there.tensors["packed"])
    torch.testing.assert_close(there.tensors["absmax_offset"], here.tensors["absmax_offset"], rtol=1e-6, atol=0)
    torch.testing.assert_close(dequantize(there), dequantize(here), rtol=0.05, atol=1e-6)


@pytest.mark.parametrize(("name", "method"), [(name, m) for name in FORMAT_NAMES for m in get_format(name).methods])
def test_searches_leave_the_same_error(name, method):
    weight, fmt = random(512, 1024), get_format(name)
    errors = [float((dequantize(fmt.quantize(w, method=method)) - w).double().norm()) for w in (weight, weight.cuda())]
    assert errors[0] == pytest.approx(errors[1], rel=1e-4)
