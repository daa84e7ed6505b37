"""The packed linear layer on a CUDA device, in every regime, against float64."""

from dataclasses import replace

import pytest
import torch
from fp4_builders import adapters_of, cuda, exact_product

from qerl.formats import PackedWeight, dequantize, get_format
from qerl.kernels.fp4_linear import decode, dense, fp4_linear, layout_gate
from qerl.kernels.fp4_linear.adapter import flatten
from qerl.kernels.fp4_linear.cuda import regime_of
from qerl.kernels.fp4_linear.regimes import DENSE
from qerl.kernels.fp4_linear.workspace import workspace
from qerl.model.lora import LoraGroup

pytestmark = pytest.mark.gpu

FORMAT = get_format("nvfp4")
# Every regime takes some of them, for small weights and for big ones (test_regimes.py).
ROWS_OF_X = (1, 3, 8, 16, 17, 32, 63, 64, 128, 200, 1000, 1100, 4100, 8200)
# (segments, inputs): Qwen2.5 7B and 0.5B projections, and odd ones.
WEIGHTS = (
    ((3584, 512, 512), 3584),
    ((3584,), 18944),
    ((896, 128, 128), 896),
    ((4864, 4864), 896),
    ((20, 13, 7), 100),
    ((33,), 130),
    ((17,), 16),
    ((1000, 1000), 576),
)
# Rounding to bfloat16 changes a number by at most this share of it; on average, in many numbers, by 1.67e-3 (root of the mean square).
ROUNDING = 2.0**-8
ONE_ROUNDING = 1.9e-3
# What float32 sums of the matrix units may be off by, as a share of the sum of sizes.
SUMS = 2.0**-20
# cuBLAS may round parts of a long sum to bfloat16, whatever it is told; a part is at most about so many root mean squares of the sum.
PARTS = 4.0
LARGE_REGIME = 3.5e-3
MANY = 4096
# Gradients: h, dH and the sum with the base product are rounded as well.
GRADIENTS = 6.0e-3
# A weight of another format is rounded for the large product.
ROUNDED_WEIGHTS = 6.0e-3
# Tensor cores cut off when they add: up to 5e-7 at 896 inputs in cuBLAS's products as well.
FLOAT32_SUMS = 2.0e-6


def weight_of(segments, d_in) -> PackedWeight:
    return FORMAT.quantize(cuda(sum(segments), d_in, scale=0.05), segments=segments)


def exact(x, weight, bias=None, parts=()) -> torch.Tensor:
    """float64, with h rounded to bfloat16 as everywhere."""
    return exact_product(x, dequantize(weight, torch.float64), bias, parts)


def error(y, reference) -> float:
    return float((y.double() - reference).norm() / reference.norm())


def check(y, x, weight, bias=None, parts=(), *, once: bool, dense_OI=None):
    """Every element is within its own bound: the rounding of the output; where h lies so near to the middle of two bfloat16 numbers
    that sums in another order choose the other one, the difference of the two; without `once`, which is the large regime, the
    rounding of bias and adapters, and of parts of the product, of which one begins with them. Many numbers rounded once differ by the mean of a rounding too. `dense_OI` is
    what stands for the weight, if not all that is stored."""
    dense_OI = dequantize(weight, torch.float64) if dense_OI is None else dense_OI
    expected = exact_product(x, dense_OI, bias, parts)
    sizes = x.double().abs()
    adapters, flips = torch.zeros_like(expected), torch.zeros_like(expected)
    for part in parts:
        a = part.a_RI[part.rank_start : part.rank_start + part.b_OR.shape[1]].double()
        h, near = x.double() @ a.T, SUMS * (sizes @ a.abs().T)
        b = part.scale * part.b_OR.double().abs().T
        adapters[:, part.start : part.stop] += h.abs() @ b
        flips[:, part.start : part.stop] += ((h + near).bfloat16().double() - (h - near).bfloat16().double()) @ b
    if bias is not None:
        adapters += bias.double().abs()
    rounded = expected.abs()
    if not once:
        begins = (expected - x.double() @ dense_OI.T).abs()
        rounded += adapters + begins + PARTS * (sizes.square() @ dense_OI.square().T).sqrt()
    bound = flips + SUMS * (sizes @ dense_OI.abs().T + adapters)
    bound += 1.01 * ROUNDING * (rounded + bound)
    off = ((y.double() - expected).abs() / bound.clamp(min=1e-300)).nan_to_num(nan=torch.inf)
    worst = int(off.argmax())
    assert off.max() <= 1, f"{tuple(x.shape)}: {float(off.max()):.3f} of its bound at {divmod(worst, y.shape[1])}"
    if y.numel() >= MANY:
        assert error(y, expected) < (ONE_ROUNDING if once else LARGE_REGIME), tuple(x.shape)


def once(x, weight, parts=()) -> bool:
    """Whether the regime that runs rounds only the output."""
    return regime_of(x, weight, *flatten(parts)) != DENSE


@pytest.mark.parametrize(("segments", "d_in"), WEIGHTS)
@pytest.mark.parametrize("rank", [0, 8, 32, 128])
def test_every_number_of_rows_agrees_with_float64(segments, d_in, rank):
    weight = weight_of(segments, d_in)
    parts = adapters_of(segments, d_in, rank) if rank else []
    bias = cuda(sum(segments), seed=9)
    tiled = FORMAT.for_device(weight)
    for rows in ROWS_OF_X:
        x = cuda(rows, d_in, seed=rows)
        with torch.no_grad():
            y = fp4_linear(x, tiled, bias, parts)
            again = fp4_linear(x, tiled, bias, parts)
        if rows <= 8:
            assert decode.takes(x, tiled, *flatten(parts))
        check(y, x, weight, bias, parts, once=once(x, tiled, parts))
        assert torch.equal(y, again), f"{rows} rows: same input, same bits"


@pytest.mark.parametrize(
    ("segments", "d_in"), [((896,), 4864), ((3584,), 3584), ((1000, 24), 520), ((896, 128, 128), 896)]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_float32_outputs_are_the_sums_themselves(segments, d_in, with_bias):
    """In every regime, and from a plain weight; their gradients are those of outputs in bfloat16."""
    weight, parts = weight_of(segments, d_in), adapters_of(segments, d_in, 32)
    bias = cuda(sum(segments), seed=9) if with_bias else None
    plain = get_format("bf16").quantize(dequantize(weight, torch.bfloat16))
    for packed in (FORMAT.for_device(weight), plain):
        dense_OI = packed.tensors["weight"] if packed is plain else None
        natural = plain if packed is plain else weight
        for rows in (8, 100, 1500):
            x = cuda(rows, d_in, seed=rows)
            h_flips = 2e-3 * error(exact(x, natural, bias, ()), exact(x, natural, bias, parts))
            for given in ((), parts):
                with torch.no_grad():
                    y = fp4_linear(x, packed, bias, given, dense_OI, dtype=torch.float32)
                assert y.dtype == torch.float32
                assert error(y, exact(x, natural, bias, given)) < 1e-5 + (h_flips if given else 0)
            results = []
            for dtype in (torch.float32, torch.bfloat16):
                leaf = x.clone().requires_grad_()
                y = fp4_linear(leaf, packed, bias, parts, dense_OI, dtype=dtype)
                results.append(torch.autograd.grad(y, leaf, cuda(*y.shape, seed=5).to(dtype))[0])
            assert torch.equal(*results)


@pytest.mark.parametrize("segments", [(9728,), (4864, 4864)])
def test_adapters_as_columns_of_the_large_product_in_several_runs(segments, monkeypatch):
    monkeypatch.setattr(dense, "_WIDE_TOKENS", 512)
    weight = weight_of(segments, 896)
    parts = adapters_of(segments, 896, 32)
    x = cuda(1300, 896, seed=1)
    assert dense.adapters_as_columns(len(x), FORMAT.for_device(weight), [parts[0].a_RI], bias=False)
    with torch.no_grad():
        y = fp4_linear(x, FORMAT.for_device(weight), None, parts)
    check(y, x, weight, None, parts, once=False)


def test_a_row_does_not_depend_on_the_others():
    segments, d_in = (3584, 512, 512), 3584
    tiled, parts = FORMAT.for_device(weight_of(segments, d_in)), adapters_of(segments, d_in, 32)
    for rows in (2, 8, 16, 27, 64, 1000, 1100, 4100, 8200):
        x = cuda(rows, d_in, seed=3)
        other = cuda(rows, d_in, seed=4)
        other[-1] = x[-1]
        with torch.no_grad():
            assert torch.equal(fp4_linear(x, tiled, None, parts)[-1], fp4_linear(other, tiled, None, parts)[-1])


@pytest.mark.parametrize("members", [(0,), (1, 2), (2,)])
def test_adapters_on_some_members_leave_the_others_alone(members):
    segments, d_in = (3584, 512, 512), 3584
    weight = weight_of(segments, d_in)
    tiled, parts = FORMAT.for_device(weight), adapters_of(segments, d_in, 32, members)
    for rows in (5, 40):
        x = cuda(rows, d_in, seed=3)
        with torch.no_grad():
            y = fp4_linear(x, tiled, None, parts)
        check(y, x, weight, None, parts, once=once(x, tiled, parts))


def test_each_segment_has_its_own_global_scale():
    weights = [
        FORMAT.quantize(cuda(rows, 256, seed=rows, scale=s)) for rows, s in ((400, 1.0), (24, 29.0), (700, 0.01))
    ]
    joined = FORMAT.join(weights)
    tiled = FORMAT.for_device(joined)
    for parts in ((), adapters_of((400, 24, 700), 256, 16)):
        for rows in (4, 100):
            x = cuda(rows, 256, seed=1)
            with torch.no_grad():
                y = fp4_linear(x, tiled, None, parts)
            check(y, x, joined, None, parts, once=once(x, tiled, parts))


def test_subnormal_zero_and_largest_scales():
    weight = weight_of((64,), 256)
    scales = weight.tensors["block_scales"].view(torch.uint8).clone()
    adversarial = torch.tensor([0, 1, 2, 3, 5, 7, 8, 126], dtype=torch.uint8, device="cuda")
    scales[:, :] = adversarial.repeat(2)[None, :]
    weight = replace(weight, tensors={**weight.tensors, "block_scales": scales.view(torch.float8_e4m3fn)})
    tiled = FORMAT.for_device(weight)
    for block, scale in enumerate(adversarial.tolist()):
        for rows in (3, 100):
            x = torch.zeros(rows, 256, dtype=torch.bfloat16, device="cuda")
            x[:, 16 * block : 16 * block + 16] = cuda(rows, 16, seed=block)
            with torch.no_grad():
                y = fp4_linear(x, tiled)
            if scale == 0:
                assert not y.any()
            else:
                check(y, x, weight, once=once(x, tiled))


def test_every_output_is_written(monkeypatch):
    """New memory holds NaN, in every regime."""
    empty = torch.empty
    segments, d_in = (20, 13, 7), 104
    weight = weight_of(segments, d_in)
    tiled, parts = FORMAT.for_device(weight), adapters_of(segments, d_in, 8)
    for rows in (1, 9, 30, 200, 1100):
        x = cuda(rows, d_in)
        for given in ((), parts):
            with torch.no_grad(), monkeypatch.context() as patched:
                patched.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(torch.nan))
                y = fp4_linear(x, tiled, None, given)
            check(y, x, weight, None, given, once=once(x, tiled, given))


def test_dequantization_is_exact():
    for segments, d_in in WEIGHTS:
        weight = weight_of(segments, d_in)
        out = torch.full(weight.shape, torch.nan, dtype=torch.bfloat16, device="cuda")
        dense.dequantize_tiles(FORMAT.for_device(weight), out)
        assert torch.equal(out, FORMAT.factored(weight, torch.bfloat16)[0])
        wide = torch.full((weight.shape[0], weight.shape[1] + 24), 7.0, dtype=torch.bfloat16, device="cuda")
        dense.dequantize_tiles(FORMAT.for_device(weight), wide)
        assert torch.equal(wide[:, : weight.shape[1]], out)
        assert (wide[:, weight.shape[1] :] == 7).all()


def test_a_weight_on_the_device_comes_back_byte_for_byte():
    weight = weight_of((96, 40), 200)
    back = FORMAT.natural(FORMAT.for_device(weight))
    for key, tensor in weight.tensors.items():
        assert torch.equal(back.tensors[key].view(torch.uint8), tensor.view(torch.uint8))


def test_float32_logits_of_a_packed_head():
    weight = weight_of((5000,), 896)
    x = cuda(7, 896, seed=5)
    logits = decode.product(x, FORMAT.for_device(weight), None, (), (), (), dtype=torch.float32)
    assert error(logits, exact(x, weight)) < FLOAT32_SUMS


@pytest.mark.parametrize("rows", [4, 100, 700])
@pytest.mark.parametrize(("segments", "d_in"), [((96, 40), 192), ((96,), 800), ((512, 512), 192)])
def test_gradients_agree_with_float64(rows, segments, d_in, monkeypatch):
    """Adapters added to the product, and joined to it as rows or columns in runs of tokens."""
    monkeypatch.setattr(dense, "_WIDE_TOKENS", 512)
    monkeypatch.setattr(dense, "_PREPARATION", 0)
    check_gradients(rows, segments, d_in, rank=16)


@pytest.mark.parametrize("rows", [24, 1100, 4100, 8200])
@pytest.mark.parametrize(("segments", "d_in"), [((3584, 512, 512), 3584), ((3584,), 18944)])
def test_gradients_of_a_7b_agree_with_float64(rows, segments, d_in):
    """At the first two numbers of rows the product is of the middle kernel where there is one; down joins its adapters from the second on."""
    check_gradients(rows, segments, d_in, rank=32)


def check_gradients(rows, segments, d_in, rank):
    weight = weight_of(segments, d_in)
    parts = adapters_of(segments, d_in, rank)
    leaves = [cuda(rows, d_in, seed=5), parts[0].a_RI, *(part.b_OR for part in parts)]
    upstream = cuda(rows, sum(segments), seed=6)

    def gradients(tensors, compute):
        tensors = [t.detach().clone().requires_grad_() for t in tensors]
        x, a, *b = tensors
        fresh = [replace(part, a_RI=a, b_OR=own) for part, own in zip(parts, b, strict=True)]
        return torch.autograd.grad(compute(x, fresh), tensors, upstream.to(x.dtype))

    def plain(x, fresh):
        y = x @ dequantize(weight, torch.float64).T
        out = [
            y[:, p.start : p.stop] + p.scale * (x @ p.a_RI[p.rank_start : p.rank_start + rank].T) @ p.b_OR.T
            for p in fresh
        ]
        return torch.cat(out, 1)

    tiled = FORMAT.for_device(weight)
    ours = gradients(leaves, lambda x, fresh: fp4_linear(x, tiled, None, fresh))
    theirs = gradients([leaf.double() for leaf in leaves], plain)
    for mine, reference in zip(ours, theirs, strict=True):
        assert error(mine, reference) < GRADIENTS


@pytest.mark.parametrize("name", ["nvfp4", "nf4", "bf16"])
@pytest.mark.parametrize("rows", [8, 100, 1100])
def test_without_an_output_gradients_have_the_same_bits(name, rows):
    segments, d_in = (512, 512), 1024
    fmt = get_format(name)
    weight = fmt.for_device(fmt.quantize(cuda(1024, d_in, scale=0.05), segments=segments))
    parts = adapters_of(segments, d_in, 32)
    leaves = [cuda(rows, d_in, seed=5), parts[0].a_RI, *(part.b_OR for part in parts)]
    results = []
    for output in (True, False):
        x, a, *b = tensors = [t.detach().clone().requires_grad_() for t in leaves]
        fresh = [replace(part, a_RI=a, b_OR=own) for part, own in zip(parts, b, strict=True)]
        y = fp4_linear(x, weight, None, fresh, output=output)
        assert y.isnan().all() == (not output)
        results.append(torch.autograd.grad(y, tensors, cuda(rows, 1024, seed=6)))
    assert all(torch.equal(first, again) for first, again in zip(*results, strict=True))


@pytest.mark.parametrize("rows", [6, 40, 100])
def test_a_captured_graph_reads_adapters_updated_in_place(rows):
    segments, d_in = (96, 40), 192
    weight = weight_of(segments, d_in)
    tiled = FORMAT.for_device(weight)
    lora = LoraGroup(["q", "k"], [(0, 96), (96, 136)], d_in, rank=16, alpha=32, seed=0, device="cuda")
    x = cuda(rows, d_in)
    with torch.no_grad():
        fp4_linear(x, tiled, None, lora.adapter_parts(torch.bfloat16))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fp4_linear(x, tiled, None, lora.adapter_parts(torch.bfloat16))
        for seed in (1, 2):
            for b in lora.lora_b:
                b.copy_(cuda(*b.shape, seed=seed, scale=0.1))
            x.copy_(cuda(rows, d_in, seed=seed))
            lora.refresh()
            y.fill_(torch.nan)
            graph.replay()
            parts = lora.adapter_parts(torch.bfloat16)
            check(y, x, weight, None, parts, once=once(x, tiled, parts))


def test_the_gate_passes_the_kernels_in_every_regime():
    weight = weight_of((3584, 512, 512), 3584)
    layout_gate(FORMAT.for_device(weight), "m", dtype=torch.bfloat16)


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
def test_a_weight_too_tall_for_one_round_is_right_in_all_of_them(rows):
    """Gate and up of a 7B at 32 rows, and an LM head, are cut into rounds: blocks reuse the places of their partial sums."""
    weight = weight_of((152064,), 896)
    tiled = FORMAT.for_device(weight)
    x = cuda(rows, 896, seed=2)
    geometry = decode.find(workspace(x.device), rows, tiled, 0)
    assert rows < 16 or geometry.round_tiles * geometry.clusters < geometry.row_tiles
    assert error(decode.product(x, tiled, None, (), (), ()), exact(x, weight)) < ONE_ROUNDING
    logits = decode.product(x, tiled, None, (), (), (), dtype=torch.float32)
    assert error(logits, exact(x, weight)) < FLOAT32_SUMS


@pytest.mark.parametrize("name", ["mxfp4", "nf4", "nf4_dq", "fp8", "bf16"])
@pytest.mark.parametrize("rows", [3, 100])
def test_other_formats_run_too(name, rows):
    fmt = get_format(name)
    weight = fmt.for_device(fmt.quantize(cuda(96, 192, scale=0.05), segments=(96,)))
    parts = adapters_of((96,), 192, 16)
    x = cuda(rows, 192, seed=1)
    with torch.no_grad():
        y = fp4_linear(x, weight, None, parts)
    # NF4's weights are rounded to bfloat16 for the large product.
    assert error(y, exact(x, weight, None, parts)) < ROUNDED_WEIGHTS
