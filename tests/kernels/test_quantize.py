"""Quantizing by the kernel in the interpreter: the bytes of the format, hard tensors included."""

from fractions import Fraction

import numpy as np
import pytest
import torch
import triton_cpu  # noqa: F401 - prepares the interpreter, before any kernel module
from hard_tensors import CASES
from triton.runtime import interpreter

from qerl.errors import FormatError
from qerl.formats import get_format
from qerl.kernels.quantize import mxfp4, quantize, reference
from qerl.kernels.quantize import triton as kernel

pytestmark = pytest.mark.interpret


def assert_equal_bytes(weight: torch.Tensor, segments: tuple[int, ...] | None = None) -> None:
    found = kernel.quantize(weight, "nvfp4", "rtn", "ct", segments, "w")
    expected = get_format("nvfp4").quantize(weight, segments=segments, name="w")
    assert (found.shape, found.segments) == (expected.shape, expected.segments)
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_hard_tensors_have_the_bytes_of_the_format(make):
    assert_equal_bytes(make())


@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (5, 40), (2, 7), (70, 80)])
@pytest.mark.parametrize("size", [1.0, 1e-38, 1e-3, 1e30])
def test_shapes_and_magnitudes(shape, size):
    weight = size * torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    assert_equal_bytes(weight)
    if size > 1e-30:  # the interpreter misreads the subnormal numbers of bfloat16
        assert_equal_bytes(weight.bfloat16())


def test_scales_of_all_binades_and_fused_parts():
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-7, 3, 40)[:, None]
    weight[3], weight[4] = 0.0, -0.0
    assert_equal_bytes(weight, (8, 30, 2))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_by_name(value):
    weight = torch.ones(3, 32)
    weight[1, 5] = value
    with pytest.raises(FormatError, match="'w' holds a value that is not finite"):
        kernel.quantize(weight, "nvfp4", "rtn", "ct", None, "w")


@pytest.mark.parametrize(
    ("name", "method", "rounding"), [("nvfp4", "mse", "ct"), ("fp8", "rtn", "ct"), ("nf4", "mse", "ct")]
)
def test_the_rest_is_done_as_the_format_does_it(name, method, rounding):
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    found = kernel.quantize(weight, name, method, rounding, None, "w")
    expected = quantize(weight, name, method=method, rounding=rounding)
    for key, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[key].view(torch.uint8), tensor.view(torch.uint8))


def fused_multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c of float32, rounded once: the product is exact in float64, and the sum is rounded to odd there, so rounding it again does no harm."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    with np.errstate(invalid="ignore"):
        total = product + c
        back = total - product
        error = (product - (total - back)) + (c - back)
    even = (total.view(np.int64) & 1) == 0
    toward = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even & np.isfinite(total), toward, total).astype(np.float32)


@pytest.fixture
def device_arithmetic(monkeypatch):
    """The interpreter multiplies and adds as a device does, rounding once."""
    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_fma",
        lambda self, a, b, c: interpreter.TensorHandle(fused_multiply_add(a.data, b.data, c.data), a.dtype.scalar),
    )


def assert_bytes_of_fused(weight: torch.Tensor) -> None:
    expected = get_format("nvfp4").quantize(weight, name="w")
    reach = weight.float().abs().amax().reshape(1)
    for given in (None, reach):
        found, own = kernel.rounded(weight, (len(weight),), reach_1=given, fused=True)
        assert torch.equal(own, reach)
        for name, tensor in expected.tensors.items():
            assert torch.equal(found.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.usefixtures("device_arithmetic")
def test_quotients_by_fused_multiply_adds_have_the_bytes_of_the_format():
    """Those of a device, which the interpreter leaves out by itself."""
    generator = torch.Generator().manual_seed(3)
    for size, dtype in ((1.0, torch.bfloat16), (1e-3, torch.float16), (3e-8, torch.bfloat16), (1.0, torch.float32)):
        weight = size * torch.randn(9, 400, generator=generator)
        weight[0] *= torch.logspace(-6, 0, 400)
        weight[1], weight[2, ::2] = 0.0, -0.0
        assert_bytes_of_fused(weight.to(dtype))
    for make in CASES.values():
        weight = make()[:16, :256].contiguous()
        if weight.dtype != torch.float64 and weight.abs().max() > 1e-30:
            assert_bytes_of_fused(weight)


def assert_bytes_of_mxfp4(weight: torch.Tensor, *, fused: bool, segments: tuple[int, ...] | None = None) -> None:
    expected = get_format("mxfp4").quantize(weight, segments=segments, name="w")
    found, bad = mxfp4.rounded(weight, expected.segments, fused=fused)
    assert (found.shape, found.segments, float(bad)) == (expected.shape, expected.segments, 0.0)
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor), name


@pytest.mark.usefixtures("device_arithmetic")
@pytest.mark.parametrize("fused", [False, True])
def test_mxfp4_in_one_pass_has_the_bytes_of_the_format(fused):
    """Hard tensors, ragged rows, all binades with the largest and the smallest, and zeros of both signs."""
    generator = torch.Generator().manual_seed(5)
    for make in CASES.values():
        weight = make()
        if weight.dtype != torch.float64:
            assert_bytes_of_mxfp4(weight, fused=fused)
    for shape in ((1, 1), (3, 32), (5, 40), (7, 200)):
        weight = torch.randn(*shape, generator=generator)
        assert_bytes_of_mxfp4(weight, fused=fused)
        assert_bytes_of_mxfp4(weight.half(), fused=fused)
    binades = (
        torch.randn(70, 64, generator=generator).clamp(-1.9, 1.9) * torch.logspace(-149, 127, 70, base=2.0)[:, None]
    )
    binades[3], binades[4], binades[5, ::2], binades[6, 5] = 0.0, -0.0, -0.0, -1e-45
    binades[68], binades[69, :3] = 1.75 * 2.0**127, torch.tensor([3.4e38, -1.75 * 2.0**127, -1e-45])
    assert_bytes_of_mxfp4(binades, fused=fused, segments=(8, 60, 2))
    edges = torch.tensor([1.75, 1.75 - 2.0**-23, 1.5, 3.5, -7.0, 6.999999, 0.5, -5.0, 2.5])[:, None] * torch.tensor(
        [1.0, 0.1, -0.25, 1 / 3]
    )
    assert_bytes_of_mxfp4(torch.cat((edges, edges.bfloat16().float())), fused=fused)


@pytest.mark.parametrize(
    ("values", "said"), [((torch.inf,), "infinity"), ((-torch.inf, torch.nan), "NaN"), ((torch.nan, torch.inf), "NaN")]
)
def test_mxfp4_is_made_by_its_kernel_and_names_what_is_not_finite(values, said, monkeypatch):
    monkeypatch.setattr(reference, "quantize", None)
    weight = torch.ones(40, 64)
    assert kernel.quantize(weight, "mxfp4", "rtn", "ct", (30, 10), "w").segments == (30, 10)
    for place, value in enumerate(values):
        weight[place * 30, 5] = value
    with pytest.raises(FormatError, match=f"'w' holds a value that is not finite.*{said}"):
        kernel.quantize(weight, "mxfp4", "rtn", "ct", None, "w")


EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between two codes."""


def test_one_correction_keeps_a_short_number_on_its_side_of_every_edge():
    """w / step beside each edge, for steps of all sorts and the 8 and 11 bits that numbers of bfloat16 and float16 have: of every step the nearest such
    numbers to its edges, and steps for which a number lies at an edge exactly, or as near as it can; against exact fractions."""
    generator = np.random.default_rng(0)
    fractions = generator.integers(1 << 23, 1 << 24, 1000).tolist()
    special = [base + delta for base in (1 << 23, 3 << 22, 1 << 24) for delta in range(-6, 7)]
    for bits in (8, 11):
        short = generator.integers(1 << (bits - 1), 1 << bits, 200).tolist()
        near = [
            -(-short_one * (1 << 24 - bits + scale) // odd)
            for short_one in short
            for odd in (1, 3, 5, 7)
            for scale in (0, 2)
        ]
        steps = sorted({step for step in (*fractions, *special, *near) if 1 << 23 <= step < 1 << 24})
        for edge in EDGES:
            exact = [step * Fraction(edge) for step in steps]
            units = [Fraction(2) ** (int(np.floor(np.log2(float(one)))) - bits + 1) for one in exact]
            for side in (-1, 0, 1):
                w = [(round(one / unit) + side) * unit for one, unit in zip(exact, units, strict=True)]
                w32, step32 = (np.array([float(one) for one in of], dtype=np.float32) for of in (w, steps))
                inverse = (np.float32(1) / step32).astype(np.float32)
                quotient = w32 * inverse
                quotient = fused_multiply_add(fused_multiply_add(quotient, -step32, w32), inverse, quotient)
                truth = w32 / step32
                assert (np.sign(quotient - np.float32(edge)) == np.sign(truth - np.float32(edge))).all()
