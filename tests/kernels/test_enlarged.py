"""Attention of float16: its gradients against float64 and against bfloat16's, whatever their size, and what becomes of numbers that are none."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qerl.kernels.attention import enlarge_from, enlarge_inside, packed_attention
from qerl.kernels.attention.enlarged import powers

GROUP, SIZE = 7, 16
LENGTHS = (90, 41, 1)
TOKENS = sum(LENGTHS)
SHAPES = ((TOKENS, GROUP, SIZE), (TOKENS, 1, SIZE), (TOKENS, 1, SIZE))
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0)


@given(
    st.floats(2.0**-126, 2.0**127, width=32),
    st.floats(-1, 1, width=32),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_power_of_two_brings_the_largest_magnitude_below_one(largest, other, dtype):
    grad = torch.tensor([[other * largest, -largest, 0.0]]).to(dtype)
    power, inverse = (float(found) for found in powers(grad))
    assert math.frexp(power)[0] == math.frexp(inverse)[0] == 0.5 and power * inverse == 1
    scaled = float(grad.double().abs().max()) * power
    assert 0.5 <= scaled < 1 or (scaled < 4 and power == 2.0**-126)


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_no_magnitude_and_none_that_is_finite_still_have_a_power_of_two(value):
    power, inverse = (float(found) for found in powers(torch.tensor([value, 0.0])))
    assert math.isfinite(power) and power > 0 and power * inverse == 1


def projections(seed=0):
    """float64 [T, X]: keys of the first tokens draw most of the attention."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in SHAPES)
    for start in BOUNDS[:-1].tolist():
        k[start] = 4.0
    return torch.cat([part.flatten(1) for part in (2 * q + 1, k, v)], 1)


def attend(qkv, dtype, output_dtype):
    widths = [heads * size for _, heads, size in SHAPES]
    qkv, mark = enlarge_inside(qkv) if dtype == torch.float16 else (qkv, None)
    heads = [part.unflatten(1, (-1, SIZE)).to(dtype) for part in qkv.split(widths, 1)]
    output = packed_attention(*heads, BOUNDS, SIZE**-0.5)
    return output.to(output_dtype) if mark is None else enlarge_from(output, mark, output_dtype)


def gradient(upstream, dtype, output_dtype=torch.bfloat16):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    qkv = projections().to(wide).requires_grad_()
    output = attend(qkv, dtype, output_dtype)
    return torch.autograd.grad(output, qkv, upstream.to(output_dtype))[0].double()


def upstream_of(magnitude, spread=2.0):
    """Gradients whose size differs between tokens by a factor of some hundreds, as advantages and positions make it; exact in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    sizes_T11 = (spread * torch.randn(TOKENS, 1, 1, generator=generator)).exp()
    grad = sizes_T11 * torch.randn(*SHAPES[0], generator=generator)
    return (magnitude * grad / grad.abs().max()).bfloat16()


def errors(found, exact):
    """Relative, of the gradients to q, k and v."""
    widths = [heads * size for _, heads, size in SHAPES]
    pairs = zip(found.split(widths, 1), exact.split(widths, 1), strict=True)
    return [float((one - other).norm() / other.norm()) for one, other in pairs]


@pytest.mark.parametrize("exponent", range(-8, 3))
def test_gradients_are_nearer_to_float64_than_those_of_bfloat16_at_any_size(exponent):
    upstream = upstream_of(10.0**exponent)
    exact = gradient(upstream, torch.float64, torch.float64)
    half, plain = (errors(gradient(upstream, dtype), exact) for dtype in (torch.float16, torch.bfloat16))
    assert all(near < 0.4 * far for near, far in zip(half, plain, strict=True)), (half, plain)


def test_a_power_of_two_in_front_of_the_gradient_changes_no_bit_but_itself():
    upstream = upstream_of(1.0)
    expected = gradient(upstream, torch.float16)
    for power in (2.0**-30, 2.0**9):
        assert torch.equal(gradient(power * upstream, torch.float16), power * expected)


def test_a_thousand_queries_of_one_sign_at_one_key_do_not_pass_the_range():
    """All weight on the first key, all gradients the largest: v's is their sum."""
    tokens, group = 1500, GROUP
    q, k = torch.ones(tokens, group, 8), torch.zeros(tokens, 1, 8)
    k[0] = 60.0
    v = torch.zeros(tokens, 8)
    qkv = torch.cat((q.flatten(1), k.flatten(1), v), 1).requires_grad_()
    inside, mark = enlarge_inside(qkv)
    heads = [part.unflatten(1, (-1, 8)).half() for part in inside.split((group * 8, 8, 8), 1)]
    output = enlarge_from(packed_attention(*heads, torch.tensor([0, tokens]), 1.0), mark, torch.bfloat16)
    found = torch.autograd.grad(output, qkv, torch.full_like(output, 1e-6))[0]
    assert torch.isfinite(found).all()
    expected = float(torch.tensor(1e-6).bfloat16()) * tokens * group
    torch.testing.assert_close(found[0, -8:], torch.full((8,), expected), rtol=4e-3, atol=0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_stays_so(value):
    upstream = upstream_of(1e-3)
    upstream[5, 2, 3] = value
    assert not torch.isfinite(gradient(upstream, torch.float16)).all()


def test_each_pass_has_a_power_of_its_own():
    leaves = [projections(seed).float().requires_grad_() for seed in (0, 1)]
    upstream = [upstream_of(magnitude) for magnitude in (1e2, 1e-8)]
    alone = [
        torch.autograd.grad(attend(x, torch.float16, torch.bfloat16), x, g)[0]
        for x, g in zip(leaves, upstream, strict=True)
    ]
    outputs = [attend(x, torch.float16, torch.bfloat16) for x in leaves]
    together = torch.autograd.grad(outputs, leaves, upstream)
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))
