"""Attention against loops in float64, on ragged batches."""

import math

import pytest
import torch

from qerl.kernels.attention import KeySpans, Repeats, packed_attention, repeat_prefixes

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


def spans(key_lengths):
    return KeySpans(cu_keys_S1=offsets(key_lengths), lengths=tuple(key_lengths))


@pytest.mark.parametrize(("lengths", "key_lengths"), [([3, 2], [3, 5]), ([4], [9]), ([1, 5, 2, 3], [6, 5, 4, 10])])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_a_sequence_with_more_keys_than_tokens_is_the_end_of_a_whole_one(lengths, key_lengths, heads, kv_heads):
    q, k, v = qkv(sum(key_lengths), heads, kv_heads)
    whole = by_loops(q, k, v, key_lengths, 0.3)
    stops = offsets(key_lengths)[1:].tolist()
    ends = torch.cat([torch.arange(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)])
    out = packed_attention(q[ends], k, v, offsets(lengths), 0.3, keys=spans(key_lengths))
    torch.testing.assert_close(out, whole[ends], rtol=1e-12, atol=1e-12)


def test_gradients_reach_keys_before_the_tokens():
    q, k, v = (t.requires_grad_() for t in qkv(9, 4, 2, size=4))
    assert torch.autograd.gradcheck(
        lambda q, k, v: packed_attention(q[:5], k, v, offsets([2, 3]), 0.5, keys=spans([3, 6])), (q, k, v)
    )


def test_keys_of_a_prompt_are_repeated_and_their_gradients_added():
    """A prompt of two tokens (0, 1) with answers of two (2, 3) and one (4); then one of one token (5) with one answer (6)."""
    repeats = Repeats(
        source_U=torch.tensor([0, 1, 0, 1, 2, 3, 0, 1, 4, 5, 5, 6]),
        own_T=torch.tensor([0, 1, 4, 5, 8, 9, 11]),
        prompt_R=torch.tensor([0, 1, 5]),
        copies_RC=torch.tensor([[2, 6], [3, 7], [10, 0]]),
        real_RC=torch.tensor([[True, True], [True, True], [True, False]]),
    )
    k, v = (t.requires_grad_() for t in qkv(7, 2, 1, size=3)[1:])
    repeated = repeat_prefixes(k, v, repeats)
    assert torch.equal(repeated[0], k[repeats.source_U]) and torch.equal(repeated[1], v[repeats.source_U])
    assert torch.autograd.gradcheck(lambda k, v: repeat_prefixes(k, v, repeats), (k, v))
