"""Keys and values: what is written where, and attention over the cache against float64 sums over each token's past."""

import numpy as np
import pytest
import torch

from qerl.model.attention import PackedSequences, Rotary
from qerl.rollout.kv_cache import DecodeContext, KVCache, PrefillContext

CPU = torch.device("cpu")


def make_cache(rows=3, length=8, layers=2):
    """One page a row, and a spare one."""
    return KVCache(
        layers=layers,
        pages=rows + 1,
        page_tokens=length,
        kv_heads=2,
        head_dim=4,
        dtypes=(torch.float32,) * 2,
        device=CPU,
    )


def random_tokens(count, heads, seed):
    return torch.randn(count, heads, 4, generator=torch.Generator().manual_seed(seed))


def unrotated(tokens):
    """Rotary embedding that turns nothing."""
    return Rotary(cos_Td=torch.ones(tokens, 4), sin_Td=torch.zeros(tokens, 4), heads=4, kv_heads=2)


def attend(context, layer, *heads):
    """Output for q, k, v [T, heads, d]."""
    return context.attend(layer, torch.cat([part.flatten(1) for part in heads], dim=1), unrotated(len(heads[0])))


def last_token_attention(q_Hd, k_LKd, v_LKd):
    """float64 attention of one query over all of k; query head h reads key head h // (H / K)."""
    out = np.zeros(q_Hd.shape)
    for head in range(len(q_Hd)):
        kv = head * k_LKd.shape[1] // len(q_Hd)
        scores = k_LKd[:, kv].double().numpy() @ q_Hd[head].double().numpy() / 2.0  # sqrt(d) = 2
        weights = np.exp(scores - scores.max())
        out[head] = weights / weights.sum() @ v_LKd[:, kv].double().numpy()
    return out


def test_size_is_that_of_all_pages():
    assert make_cache(rows=3, length=8, layers=2).nbytes == 2 * 2 * (3 + 1) * 8 * 2 * 4 * 4


def test_prefill_stores_a_prompt_in_every_row_that_shares_it_and_nowhere_else():
    cache = make_cache()
    packed = PackedSequences(torch.tensor([0, 3, 5]))
    source = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    place = torch.tensor([0, 1, 2, 24, 25, 16, 17, 18])  # rows 0 and 2 share the first prompt; the second is kept aside
    context = PrefillContext(cache, packed, source, place)
    assert context.positions_T.tolist() == [0, 1, 2, 0, 1]
    q, k, v = random_tokens(5, 4, 1), random_tokens(5, 2, 2), random_tokens(5, 2, 3)
    with torch.no_grad():
        out = attend(context, 1, q, k, v)
    for slab, values in zip(cache.slabs[1], (k, v), strict=True):
        expected = torch.zeros_like(slab)
        expected[0, :3] = expected[2, :3] = values[:3]
        expected[3, :2] = values[3:]
        assert torch.equal(slab, expected)
    assert not any(slab.any() for slab in cache.slabs[0])
    for token, begin in ((2, 0), (4, 3), (3, 3)):
        expected = last_token_attention(q[token], k[begin : token + 1], v[begin : token + 1])
        assert out[token].numpy() == pytest.approx(expected, abs=1e-6)


def test_decode_attends_to_each_rows_own_past_and_its_new_token():
    cache = make_cache()
    lengths = [5, 0, 3]
    past_k, past_v = random_tokens(24, 2, 4).view(3, 8, 2, 4), random_tokens(24, 2, 5).view(3, 8, 2, 4)
    for slab, past in zip(cache.slabs[0], (past_k, past_v), strict=True):
        slab[:3] = past  # stale entries beyond each length, as a finished sequence leaves them
    q, k, v = random_tokens(3, 4, 6), random_tokens(3, 2, 7), random_tokens(3, 2, 8)
    context = DecodeContext(cache, torch.tensor(lengths), longest=5)
    assert context.positions_T.tolist() == lengths
    out = attend(context, 0, q, k, v)
    for row, length in enumerate(lengths):
        k_LKd = torch.cat((past_k[row, :length], k[row : row + 1]))
        v_LKd = torch.cat((past_v[row, :length], v[row : row + 1]))
        assert out[row].numpy() == pytest.approx(last_token_attention(q[row], k_LKd, v_LKd), abs=1e-6)
        assert torch.equal(cache.slabs[0][0][row, length], k[row])


def test_copy_takes_one_page_to_several_and_no_more_than_asked():
    cache = make_cache()
    cache.slabs[0][0][3] = 7.0
    cache.copy(torch.tensor([3]), torch.tensor([0, 2]), 5)
    assert cache.slabs[0][0][:, :, 0, 0].tolist() == [
        [7.0] * 5 + [0.0] * 3,
        [0.0] * 8,
        [7.0] * 5 + [0.0] * 3,
        [7.0] * 8,
    ]


def test_decode_reads_and_writes_the_pages_of_the_table():
    """Rows of 6, 4 and 0 tokens in pages of 4, scattered: the same as with a page a row."""
    lengths, table = [6, 4, 0], torch.tensor([[5, 2, 0], [1, 4, 0], [6, 0, 0]], dtype=torch.int32)
    paged, whole = make_cache(rows=7, length=4), make_cache(rows=3, length=12)
    past_k, past_v = random_tokens(36, 2, 4).view(3, 12, 2, 4), random_tokens(36, 2, 5).view(3, 12, 2, 4)
    for kind, past in enumerate((past_k, past_v)):
        whole.slabs[0][kind][:3] = past
        for row in range(3):
            for place, page in enumerate(table[row].tolist()):
                if page:
                    paged.slabs[0][kind][page] = past[row, 4 * place : 4 * place + 4]
    q, k, v = random_tokens(3, 4, 6), random_tokens(3, 2, 7), random_tokens(3, 2, 8)
    expected = attend(DecodeContext(whole, torch.tensor(lengths), longest=6), 0, q, k, v)
    context = DecodeContext(paged, torch.tensor(lengths), table_BN=table)
    assert context.positions_T.tolist() == lengths
    torch.testing.assert_close(attend(context, 0, q, k, v), expected, rtol=1e-6, atol=1e-6)
    for row, length in enumerate(lengths):
        page = table[row, length // 4]
        assert torch.equal(paged.slabs[0][1][page, length % 4], v[row])


def test_a_row_whose_page_is_full_writes_to_its_last_place_and_to_no_other_row():
    cache = make_cache(rows=2, length=3)
    context = DecodeContext(cache, torch.tensor([3, 1]), longest=3)
    attend(context, 0, random_tokens(2, 4, 1), random_tokens(2, 2, 2), random_tokens(2, 2, 3))
    assert cache.slabs[0][0].abs().sum((2, 3)).gt(0).tolist() == [
        [False] * 2 + [True],
        [False, True, False],
        [False] * 3,
    ]
