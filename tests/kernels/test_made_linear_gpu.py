"""Products that make their x on the way, against the same product of an x from kernels of their own."""

import pytest
import torch
from fp4_builders import adapters_of, cuda

from qerl.formats import get_format
from qerl.kernels.activation import silu_mul
from qerl.kernels.fp4_linear import Gated, Normed, fp4_linear, made_linear
from qerl.kernels.rms_norm import add_rms_norm, rms_norm

pytestmark = pytest.mark.gpu

WEIGHTS = (((3584, 512, 512), 3584), ((18944, 18944), 3584), ((896, 128, 128), 896), ((3584,), 18944), ((64,), 72))
ROWS = (1, 3, 8, 13, 16)
FLIPS = 6e-4
"""Share by which a product changes where sums in another order round a few of its inputs the other way."""


def weight_of(segments, inputs):
    fmt = get_format("nvfp4")
    return fmt.for_device(fmt.quantize(cuda(sum(segments), inputs, scale=0.05), segments=segments))


def assert_close(found, expected):
    assert float((found.double() - expected.double()).norm() / expected.double().norm()) < FLIPS


def captured(call):
    """The result of a captured run, in which launches overlap, and of a second replay."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    first = [tensor.clone() for tensor in out]
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(first, out, strict=True))
    return first


@torch.no_grad()
@pytest.mark.parametrize("rank", [0, 32])
@pytest.mark.parametrize(("segments", "inputs"), WEIGHTS)
def test_gate_and_up_go_into_the_product_as_they_are(segments, inputs, rank):
    weight, parts = weight_of(segments, inputs), adapters_of(segments, inputs, rank) if rank else []
    bias = cuda(sum(segments), seed=8)
    for rows in ROWS:
        gate_up = cuda(rows, 2 * inputs, seed=rows, scale=2.0)

        def call(gate_up=gate_up):
            return (made_linear(gate_up, Gated(), weight, bias, parts),)

        (found,) = captured(call)
        assert_close(found, fp4_linear(silu_mul(gate_up), weight, bias, parts))
        if rows == 8:
            few = made_linear(gate_up[3:6].contiguous(), Gated(), weight, bias, parts)
            assert torch.equal(few, found[3:6]), "a row depends on no other"


@torch.no_grad()
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(("segments", "inputs"), WEIGHTS)
def test_the_norm_and_the_stream_are_made_on_the_way(segments, inputs, noisy):
    weight, parts = weight_of(segments, inputs), adapters_of(segments, inputs, 16)
    scale = 1 + 0.3 * torch.randn(inputs, device="cuda")
    for rows in ROWS:
        x, residual = cuda(rows, inputs, seed=rows), cuda(rows, inputs, seed=90 + rows, scale=3.0)
        z = None
        if noisy:
            z = 0.1 * torch.randn(*((rows, inputs) if rows % 2 else (inputs,)), device="cuda")

        def call(x=x, residual=residual, z=z):
            stream = torch.empty_like(x)
            made = Normed(residual_TI=residual, stream_TI=stream, weight_I=scale, eps=1e-6, z=z)
            return made_linear(x, made, weight, None, parts), stream

        found, stream = captured(call)
        h, expected = add_rms_norm(x, residual, scale, 1e-6, z)
        assert torch.equal(stream, expected)
        assert_close(found, fp4_linear(h, weight, None, parts))
        first = Normed(residual_TI=None, stream_TI=x, weight_I=scale, eps=1e-6, z=z)
        plain = fp4_linear(rms_norm(x, scale, 1e-6, z), weight, None, parts)
        assert_close(made_linear(x, first, weight, None, parts), plain)


def test_what_no_kernel_makes_is_left_to_the_caller():
    weight = weight_of((64,), 72)
    with torch.no_grad():
        assert made_linear(cuda(17, 144), Gated(), weight) is None
        assert made_linear(cuda(4, 144).float(), Gated(), weight) is None
        assert made_linear(cuda(4, 144), Gated(), weight, kernel="reference") is None
        odd = weight_of((64,), 70)
        assert made_linear(cuda(4, 140), Gated(), odd) is None
    assert made_linear(cuda(4, 144), Gated(), weight) is None
