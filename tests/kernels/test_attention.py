"""Attention against loops in float64, on ragged batches."""

import math

import pytest
import torch

from qerl.kernels.attention import packed_attention

LENGTHS = [[1], [5, 5, 5], [3, 1, 7, 2], [1, 9]]
HEADS = [(4, 4), (4, 2), (6, 1), (6, 3)]


def qkv(tokens, heads, kv_heads, size=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads, size), (tokens, kv_heads, size), (tokens, kv_heads, size)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def by_loops(q_THd, k_TKd, v_TKd, lengths, scale):
    """Token by token and head by head, as the definition says."""
    out, start = torch.zeros_like(q_THd), 0
    group = q_THd.shape[1] // k_TKd.shape[1]
    for length in lengths:
        for t in range(start, start + length):
            for head in range(q_THd.shape[1]):
                keys, values = (x[start : t + 1, head // group] for x in (k_TKd, v_TKd))
                scores = [scale * float(q_THd[t, head] @ key) for key in keys]
                weights = [math.exp(score - max(scores)) for score in scores]
                out[t, head] = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        start += length
    return out


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_packed_equals_loops(lengths, heads, kv_heads):
    tensors = qkv(sum(lengths), heads, kv_heads)
    out = packed_attention(*tensors, offsets(lengths), 0.3)
    torch.testing.assert_close(out, by_loops(*tensors, lengths, 0.3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_packed_in_lower_precision_stays_near(dtype, tolerance):
    tensors = qkv(13, 4, 2, dtype=dtype)
    out = packed_attention(*tensors, offsets([3, 1, 7, 2]), 0.3)
    assert out.dtype == dtype
    exact = by_loops(*(t.double() for t in tensors), [3, 1, 7, 2], 0.3)
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


def test_packed_gradients_match_finite_differences():
    tensors = [t.requires_grad_() for t in qkv(8, 4, 2, size=4)]
    assert torch.autograd.gradcheck(lambda q, k, v: packed_attention(q, k, v, offsets([3, 1, 4]), 0.5), tensors)


def test_a_sequence_sees_nothing_of_its_neighbours():
    q, k, v = qkv(10, 4, 2)
    before = packed_attention(q, k, v, offsets([4, 6]), 0.3)[:4]
    k[4:], v[4:] = 1e3, -1e3
    assert torch.equal(packed_attention(q, k, v, offsets([4, 6]), 0.3)[:4], before)


def test_no_token_sees_the_future():
    q, k, v = qkv(6, 2, 2)
    before = packed_attention(q, k, v, offsets([6]), 0.3)[:5]
    k[5], v[5] = 50.0, 50.0
    torch.testing.assert_close(packed_attention(q, k, v, offsets([6]), 0.3)[:5], before, rtol=1e-13, atol=0)
