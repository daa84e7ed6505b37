"""Decode attention: the reference against the packed form and against float64 sums, with and without pages."""

import itertools

import numpy as np
import pytest
import torch
from op_cases import head_norms, random, rotation
from test_attention import HEADS, offsets, qkv

from qerl.kernels.attention import packed_attention
from qerl.kernels.cached_attention import CacheRows, cached_attention
from qerl.kernels.cached_attention.reference import attend
from qerl.kernels.rope import rope


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_a_step_equals_the_last_rows_of_the_packed_form(heads, kv_heads, with_norms):
    """Every token of four sequences is rotated and packed; the step gets all but the last ones in its cache."""
    lengths, longest, size = [3, 1, 7, 2], 12, 8
    projections = random(sum(lengths), (heads + 2 * kv_heads) * size)
    cu, tables = offsets(lengths), rotation(longest, size)
    positions = torch.cat([torch.arange(length) for length in lengths])
    norms = head_norms(sum(lengths), size) if with_norms else None
    q, k, v = rope(projections, positions, *tables, heads, kv_heads, norms=norms)
    # What lies beyond a row's end is left over from another sequence.
    k_cache, v_cache = (100 * torch.ones(4, longest, kv_heads, size) for _ in range(2))
    for row, (start, stop) in enumerate(itertools.pairwise(cu)):
        k_cache[row, : stop - start - 1], v_cache[row, : stop - start - 1] = k[start : stop - 1], v[start : stop - 1]
    last, before = cu[1:] - 1, torch.tensor(lengths) - 1
    if norms is not None:
        norms = head_norms(sum(lengths), size)
        object.__setattr__(norms, "k_noise", norms.k_noise[last])
    rows = CacheRows(before, longest)
    found = cached_attention(
        projections[last], tuple(t[before] for t in tables), heads, kv_heads, k_cache, v_cache, rows, 0.3, norms=norms
    )
    torch.testing.assert_close(found, packed_attention(q, k, v, cu, 0.3)[last], rtol=0, atol=2e-6)
    for cache, values in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[torch.arange(4), before], values[last])
        assert all((cache[row, length:] == 100).all() for row, length in enumerate(lengths))


def test_pages_in_any_order_are_a_sequence():
    """Rows of 7, 4 and 9 tokens in pages of 4, against softmax sums in float64."""
    lengths = [7, 4, 9]
    table = torch.tensor([[2, 7, 0], [5, 0, 0], [1, 6, 3]], dtype=torch.int32)
    q, k, v = qkv(32, 4, 2)
    q, k, v = q[:3], k.view(8, 4, 2, 8), v.view(8, 4, 2, 8)
    out = attend(q, k, v, CacheRows(torch.tensor(lengths) - 1, 4, table_BN=table), 0.3)
    for row, length in enumerate(lengths):
        places = [(table[row, t // 4], t % 4) for t in range(length)]
        for head in range(4):
            keys = np.array([k[page, offset, head // 2].numpy() for page, offset in places])
            values = np.array([v[page, offset, head // 2].numpy() for page, offset in places])
            weights = np.exp(0.3 * keys @ q[row, head].numpy())
            expected = weights @ values / weights.sum()
            assert out[row, head].numpy() == pytest.approx(expected, rel=1e-12)


def test_a_new_token_goes_to_its_row_s_page():
    table = torch.tensor([[2, 7, 0], [5, 0, 0], [1, 6, 3], [0, 0, 0]], dtype=torch.int32)
    rows = CacheRows(torch.tensor([7, 0, 9, 0]), 4, table_BN=table)
    assert rows.place_B.tolist() == [7 * 4 + 3, 5 * 4, 3 * 4 + 1, 0]
    # Without a table row b has page b, and one that is full writes to its last place again.
    assert CacheRows(torch.tensor([2, 4]), 4).place_B.tolist() == [2, 4 + 3]


def test_a_row_does_not_depend_on_the_rows_around_it_or_on_what_lies_beyond_its_length():
    q, k, v = qkv(3 * 12, 4, 2, dtype=torch.float32)
    q, k, v = q[:3], k.view(3, 12, 2, 8), v.view(3, 12, 2, 8)
    lengths = torch.tensor([5, 12, 8])
    together = attend(q, k, v, CacheRows(lengths - 1, 12), 0.3)
    for row in range(3):
        one = slice(row, row + 1)
        alone = attend(q[one], k[one, : lengths[row]], v[one, : lengths[row]], CacheRows(lengths[one] - 1, 12), 0.3)
        torch.testing.assert_close(together[one], alone, rtol=1e-6, atol=1e-6)
