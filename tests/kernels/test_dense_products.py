"""Products of many tokens with a packed weight, as the GPU makes them: adapters as columns or rows of the weight or apart, parts with divisors of
their own, runs of tokens. What dequantizes is the format's own arithmetic here, and everything is float64, so that what is left out or added twice shows."""

import ctypes
from contextlib import suppress
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from young import positive, share_kept

from qerl.formats import PackedWeight, get_format
from qerl.kernels.cuda import driver
from qerl.kernels.cuda.driver import Launch
from qerl.kernels.fp4_linear import AdapterPart, dense, fp4_linear, regimes
from qerl.kernels.fp4_linear.adapter import columns_of, flatten, rows_of
from qerl.model.lora import LoraGroup

TOKENS, RANK = 13, 8
SHAPES = {"q k v": ((64, 32, 32), 64), "o": ((64,), 64), "gate up": ((96, 96), 64), "down": ((64,), 128)}


@pytest.fixture
def emulated(monkeypatch):
    """A device's workspace, and V by the format; gives how many rows and columns each dequantization was given."""
    asked, values = [], {}
    space = SimpleNamespace(
        scratch=lambda rows, columns: torch.full((rows, columns), torch.nan, dtype=torch.float64),
        alphas=lambda weight: tuple((1.0 / weight.tensors["global_scale"].double()).tolist()),
    )

    def dequantize(weight, out_OI):
        asked.append(tuple(out_OI.shape))
        natural = get_format(weight.format).natural(weight)
        key = weight.tensors["tiles"].data_ptr()
        if key not in values:
            values[key] = get_format(weight.format).factored(natural, torch.float64)[0]
        out_OI[: weight.shape[0], : weight.shape[1]] = values[key]
        return out_OI

    monkeypatch.setattr(dense, "workspace", lambda device: space)
    monkeypatch.setattr(dense, "dequantize_tiles", dequantize)
    monkeypatch.setattr(dense, "shrink", lambda x, a: x @ a.T)
    return asked


def made(name, members=None):
    """A tiled weight whose parts have divisors of their own, x, bias, adapters of the chosen parts, and the weight as float64 sees it."""
    segments, d_in = SHAPES[name]
    generator = torch.Generator().manual_seed(len(name))

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    fmt = get_format("nvfp4")
    rows = torch.cat([(index + 1) * normal(count, d_in) for index, count in enumerate(segments)])
    natural = fmt.quantize(rows.bfloat16(), segments=segments)
    stops = [sum(segments[: index + 1]) for index in range(len(segments))]
    chosen = range(len(segments)) if members is None else members
    a = normal(RANK * len(chosen), d_in)
    parts = [
        AdapterPart(
            start=stops[index] - segments[index], stop=stops[index], a_RI=a, b_OR=normal(segments[index], RANK),
            scale=1.5, rank_start=RANK * place,
        )
        for place, index in enumerate(chosen)
    ]  # fmt: skip
    exact_OI = fmt.dequantize(natural, torch.float64)
    return fmt.tiled(natural), exact_OI, normal(TOKENS, d_in), normal(sum(segments)), parts


def lay(monkeypatch, way, run=8192):
    """Adapters beside the weight wherever that can be, or nowhere; runs of so many tokens."""
    monkeypatch.setattr(dense, "_worth_more_terms", lambda *sizes: way == "beside" and sizes[3] > 0)
    monkeypatch.setattr(dense, "_WIDE_TOKENS", run)


@pytest.mark.parametrize("run", [8192, 5])
@pytest.mark.parametrize("way", ["beside", "apart"])
@pytest.mark.parametrize(
    ("name", "members"), [*((name, None) for name in SHAPES), ("q k v", (1,)), ("gate up", (0,)), ("o", ())]
)
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_the_weights_adapters_and_bias(emulated, monkeypatch, name, members, way, run, biased):
    weight, exact_OI, x, bias, parts = made(name, members)
    lay(monkeypatch, way, run)
    placements, a_RI, b_OR = flatten(parts)
    y, shrunk = dense.forward(x, weight, bias if biased else None, placements, a_RI, b_OR, dtype=torch.float64)
    exact = x @ exact_OI.T + (bias if biased else 0.0)
    for part in parts:
        a = part.a_RI[part.rank_start : part.rank_start + RANK]
        exact[:, part.start : part.stop] += part.scale * x @ a.T @ part.b_OR.T
    # G is a float32 in the format's own arithmetic.
    torch.testing.assert_close(y, exact, rtol=1e-6, atol=1e-5)
    assert all(torch.equal(h, x @ a.T) for h, a in zip(shrunk, a_RI, strict=True))
    beside = way == "beside" and members != ()
    assert emulated == [(exact_OI.shape[0], exact_OI.shape[1] + (len(a_RI[0]) if beside else 0))]


@pytest.mark.parametrize("run", [8192, 5])
@pytest.mark.parametrize("way", ["beside", "apart"])
@pytest.mark.parametrize(("name", "members"), [*((name, None) for name in SHAPES), ("gate up", (0,)), ("down", ())])
def test_input_gradients_are_through_weight_and_adapters(emulated, monkeypatch, name, members, way, run):
    weight, exact_OI, _, _, parts = made(name, members)
    lay(monkeypatch, way, run)
    _, a_RI, _ = flatten(parts)
    generator = torch.Generator().manual_seed(3)
    grad, *grad_h = (
        torch.randn(TOKENS, width, generator=generator, dtype=torch.float64)
        for width in (weight.shape[0], *(len(a) for a in a_RI))
    )
    exact = grad @ exact_OI
    for h, a in zip(grad_h, a_RI, strict=True):
        exact += h @ a
    torch.testing.assert_close(dense.input_gradient(grad, weight, grad_h, a_RI), exact, rtol=1e-6, atol=1e-5)
    # Rows beside those of a weight have one divisor.
    beside = way == "beside" and len(weight.segments) == 1 and members != ()
    assert emulated == [(weight.shape[0] + (len(a_RI[0]) if beside else 0), weight.shape[1])]


@pytest.mark.parametrize(("name", "members"), [("q k v", None), ("q k v", (0, 2)), ("down", None), ("gate up", ())])
@pytest.mark.parametrize("biased", [False, True])
def test_an_unquantized_weight_is_multiplied_as_it_is(emulated, monkeypatch, name, members, biased):
    """It is its own V: nothing is dequantized, no sum is divided; no adapter stands beside it where outputs are not bfloat16."""
    _, matrix_OI, x, bias, parts = made(name, members)
    lay(monkeypatch, "beside")
    segments = SHAPES[name][0]
    plain = PackedWeight(format="bf16", shape=tuple(matrix_OI.shape), tensors={"weight": matrix_OI}, segments=segments)
    weight = dense.keep(plain)
    assert weight.kept_OI is matrix_OI and weight.nbytes() == plain.nbytes()
    placements, a_RI, b_OR = flatten(parts)
    y, _ = dense.forward(x, weight, bias if biased else None, placements, a_RI, b_OR, dtype=torch.float64)
    exact = x @ matrix_OI.T + (bias if biased else 0.0)
    for part in parts:
        a = part.a_RI[part.rank_start : part.rank_start + RANK]
        exact[:, part.start : part.stop] += part.scale * x @ a.T @ part.b_OR.T
    torch.testing.assert_close(y, exact)
    grad_h = [y[:, : len(a)] for a in a_RI]
    through = sum((h @ a for h, a in zip(grad_h, a_RI, strict=True)), y @ matrix_OI)
    torch.testing.assert_close(dense.input_gradient(y, weight, grad_h, a_RI), through)
    assert emulated == []


@pytest.mark.parametrize("name", ["q k v", "gate up"])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_young_adapters_are_not_rounded_away(emulated, monkeypatch, name, plain, biased):
    """As where cuBLAS rounds a product before it adds it to an output in bfloat16, which would leave less than half of them."""

    def rounding(y_TO, a_TK, b_KO, *, beta=1.0, alpha=1.0):
        product_TO = alpha * (a_TK.float() @ b_KO.float())
        y_TO.copy_(product_TO.to(y_TO.dtype).float() + (beta * y_TO.float() if beta else 0.0))

    monkeypatch.setattr(dense, "add_product", rounding)
    segments, d_in = SHAPES[name]
    matrix_OI, fmt = positive(sum(segments), d_in, "cpu"), get_format("nvfp4")
    if plain:
        weight = dense.keep(get_format("bf16").quantize(matrix_OI, segments=segments))
    else:
        sized = torch.cat([size * part for size, part in zip((1, 3, 2), matrix_OI.split(segments), strict=False)])
        natural = fmt.quantize(sized, segments=segments)
        weight, matrix_OI = fmt.tiled(natural), fmt.dequantize(natural, torch.float64)
    monkeypatch.setattr(
        dense, "workspace", lambda device: SimpleNamespace(
            scratch=lambda rows, columns: torch.full((rows, columns), torch.nan, dtype=torch.bfloat16),
            alphas=lambda weight: tuple((1.0 / weight.tensors["global_scale"].double()).tolist()),
        )
    )  # fmt: skip

    def multiplied(x, bias, parts):
        return dense.forward(x, weight, bias, *flatten(parts))[0]

    assert 0.9 < share_kept(multiplied, matrix_OI, segments, 400, biased=biased) < 1.1
    # What this is a test of.
    if not biased:
        monkeypatch.setattr(dense, "adapters_as_columns", lambda *call: False)
        monkeypatch.setattr(torch, "empty_like", lambda like, dtype: torch.empty(like.shape, dtype=like.dtype))
        assert share_kept(multiplied, matrix_OI, segments, 400) < 0.1


@pytest.mark.parametrize(
    ("name", "least", "most"), [("nvfp4", 0.9, 1.1), ("mxfp4", 0.9, 1.1), ("nf4", 0.9, 1.1), ("bf16", 0.0, 0.1)]
)
def test_plain_products_lose_young_adapters_of_unquantized_weights_alone(name, least, most):
    """On a CPU, and of large ones on a GPU, engine and trainer alike (docs/reliability.md): the product is rounded before they are added."""
    segments, fmt = (64, 32, 32), get_format(name)
    natural = fmt.quantize(positive(sum(segments), 64, "cpu"), segments=segments)

    def multiplied(x, bias, parts):
        with torch.no_grad():
            return fp4_linear(x, natural, bias, parts)

    share = share_kept(multiplied, fmt.dequantize(natural, torch.float64), segments, 100)
    assert least <= share < most


def test_neighboring_parts_with_one_divisor_are_one_run_of_rows():
    found = dense._joined((64, 32, 32, 16), (0.5, 0.5, 0.25, 0.5))
    assert found == ((slice(0, 96), 0.5), (slice(96, 128), 0.25), (slice(128, 144), 0.5))
    assert dense._joined((8, 8), (1.0, 1.0)) == ((slice(0, 16), 1.0),)


def test_a_part_that_is_everything_is_the_matrix_itself():
    matrix = torch.arange(12).view(3, 4)
    assert columns_of(matrix, slice(0, 4)) is matrix and rows_of(matrix, slice(0, 3)) is matrix
    for start, stop in ((0, 2), (1, 3), (2, 3), (0, 0)):
        assert torch.equal(columns_of(matrix, slice(start, stop)), matrix[:, start:stop])
        assert torch.equal(rows_of(matrix, slice(start, stop)), matrix[start:stop])


@pytest.mark.parametrize("before", [True, False])
def test_the_setting_of_sums_is_what_it_was_also_after_an_error(before):
    settings = torch.backends.cuda.matmul
    kept = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = before
    try:
        with suppress(KeyError), dense._Float32Sums():
            assert not settings.allow_bf16_reduced_precision_reduction
            raise KeyError
        assert settings.allow_bf16_reduced_precision_reduction == before
    finally:
        settings.allow_bf16_reduced_precision_reduction = kept


def test_more_rows_than_any_other_kernel_takes_are_dense_everywhere():
    for numbers, capability in product((1000, 10**9), ((8, 0), (9, 0), (12, 0))):
        for kept, adapters, more in product((False, True), (False, True), (1, 2, 1000, 10**6)):
            rows = regimes.MOST_ROWS + more
            assert not regimes.preferred(rows, numbers, capability, kept=kept, adapters=adapters)
    assert regimes.preferred(regimes.MOST_ROWS, 10**9, (9, 0))


def test_a_launch_tells_the_driver_of_attributes_where_it_has_some():
    plain, none = driver._config(Launch(grid=7, block=256, shared=100), 5)
    assert none is None and plain.count == 0 and not plain.attributes
    assert (*plain.grid, *plain.block, plain.shared, plain.stream) == (7, 1, 1, 256, 1, 1, 100, 5)
    config, kept = driver._config(Launch(grid=8, block=32, cluster=4, overlap=True), 5)
    assert kept is not None and config.count == 2
    assert [(one.id, one.value[0]) for one in config.attributes[:2]] == [(4, 4), (6, 1)]
    assert ctypes.sizeof(config) == ctypes.sizeof(plain)


def test_adapters_that_are_not_used_get_no_gradient_and_the_others_all_of_theirs():
    group = LoraGroup(["q", "k", "v"], [(0, 8), (8, 12), (12, 16)], 6, rank=2, alpha=4.0, seed=0)
    parts = group.adapter_parts(torch.bfloat16)
    weights = [torch.randn(part.b_OR.shape).bfloat16() for part in parts]
    sum((part.b_OR * weight).sum() for part, weight in zip(parts[:2], weights[:2], strict=True)).backward()
    for b, weight in zip(group.lora_b[:2], weights[:2], strict=True):
        assert b.grad.dtype == torch.float32 and torch.equal(b.grad, weight.float())
    assert group.lora_a.grad is None and group.lora_b[2].grad is None
