"""Decode attention: the reference against the packed form and against float64 sums, with and without pages."""

import itertools

import numpy as np
import pytest
import torch
from test_attention import HEADS, offsets, qkv

from qerl.kernels.attention import packed_attention
from qerl.kernels.cached_attention import cached_attention


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_decoding_equals_the_last_rows_of_the_packed_form(heads, kv_heads):
    lengths, longest = [3, 1, 7, 2], 12
    q, k, v = qkv(sum(lengths), heads, kv_heads)
    cu = offsets(lengths)
    # What lies beyond a row's length is left over from another sequence.
    k_cache, v_cache = (100 * torch.ones(4, longest, kv_heads, 8, dtype=torch.float64) for _ in range(2))
    for row, (start, stop) in enumerate(itertools.pairwise(cu)):
        k_cache[row, : stop - start], v_cache[row, : stop - start] = k[start:stop], v[start:stop]
    decoded = cached_attention(q[cu[1:] - 1], k_cache, v_cache, torch.tensor(lengths), 0.3)
    torch.testing.assert_close(decoded, packed_attention(q, k, v, cu, 0.3)[cu[1:] - 1], rtol=1e-12, atol=1e-12)


def test_pages_in_any_order_are_a_sequence():
    """Rows of 7, 4, 9 and 0 tokens in pages of 4, against softmax sums in float64."""
    lengths = [7, 4, 9, 0]
    table = torch.tensor([[2, 7, 0], [5, 0, 0], [1, 6, 3], [0, 0, 0]], dtype=torch.int32)
    q, k, v = qkv(32, 4, 2)
    q, k, v = q[:4], k.view(8, 4, 2, 8), v.view(8, 4, 2, 8)
    out = cached_attention(q, k, v, torch.tensor(lengths), 0.3, table_BN=table)
    for row, length in enumerate(lengths[:3]):
        places = [(table[row, t // 4], t % 4) for t in range(length)]
        for head in range(4):
            keys = np.array([k[page, offset, head // 2].numpy() for page, offset in places])
            values = np.array([v[page, offset, head // 2].numpy() for page, offset in places])
            weights = np.exp(0.3 * keys @ q[row, head].numpy())
            expected = weights @ values / weights.sum()
            assert out[row, head].numpy() == pytest.approx(expected, rel=1e-12)


def test_a_row_does_not_depend_on_the_rows_around_it_or_on_what_lies_beyond_its_length():
    q, k, v = qkv(3 * 12, 4, 2, dtype=torch.float32)
    q, k, v = q[:3], k.view(3, 12, 2, 8), v.view(3, 12, 2, 8)
    lengths = torch.tensor([5, 12, 8])
    together = cached_attention(q, k, v, lengths, 0.3)
    for row in range(3):
        one = slice(row, row + 1)
        alone = cached_attention(q[one], k[one, : lengths[row]], v[one, : lengths[row]], lengths[one], 0.3)
        torch.testing.assert_close(together[one], alone, rtol=1e-6, atol=1e-6)


def test_an_empty_row_gives_zeros():
    q, k, v = qkv(24, 4, 2, dtype=torch.float32)
    out = cached_attention(q[:2], k.view(2, 12, 2, 8), v.view(2, 12, 2, 8), torch.tensor([0, 3]), 0.3)
    assert torch.equal(out[0], torch.zeros(4, 8))
    assert out[1].abs().sum() > 0
