"""Attention of float16 on CUDA, forward and backward, against float64 and beside bfloat16; and a decode step of it, captured."""

import pytest
import torch
from op_cases import head_bias, random, rotation

from qerl.kernels.attention import KeySpans, enlarge_from, enlarge_inside, packed_attention
from qerl.kernels.cached_attention import CacheRows, reference, triton
from qerl.kernels.cached_attention.plan import Plan
from qerl.kernels.rope import rope

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
LENGTHS, KEY_LENGTHS = (900, 1, 130, 64), (900, 40, 130, 300)
HEADS = [(14, 2, 64), (28, 4, 128), (6, 3, 80)]


def bounds(lengths):
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0)


def made(heads, kv_heads, size):
    """float32 q, k, v with a first key that draws much of the attention, and a gradient whose size differs between tokens."""
    q = 2 * random(sum(LENGTHS), heads, size, seed=1, device=DEVICE) + 0.5
    k, v = (random(sum(KEY_LENGTHS), kv_heads, size, seed=seed, device=DEVICE) for seed in (2, 3))
    k[bounds(KEY_LENGTHS)[:-1]] += 1.0
    sizes = (2 * random(len(q), 1, 1, seed=4, device=DEVICE)).exp()
    return [q, k, v], sizes * random(*q.shape, seed=5, device=DEVICE)


def attended(parts, upstream, dtype, kernel="auto"):
    """(output, gradients to q, k and v), all float64."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [part.to(wide).requires_grad_() for part in parts]
    inside, output_dtype = leaves, wide
    if dtype != torch.float64:
        output_dtype = torch.bfloat16
        *inside, mark = enlarge_inside(*leaves)
    keys = KeySpans(cu_keys_S1=bounds(KEY_LENGTHS), lengths=KEY_LENGTHS)
    heads = [part.to(dtype) for part in inside]
    output = packed_attention(
        *heads, bounds(LENGTHS), heads[0].shape[-1] ** -0.5, lengths=LENGTHS, keys=keys, kernel=kernel
    )
    output = enlarge_from(output, mark, output_dtype) if dtype == torch.float16 else output.to(output_dtype)
    if dtype == torch.bfloat16:
        found = torch.autograd.grad(output, heads, upstream.to(output_dtype))
    else:
        found = torch.autograd.grad(output, leaves, upstream.to(output_dtype))
    return [tensor.double() for tensor in (output, *found)]


def distance(found, exact):
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
@pytest.mark.parametrize("magnitude", [1e-8, 1e-3, 1e2])
def test_gradients_are_nearer_to_float64_than_those_of_bfloat16(heads, kv_heads, size, magnitude):
    parts, upstream = made(heads, kv_heads, size)
    # Exact in bfloat16, in which both get it.
    upstream = (magnitude * upstream / upstream.abs().max()).bfloat16().float()
    exact = attended(parts, upstream, torch.float64, "reference")
    half, plain = (attended(parts, upstream, dtype) for dtype in (torch.float16, torch.bfloat16))
    # The output is in bfloat16 in either case.
    assert distance(half[0], exact[0]) < distance(plain[0], exact[0]) < 1e-2
    for near, far, truth in zip(half[1:], plain[1:], exact[1:], strict=True):
        assert distance(near, truth) < 0.4 * distance(far, truth) < 1e-2
    again = attended(parts, upstream, torch.float16)
    assert all(torch.equal(*pair) for pair in zip(half, again, strict=True))
    larger = attended(parts, 2.0**20 * upstream, torch.float16)
    assert all(torch.equal(2.0**20 * one, other) for one, other in zip(half[1:], larger[1:], strict=True))


def test_the_power_of_two_of_a_gradient_that_is_not_finite_hides_nothing():
    parts, upstream = made(14, 2, 64)
    for value in (torch.inf, torch.nan):
        upstream[17, 3, 5] = value
        assert not all(torch.isfinite(found).all() for found in attended(parts, upstream, torch.float16)[1:])


@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
@pytest.mark.parametrize("biased", [False, True])
def test_the_rotation_of_float32_into_float16(heads, kv_heads, size, biased):
    tokens, results = 61, []
    tables = rotation(tokens, size, DEVICE)
    bias = head_bias(heads, kv_heads, size, DEVICE, torch.bfloat16) if biased else None
    for kernel in ("auto", "reference"):
        qkv = random(tokens, (heads + 2 * kv_heads) * size, device=DEVICE).requires_grad_()
        outputs = rope(qkv, None, *tables, heads, kv_heads, bias=bias, dtype=torch.float16, kernel=kernel)
        grads = [random(*output.shape, seed=i, device=DEVICE).half() for i, output in enumerate(outputs)]
        results.append((*outputs, torch.autograd.grad(outputs, qkv, grads)[0]))
    assert results[0][3].dtype == torch.float32
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), expected.double(), rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
def test_a_decode_step_from_projections_of_float32_captured(heads, kv_heads, size):
    lengths = torch.tensor([0, 63, 64, 700, 2, 333, 999, 1700], device=DEVICE)
    rows = CacheRows(lengths, 64, table_BN=(torch.randperm(8 * 27, device=DEVICE) + 1).view(8, 27).int())
    tables = rotation(1800, size, DEVICE)
    turns = tuple(table[lengths] for table in tables)
    qkv, bias = random(8, (heads + 2 * kv_heads) * size, device=DEVICE), head_bias(heads, kv_heads, size, DEVICE)
    k, v = (random(217, 64, kv_heads, size, seed=seed, device=DEVICE).half() for seed in (1, 2))
    wide = [k.double(), v.double()]
    exact = reference.cached_attention(
        qkv.double(), tuple(turn.double() for turn in turns), heads, kv_heads, *wide, rows, 0.1, bias=bias
    )
    for output_dtype, tolerance in ((torch.float32, 1.2e-2), (torch.bfloat16, 4e-2)):
        types = {"dtype": torch.float16, "output_dtype": output_dtype}
        for plan in (None, Plan(first=32, most=32, programs=100)):
            found = triton.cached_attention(
                qkv, turns, heads, kv_heads, k, v, rows, 0.1, None, plan, bias=bias, **types
            )
            assert found.dtype == output_dtype
            torch.testing.assert_close(found.double(), exact, rtol=0, atol=tolerance)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = triton.cached_attention(qkv, turns, heads, kv_heads, k, v, rows, 0.1, bias=bias, **types)
        graph.replay()
        torch.testing.assert_close(captured.double(), exact, rtol=0, atol=tolerance)
    for cache, stored in zip((k, v), wide, strict=True):
        torch.testing.assert_close(cache.double(), stored, rtol=2**-10, atol=1e-5)
