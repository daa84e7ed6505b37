"""The packed linear layer called on two streams: they share buffers and all multiprocessors, so they take turns."""

import pytest
import torch
from fp4_builders import adapters_of, cuda

from qerl.formats import get_format
from qerl.kernels.fp4_linear import fp4_linear

pytestmark = pytest.mark.gpu

SEGMENTS, INPUTS = (3584, 512, 512), 3584


@pytest.mark.parametrize("rows", [1, 16, 64, 300, 2048])
def test_calls_on_two_streams_take_turns(rows):
    """Without turns, blocks of two launches wait for one another for ever, or sums and scratch of one are those of the other."""
    parts = adapters_of(SEGMENTS, INPUTS, 32)
    values = [cuda(sum(SEGMENTS), INPUTS, seed=10 + i, scale=0.05) for i in range(2)]
    weights = [get_format("nvfp4").quantize(value, segments=SEGMENTS) for value in values]
    inputs = [cuda(rows, INPUTS, seed=20 + i) for i in range(2)]
    expected = [fp4_linear(x, weight, None, parts) for x, weight in zip(inputs, weights, strict=True)]
    torch.cuda.synchronize()
    streams, outputs = [torch.cuda.Stream() for _ in range(2)], []
    for call in range(60):
        with torch.cuda.stream(streams[call % 2]):
            outputs.append(fp4_linear(inputs[call % 2], weights[call % 2], None, parts))
    torch.cuda.synchronize()
    for call, output in enumerate(outputs):
        torch.testing.assert_close(output, expected[call % 2], rtol=2.0**-7, atol=1e-2)
