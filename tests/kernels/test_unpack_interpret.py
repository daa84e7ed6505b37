"""The one-pass unpacking of MXFP4 and NF4 without tiles in the interpreter: the bits of the formats' own dequantization."""

import pytest
import torch
import triton_cpu  # noqa: F401 - prepares the interpreter, before any kernel module

from qerl.formats import get_format
from qerl.kernels.fp4_linear.unpack import FORMATS, unpack

pytestmark = pytest.mark.interpret

SHAPES = (((20, 13, 7), 100), ((33,), 130), ((3,), 5000), ((17, 4), 64), ((5,), 31))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("segments", "d_in"), SHAPES)
def test_the_values_are_those_of_the_format(name, segments, d_in):
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(sum(segments), d_in, generator=generator) * torch.logspace(-3, 3, sum(segments))[:, None]
    dense[0, : d_in // 2] = 0
    fmt = get_format(name)
    weight = fmt.quantize(dense, segments=segments)
    out = unpack(weight, torch.full(weight.shape, torch.nan))
    assert torch.equal(out, fmt.dequantize(weight))


def test_every_code_and_every_exponent_of_mxfp4():
    fmt = get_format("mxfp4")
    weight = fmt.quantize(torch.randn(255, 64))
    codes = torch.arange(16, dtype=torch.uint8)
    weight.tensors["packed"][:] = ((codes[:, None] << 4) | codes[None, :]).flatten()[:32]
    weight.tensors["block_scales"][:] = torch.arange(255, dtype=torch.uint8)[:, None].clamp(max=252)
    assert torch.equal(unpack(weight, torch.empty(weight.shape)), fmt.dequantize(weight))
