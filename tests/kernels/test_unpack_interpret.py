"""The one-pass unpacking of NF4 without tiles in the interpreter: the bits of the format's own dequantization."""

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
