"""MXFP4 and NF4 through the packed layer's kernels, in every regime, against float64: one definition of a weight whatever the number of rows."""

from dataclasses import replace

import pytest
import torch
from fp4_builders import adapters_of, cuda, exact_product
from test_fp4_linear_gpu import ROWS_OF_X, check, error, once

from qerl.formats import dequantize, get_format
from qerl.formats.nf4 import CODEBOOK_SCALE, QUANTILES
from qerl.kernels.fp4_linear import decode, dense, fp4_linear, layout_gate, middle, regimes
from qerl.kernels.fp4_linear.adapter import flatten
from qerl.kernels.fp4_linear.cuda import regime_of

pytestmark = pytest.mark.gpu

NAMES = ("mxfp4", "nf4", "nf4_dq")
# (segments, inputs): Qwen2.5 7B and 0.5B projections, and odd ones; those of NF4 are whole blocks.
WEIGHTS = (
    ((3584, 512, 512), 3584),
    ((3584,), 18944),
    ((896, 128, 128), 896),
    ((4864, 4864), 896),
    ((1000, 1000), 576),
    ((20, 13, 7), 128),
    ((33,), 64),
)
ODD = (((20, 13, 7), 100), ((33,), 130), ((17,), 16), ((5, 90), 1056))
# (index in both, rank of adapters): those of real models with adapters, one of them and the others without.
CASES = [*((shape, 32) for shape in range(5)), (0, 0), *((shape, 0) for shape in range(5, len(WEIGHTS) + len(ODD)))]
# Norms: one rounding of the output beside those of NF4's codebook (7.8e-4) and products (1.67e-3).
ROUNDED_WEIGHTS = {"mxfp4": 1.9e-3, "nf4": 2.9e-3, "nf4_dq": 2.9e-3}
WEIGHT_ERROR = (1.6e-3, 2.1e-3)


def weight_of(name, segments, d_in, spread=True):
    """Rows of very different sizes, and a block of zeros."""
    values = cuda(sum(segments), d_in, scale=0.05).float()
    if spread:
        values *= torch.logspace(-3, 1, len(values), device="cuda")[:, None]
        values[0, : min(64, d_in)] = 0
    return get_format(name).quantize(values.bfloat16(), segments=segments)


def rounded(exact: torch.Tensor) -> torch.Tensor:
    """float64 to the nearest bfloat16, ties to even, at once."""
    bits = exact.view(torch.int64)
    return ((bits + (1 << 44) - 1 + ((bits >> 45) & 1)) & ~((1 << 45) - 1)).view(torch.float64)


def kernel_values(weight) -> torch.Tensor:
    """V, float64 [d_out, d_in]: what README.md says that the kernels multiply with."""
    if weight.format == "mxfp4":
        return dequantize(weight, torch.float64)
    codebook = (torch.tensor(QUANTILES, dtype=torch.float64) * CODEBOOK_SCALE).float().bfloat16().double().cuda()
    packed, (d_out, d_in) = weight.tensors["packed"], weight.shape
    codes = torch.stack((packed >> 4, packed & 15), dim=1).view(d_out, d_in)
    absmax = get_format(weight.format).absmax(weight).view(d_out, d_in // 64).repeat_interleave(64, dim=1)
    first = (absmax.view(torch.int32) & -65536).view(torch.float32)
    rest = (absmax - first).bfloat16().double()
    quantiles = codebook[codes.int()]
    return rounded(quantiles * first.double() + rounded(quantiles * rest))


def kernel_weight(weight) -> torch.Tensor:
    values = kernel_values(weight)
    return values if weight.format == "mxfp4" else values / CODEBOOK_SCALE


def shapes(name):
    return WEIGHTS + (ODD if name == "mxfp4" else ())


@pytest.mark.parametrize("name", NAMES)
def test_unpacked_values_are_those_of_the_definition_to_the_bit(name):
    fmt = get_format(name)
    for segments, d_in in shapes(name):
        weight = weight_of(name, segments, d_in)
        out = torch.full((weight.shape[0], d_in + 24), 7.0, dtype=torch.bfloat16, device="cuda")
        dense.dequantize_tiles(fmt.for_device(weight), out)
        assert torch.equal(out[:, :d_in].double(), kernel_values(weight)), (segments, d_in)
        assert (out[:, d_in:] == 7).all()
        exact = dequantize(weight, torch.float64)
        if name != "mxfp4" and exact.numel() > 1e5:
            assert WEIGHT_ERROR[0] < error(kernel_weight(weight), exact) < WEIGHT_ERROR[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_on_the_device_comes_back_byte_for_byte(name):
    fmt, weight = get_format(name), weight_of(name, (96, 40), 192)
    tiled = fmt.for_device(weight)
    assert tiled.order == "tiles"
    back = fmt.natural(tiled)
    for key, tensor in weight.tensors.items():
        assert torch.equal(back.tensors[key].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("shape", "rank"), CASES)
def test_every_number_of_rows_multiplies_with_the_same_weight(name, rank, shape):
    if shape >= len(shapes(name)):
        pytest.skip("NF4's blocks straddle these rows")
    segments, d_in = shapes(name)[shape]
    # Beside adapters of one size: cuBLAS may round a sum of them and a part of a small product once more.
    weight = weight_of(name, segments, d_in, spread=rank == 0)
    tiled = get_format(name).for_device(weight)
    assert tiled.order == "tiles"
    parts = adapters_of(segments, d_in, rank) if rank else []
    bias = cuda(sum(segments), seed=9)
    stands_for, exact_OI = kernel_weight(weight), dequantize(weight, torch.float64)
    for rows in ROWS_OF_X:
        x = cuda(rows, d_in, seed=rows)
        with torch.no_grad():
            y = fp4_linear(x, tiled, bias, parts)
            again = fp4_linear(x, tiled, bias, parts)
        if rows <= 8:
            assert decode.takes(x, tiled, *flatten(parts))
        check(y, x, weight, bias, parts, once=once(x, tiled, parts), dense_OI=stands_for)
        assert torch.equal(y, again), f"{rows} rows: same input, same bits"
        if y.numel() >= 4096 and once(x, tiled, parts):
            assert error(y, exact_product(x, exact_OI, bias, parts)) < ROUNDED_WEIGHTS[name]


def test_exponents_of_mxfp4_from_the_smallest_to_the_largest():
    """Blocks of such exponents and all codes, one after the other, with activations that bring the outputs into the range of bfloat16."""
    fmt = get_format("mxfp4")
    weight = weight_of("mxfp4", (64,), 64)
    codes = torch.randint(0, 256, (64, 32), dtype=torch.uint8, device="cuda")
    for exponent in (*range(0, 253, 11), 1, 126, 127, 128, 129, 252):
        scales = torch.full((64, 2), exponent, dtype=torch.uint8, device="cuda")
        scales[:, 1] = 128 - exponent if exponent <= 128 else 252 - exponent
        weight = replace(weight, tensors={"packed": codes, "block_scales": scales})
        tiled = fmt.for_device(weight)
        assert (tiled.order == "tiles") == (exponent <= 128)
        for block, own in ((slice(0, 32), exponent), (slice(32, 64), int(scales[0, 1]))):
            for rows in (3, 100):
                x = torch.zeros(rows, 64, dtype=torch.bfloat16, device="cuda")
                x[:, block] = (cuda(rows, 32, seed=exponent).float() * 2.0 ** ((127 - own) // 2)).bfloat16()
                with torch.no_grad():
                    y = fp4_linear(x, tiled)
                check(y, x, weight, once=once(x, tiled))


def test_sizes_of_nf4_far_from_one():
    weight = weight_of("nf4", (64,), 256, spread=False)
    for size in (1e-30, 1e-18, 3e-5, 1.0, 1e5, 1e17, 1e30):
        scaled = replace(weight, tensors={**weight.tensors, "absmax": weight.tensors["absmax"] * size})
        tiled = get_format("nf4").for_device(scaled)
        for rows in (3, 100):
            x = cuda(rows, 256, seed=rows)
            with torch.no_grad():
                y = fp4_linear(x, tiled)
            check(y, x, scaled, once=once(x, tiled), dense_OI=kernel_weight(scaled))


@pytest.mark.parametrize("name", NAMES)
def test_the_gate_passes_in_every_regime(name):
    layout_gate(get_format(name).for_device(weight_of(name, (3584, 512, 512), 3584)), "m", dtype=torch.bfloat16)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [4, 100, 1100])
def test_gradients_agree_with_float64(name, rows):
    weight = weight_of(name, (512, 512), 192, spread=False)
    stands_for, tiled = kernel_weight(weight), get_format(name).for_device(weight)
    x, upstream = cuda(rows, 192, seed=5).requires_grad_(), cuda(rows, 1024, seed=6)
    (ours,) = torch.autograd.grad(fp4_linear(x, tiled), x, upstream)
    assert error(ours, upstream.double() @ stands_for) < 3.5e-3


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_the_others(name):
    segments, d_in = (3584, 512, 512), 3584
    tiled, parts = get_format(name).for_device(weight_of(name, segments, d_in)), adapters_of(segments, d_in, 32)
    for rows in (2, 8, 16, 27, 64):
        x, other = cuda(rows, d_in, seed=3), cuda(rows, d_in, seed=4)
        other[-1] = x[-1]
        with torch.no_grad():
            assert torch.equal(fp4_linear(x, tiled, None, parts)[-1], fp4_linear(other, tiled, None, parts)[-1])


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_a_packed_head_in_float32(name):
    weight = weight_of(name, (5000,), 896, spread=False)
    tiled, stands_for = get_format(name).for_device(weight), kernel_weight(weight)
    for rows, product in ((7, decode.product), (100, lambda *args, **options: middle.product(*args, **options)[0])):
        x = cuda(rows, 896, seed=5)
        if rows == 100 and torch.cuda.get_device_capability() != regimes.HOPPER:
            continue
        logits = product(x, tiled, None, (), (), (), dtype=torch.float32)
        assert error(logits, x.double() @ stands_for.T) < 2e-6


@pytest.mark.parametrize("name", NAMES)
def test_a_captured_graph_gives_the_same_bits(name):
    segments, d_in = (3584, 512, 512), 3584
    tiled, parts = get_format(name).for_device(weight_of(name, segments, d_in)), adapters_of(segments, d_in, 32)
    for rows in (6, 40, 100):
        x = cuda(rows, d_in)
        with torch.no_grad():
            first = fp4_linear(x, tiled, None, parts)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(3):
                    y = fp4_linear(x, tiled, None, parts)
            y.fill_(torch.nan)
            graph.replay()
            assert torch.equal(y, first)


def test_rows_that_blocks_straddle_stay_in_the_natural_order():
    weight = weight_of("nf4", (33,), 130)
    assert get_format("nf4").for_device(weight).order == "natural"
    x = cuda(5, 130)
    assert regime_of(x, weight, (), (), ()) == regimes.DENSE
    with torch.no_grad():
        assert error(fp4_linear(x, weight), exact_product(x, dequantize(weight, torch.float64))) < 3.5e-3
