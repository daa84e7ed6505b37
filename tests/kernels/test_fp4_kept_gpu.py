"""V that is kept beside a packed weight: the bits that are made anew elsewhere, and a kernel of its own, against float64."""

from dataclasses import replace

import pytest
import torch
from fp4_builders import adapters_of, cuda, exact_product
from test_fp4_formats_gpu import kernel_weight, weight_of
from test_fp4_linear_gpu import GRADIENTS, check, error

from qerl.formats import get_format
from qerl.kernels.fp4_linear import dense, fp4_linear, keep, keeps, kept, layout_gate, regimes
from qerl.kernels.fp4_linear.adapter import flatten
from qerl.kernels.fp4_linear.cuda import regime_of
from qerl.kernels.fp4_linear.workspace import workspace

pytestmark = pytest.mark.gpu

NAMES = ("nvfp4", "mxfp4", "nf4", "nf4_dq")
ON_HOPPER = pytest.mark.skipif("torch.cuda.get_device_capability() != (9, 0)", reason="a kernel of sm_90")
SOME, MANY = 100, 3000
ROWS = (3, 16, 17, 40, 64, 200, 1000, 2048)
# (segments, inputs): Qwen2.5 0.5B and 3B projections that are kept, and odd ones.
WEIGHTS = (
    ((896, 128, 128), 896),
    ((896,), 896),
    ((4864, 4864), 896),
    ((896,), 4864),
    ((2048, 256, 256), 2048),
    ((33,), 136),
    ((17,), 16),
    ((1000, 1000), 576),
)


def pair(name, segments, d_in, **options):
    """(natural, as a device holds it, the same with V kept)."""
    natural = weight_of(name, segments, d_in, **options)
    held = get_format(name).for_device(natural)
    assert keeps(held, torch.bfloat16) == (held.shape[0] * held.shape[1] < regimes.SMALL_WEIGHT)
    assert not keeps(held, torch.float32)
    return natural, held, keep(held)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("segments", "d_in"), [((896, 128, 128), 896), ((20, 13, 7), 128), ((33,), 130), ((17,), 16)])
def test_kept_values_are_those_that_each_call_makes(name, segments, d_in):
    _, held, kept_too = pair(name, segments, d_in)
    made, alphas = dense.values(held)
    assert torch.equal(kept_too.kept_OI, made)
    same, same_alphas = dense.values(kept_too)
    assert same is kept_too.kept_OI
    assert same_alphas == alphas
    assert kept_too.nbytes() == held.nbytes()
    assert get_format(name).rows(kept_too, 0, segments[0]).kept_OI is None
    assert get_format(name).natural(held).kept_OI is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rank", [0, 32])
def test_the_large_regime_and_gradients_have_the_same_bits(name, rank):
    segments, d_in = (896, 128, 128), 896
    _, held, kept_too = pair(name, segments, d_in)
    placements, a, b = flatten(adapters_of(segments, d_in, rank) if rank else [])
    x, bias, upstream = cuda(MANY, d_in), cuda(sum(segments), seed=9), cuda(MANY, sum(segments), seed=4)
    grad_h = [cuda(MANY, rank * 3, seed=5)] if rank else []
    ours, theirs = (dense.forward(x, weight, bias, placements, a, b)[0] for weight in (kept_too, held))
    assert torch.equal(ours, theirs)
    ours, theirs = (dense.input_gradient(upstream, weight, grad_h, a) for weight in (kept_too, held))
    assert torch.equal(ours, theirs)


@ON_HOPPER
@pytest.mark.parametrize(
    ("segments", "d_in", "rank"),
    [*((*weight, rank) for weight in WEIGHTS for rank in (0, 32)), (*WEIGHTS[0], 8), (*WEIGHTS[0], 128)],
)
def test_every_number_of_rows_agrees_with_float64(segments, d_in, rank):
    natural, _, weight = pair("nvfp4", segments, d_in)
    parts, bias = (adapters_of(segments, d_in, rank) if rank else []), cuda(sum(segments), seed=9)
    for rows in ROWS:
        x = cuda(rows, d_in, seed=rows)
        with torch.no_grad():
            y, again = (fp4_linear(x, weight, bias, parts) for _ in range(2))
        check(y, x, natural, bias, parts, once=regime_of(x, weight, *flatten(parts)) != regimes.DENSE)
        assert torch.equal(y, again), f"{rows} rows: same input, same bits"
    assert not workspace(y.device).counters().any()


@ON_HOPPER
@pytest.mark.parametrize("rows", [SOME, 1000])
def test_every_shape_agrees_with_float64(rows):
    """Of small and long products, all ways to cut them, shared tiles and not."""
    for segments, d_in in (((896, 128, 128), 896), ((4864, 4864), 896), ((896,), 4864)):
        natural, _, weight = pair("nvfp4", segments, d_in)
        parts, bias, x = adapters_of(segments, d_in, 32), cuda(sum(segments), seed=9), cuda(rows, d_in)
        placements, a, b = flatten(parts)
        pieces = kept.pieces_of(weight.segments, placements, dense.row_alphas(weight))
        for shape in kept.SHAPES:
            if all(piece.stop % shape.columns == 0 for piece in pieces[:-1]):
                for splits in (1, 3):
                    cut = replace(shape, splits=splits)
                    y = kept.run(x, weight.kept_OI, bias, pieces, placements, a, b, cut)
                    check(y, x, natural, bias, parts, once=True)


@ON_HOPPER
@pytest.mark.parametrize(("segments", "d_in"), [WEIGHTS[0], WEIGHTS[3], WEIGHTS[5]])
def test_every_output_is_written(segments, d_in, monkeypatch):
    """New memory holds NaN: outputs, and sums of the blocks that share a tile."""
    natural, _, weight = pair("nvfp4", segments, d_in)
    empty, parts, bias = torch.empty, adapters_of(segments, d_in, 8), cuda(sum(segments), seed=9)
    for rows in (17, SOME, 1000):
        x = cuda(rows, d_in, seed=rows)
        assert regime_of(x, weight, *flatten(parts)) == regimes.KEPT
        with torch.no_grad(), monkeypatch.context() as patched:
            patched.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(torch.nan))
            y = fp4_linear(x, weight, bias, parts)
        check(y, x, natural, bias, parts, once=True)


@ON_HOPPER
@pytest.mark.parametrize("rows", [17, SOME, 1000])
def test_a_row_does_not_depend_on_the_others(rows):
    segments, d_in = WEIGHTS[0]
    _, _, weight = pair("nvfp4", segments, d_in)
    parts, x, other = adapters_of(segments, d_in, 32), cuda(rows, d_in, seed=3), cuda(rows, d_in, seed=4)
    other[-1] = x[-1]
    assert regime_of(x, weight, *flatten(parts)) == regimes.KEPT
    with torch.no_grad():
        assert torch.equal(fp4_linear(x, weight, None, parts)[-1], fp4_linear(other, weight, None, parts)[-1])


@ON_HOPPER
@pytest.mark.parametrize("name", NAMES[1:])
def test_other_formats_and_float32_outputs(name):
    segments, d_in = (2048, 256, 256), 2048
    natural, _, weight = pair(name, segments, d_in)
    parts, exact_OI = adapters_of(segments, d_in, 32), kernel_weight(natural)
    for rows in (17, SOME, 1000):
        x = cuda(rows, d_in, seed=rows)
        assert regime_of(x, weight, *flatten(parts)) == regimes.KEPT
        with torch.no_grad():
            check(fp4_linear(x, weight, None, parts), x, natural, None, parts, once=True, dense_OI=exact_OI)
            y = fp4_linear(x, weight, None, (), dtype=torch.float32)
        assert y.dtype == torch.float32
        assert error(y, x.double() @ exact_OI.T) < 1e-5


@ON_HOPPER
@pytest.mark.parametrize(
    ("segments", "d_in", "rank"), [(*WEIGHTS[0], 32), (*WEIGHTS[3], 32), (*WEIGHTS[2], 0), (*WEIGHTS[5], 8)]
)
def test_a_small_unquantized_weight_is_read_by_the_same_kernel(segments, d_in, rank):
    """Forward in every regime, with outputs of both types, and gradients, against float64."""
    natural = get_format("bf16").quantize(cuda(sum(segments), d_in, seed=7), segments=segments)
    weight, exact_OI = keep(natural), natural.tensors["weight"].double()
    assert weight.kept_OI is natural.tensors["weight"]
    parts, bias = (adapters_of(segments, d_in, rank) if rank else []), cuda(sum(segments), seed=9)
    for rows in (1, *ROWS, 2049):
        # No seed of A's, of which one row would be a copy.
        x = cuda(rows, d_in, seed=100 + rows)
        regime = regime_of(x, weight, *flatten(parts))
        assert regime == (regimes.KEPT if rows <= 2048 and (rank or 17 <= rows <= 256) else regimes.DENSE)
        with torch.no_grad():
            y, again = (fp4_linear(x, weight, bias, parts) for _ in range(2))
            wide = fp4_linear(x, weight, None, (), dtype=torch.float32)
        check(y, x, natural, bias, parts, once=regime == regimes.KEPT, dense_OI=exact_OI)
        assert torch.equal(y, again), f"{rows} rows: same input, same bits"
        assert error(wide, x.double() @ exact_OI.T) < 1e-5
    for rows in (SOME, MANY):
        x, upstream = cuda(rows, d_in).requires_grad_(), cuda(rows, sum(segments), seed=4)
        (ours,) = torch.autograd.grad(fp4_linear(x, weight, bias, parts), x, upstream)
        wide_x = x.detach().double().requires_grad_()
        (theirs,) = torch.autograd.grad(exact_product(wide_x, exact_OI, bias, parts), wide_x, upstream.double())
        assert error(ours, theirs) < GRADIENTS
    assert layout_gate(weight, "one", dtype=torch.bfloat16) < 4e-3


@ON_HOPPER
@pytest.mark.parametrize("members", [(0,), (1, 2), (2,), ()])
def test_adapters_on_some_members_and_a_divisor_for_each(members):
    segments, d_in = (384, 128, 640), 576
    fmt = get_format("nvfp4")
    joined = fmt.join(
        [fmt.quantize(cuda(n, d_in, seed=n, scale=s)) for n, s in zip(segments, (1, 29, 0.01), strict=True)]
    )
    weight = keep(fmt.for_device(joined))
    parts = adapters_of(segments, d_in, 16, members, scales=(1.5, 0.25, 3.0)) if members else []
    for rows in (17, SOME, 250):
        x = cuda(rows, d_in)
        assert regime_of(x, weight, *flatten(parts)) == regimes.KEPT
        with torch.no_grad():
            check(fp4_linear(x, weight, None, parts), x, joined, None, parts, once=True)


@ON_HOPPER
def test_a_captured_graph_gives_the_same_bits():
    segments, d_in = (896,), 4864
    _, _, weight = pair("nvfp4", segments, d_in)
    parts = adapters_of(segments, d_in, 32)
    for rows in (40, 256):
        x = cuda(rows, d_in)
        with torch.no_grad():
            first = fp4_linear(x, weight, None, parts)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(3):
                    y = fp4_linear(x, weight, None, parts)
            y.fill_(torch.nan)
            graph.replay()
            assert torch.equal(y, first)


@ON_HOPPER
def test_gradients_agree_with_float64():
    segments, d_in = (896, 128, 128), 896
    natural, _, weight = pair("nvfp4", segments, d_in, spread=False)
    exact_OI = get_format("nvfp4").dequantize(natural, torch.float64)
    leaf, upstream = cuda(SOME, d_in, seed=5).requires_grad_(), cuda(SOME, sum(segments), seed=6)
    parts = adapters_of(segments, d_in, 32)
    matrices = [parts[0].a_RI, *(part.b_OR for part in parts)]
    for matrix in matrices:
        matrix.requires_grad_()
    ours = torch.autograd.grad(fp4_linear(leaf, weight, None, parts), [leaf, *matrices], upstream)
    exact = torch.autograd.grad(exact_product(leaf, exact_OI, None, parts), [leaf, *matrices], upstream.double())
    assert all(error(mine, theirs.double()) < 6e-3 for mine, theirs in zip(ours, exact, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_gate_passes_in_every_regime(name):
    layout_gate(pair(name, (2048, 256, 256), 2048)[2], "m", dtype=torch.bfloat16)


def test_what_the_kernel_leaves_goes_where_it_went():
    """Adapters of different ranks, and outputs that no tile ends with."""
    for segments in ((896, 128, 128), (20, 13, 7)):
        natural, _, weight = pair("nvfp4", segments, 128)
        parts = adapters_of(segments, 128, 8)
        parts[1] = replace(parts[1], b_OR=parts[1].b_OR[:, :4].contiguous())
        x = cuda(SOME, 128)
        assert regime_of(x, weight, *flatten(parts)) != regimes.KEPT
        with torch.no_grad():
            y = fp4_linear(x, weight, None, parts)
        check(y, x, natural, None, parts, once=regime_of(x, weight, *flatten(parts)) != regimes.DENSE)
