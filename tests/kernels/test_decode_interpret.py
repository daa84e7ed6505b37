"""The Triton kernels of a decode step in the interpreter: attention over pages, drawing of tokens, keyed numbers, the rows' books."""

import math

import pytest
import torch
import triton_cpu  # noqa: F401 - prepares the interpreter, before any kernel module
from op_cases import head_bias, head_norms, rotation

from qerl.kernels import philox
from qerl.kernels.cached_attention import FP8, CacheRows, SharedPages
from qerl.kernels.cached_attention import reference as attention_reference
from qerl.kernels.cached_attention import triton as attention
from qerl.kernels.cached_attention.plan import LEAST_TILES, LONG_TILES, Plan, members_for, plan_for
from qerl.kernels.cached_attention.storage import raw
from qerl.kernels.sampling import reference as sampling_reference
from qerl.kernels.sampling import triton as sampling

pytestmark = pytest.mark.interpret

ATTENTION_TOLERANCE = 1e-6
"""float32, sums in another order; measured: 2.4e-7."""
LOGPROB_TOLERANCE = 2e-6
"""Sums of blocks in float32, of a row in float64; measured: 5e-7."""


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


PLANS = {
    "whole": Plan(first=1, most=1, programs=20),
    "halves": Plan(first=2, most=2, programs=3),
    "tiles": Plan(first=8, most=8, programs=1),
    "eights": Plan(first=1, most=20, programs=25),
}


FORMS = ("plain", "norms", "bias")


def paired(plans, shapes):
    """Every plan with every shape, and every form with each plan and with each shape: two choices at a time, not all three."""
    return [(plan, *shape, FORMS[(i + j) % 3]) for i, plan in enumerate(plans) for j, shape in enumerate(shapes)]


@pytest.fixture
def short_parts(monkeypatch):
    """Parts of one tile, so that contexts of a few tiles have several."""
    monkeypatch.setattr(attention, "LEAST_TILES", 1)
    monkeypatch.setattr(attention, "LONG_TILES", 1)


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize(
    ("plan", "heads", "kv_heads", "size", "form"), paired(PLANS, [(6, 2, 16), (7, 1, 24), (40, 2, 8)])
)
def test_attention_over_pages_however_contexts_are_cut(plan, heads, kv_heads, size, form):
    table = torch.tensor([[3, 1, 2], [4, 5, 0], [6, 0, 0], [7, 8, 9], [0, 0, 0]], dtype=torch.int32)
    lengths = torch.tensor([130, 65, 3, 191, 0])
    qkv, norms = normal(5, (heads + 2 * kv_heads) * size), head_norms(5, size) if form == "norms" else None
    turns = tuple(table[lengths] for table in rotation(200, size))
    bias = head_bias(heads, kv_heads, size) if form == "bias" else None
    larger = 1 if bias is None else 3  # by the bias
    k, v = normal(10, 64, kv_heads, size, seed=1), normal(10, 64, kv_heads, size, seed=2)
    # What lies beyond a row's length is not even read: a NaN there must not matter.
    k[2, 2:], v[2, 2:], k[5, 1:] = math.nan, math.nan, math.nan
    rows = CacheRows(lengths, 64, table_BN=table)
    found = (k.clone(), v.clone())
    out = attention.cached_attention(qkv, turns, heads, kv_heads, *found, rows, 0.25, norms, PLANS[plan], bias=bias)
    expected = (k.nan_to_num(), v.nan_to_num())
    whole = attention_reference.cached_attention(qkv, turns, heads, kv_heads, *expected, rows, 0.25, norms, bias=bias)
    torch.testing.assert_close(out, whole, rtol=0, atol=larger * ATTENTION_TOLERANCE)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.nan_to_num(), other, rtol=0, atol=larger * 1e-6)
    again = attention.cached_attention(qkv, turns, heads, kv_heads, *found, rows, 0.25, norms, PLANS[plan], bias=bias)
    assert torch.equal(again, out), "the count of parts that have ended is back at 0"


def long_and_short(size, kv_heads):
    """Rows of 1150, 3, 640 and 0 tokens: 18, 1, 10 and no tiles."""
    lengths = torch.tensor([1150, 3, 640, 0])
    table = torch.zeros(4, 20, dtype=torch.int32)
    table[0, :18], table[1, 0], table[2, :11], table[3, 0] = torch.arange(18), 18, 19 + torch.arange(11), 30
    turns = tuple(table[lengths] for table in rotation(1200, size))
    k, v = normal(31, 64, kv_heads, size, seed=1), normal(31, 64, kv_heads, size, seed=2)
    return lengths, table, turns, k, v


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("programs", [1, 7, 40, 80])
def test_eighteen_parts_are_joined_in_two_turns_and_a_row_keeps_its_bits_in_any_batch(programs):
    lengths, table, turns, k, v = long_and_short(16, 2)
    qkv, plan = normal(4, 10 * 16), Plan(first=1, most=64, programs=programs)
    out = attention.cached_attention(qkv, turns, 6, 2, k, v, CacheRows(lengths, 64, table_BN=table), 0.25, None, plan)
    wide = [tensor.double() for tensor in (qkv, k, v)]
    rows = CacheRows(lengths, 64, table_BN=table)
    exact = attention_reference.cached_attention(
        wide[0], tuple(turn.double() for turn in turns), 6, 2, *wide[1:], rows, 0.25
    )
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=ATTENTION_TOLERANCE)
    order = torch.tensor([2, 0])
    fewer = CacheRows(lengths[order], 64, table_BN=table[order])
    some = attention.cached_attention(
        qkv[order], tuple(turn[order] for turn in turns), 6, 2, k, v, fewer, 0.25, None, plan
    )
    assert torch.equal(some, out[order])


def groups(members, pages, columns):
    """Groups of rows [[row, ...], ...] that share their first pages, as the kernel takes them; the last group has no rows."""
    padded = [[*rows, *[-1] * (columns - len(rows))] for rows in [*members, []]]
    return SharedPages(
        pages_B=torch.tensor(pages, dtype=torch.int32),
        members_CM=torch.tensor(padded, dtype=torch.int32),
        likely_groups=2,
    )


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize(
    ("plan", "heads", "kv_heads", "columns", "form"),
    paired(("whole", "tiles", "eights"), [(6, 2, 16), (7, 1, 8), (40, 2, 2)]),
)
def test_pages_that_rows_share_may_be_read_once_for_all_of_them(monkeypatch, heads, kv_heads, columns, plan, form):
    monkeypatch.setattr(attention, "_processors", lambda device: 5)
    assert members_for(heads, kv_heads) == columns
    size, lengths = 16, torch.tensor([130, 65, 64, 131, 200, 192, 70])
    table = torch.tensor(
        [[3, 1, 2, 0], [4, 5, 0, 0], [6, 7, 0, 0], [3, 1, 8, 0], [9, 10, 11, 12], [9, 10, 11, 13], [4, 14, 0, 0]],
        dtype=torch.int32,
    )
    qkv, norms = normal(7, (heads + 2 * kv_heads) * size), head_norms(7, size) if form == "norms" else None
    bias = head_bias(heads, kv_heads, size) if form == "bias" else None
    larger = 1 if bias is None else 3  # by the bias
    turns = tuple(table[lengths] for table in rotation(201, size))
    k, v = normal(15, 64, kv_heads, size, seed=1), normal(15, 64, kv_heads, size, seed=2)
    shared = groups([[0, 3], [5, 4], [6, 1]], [2, 1, 0, 2, 3, 3, 1], columns)
    caches = [(k.clone(), v.clone()) for _ in range(2)]
    rows, plain = CacheRows(lengths, 64, table_BN=table, shared=shared), CacheRows(lengths, 64, table_BN=table)
    found = attention.cached_attention(
        qkv, turns, heads, kv_heads, *caches[0], rows, 0.25, norms, PLANS[plan], bias=bias
    )
    expected = attention_reference.cached_attention(
        qkv, turns, heads, kv_heads, *caches[1], plain, 0.25, norms, bias=bias
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=larger * ATTENTION_TOLERANCE)
    torch.testing.assert_close(caches[0], caches[1], rtol=0, atol=larger * 1e-6)
    # Others in the group, or rows that have left it.
    alone = CacheRows(lengths, 64, table_BN=table, shared=groups([[3], [4], [1]], [0, 1, 0, 2, 3, 0, 0], columns))
    again = attention.cached_attention(
        qkv, turns, heads, kv_heads, *caches[0], alone, 0.25, norms, PLANS[plan], bias=bias
    )
    torch.testing.assert_close(again, expected, rtol=0, atol=larger * ATTENTION_TOLERANCE)


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("together", [False, True])
def test_attention_of_float16_from_projections_of_float32(together, form):
    """Within float16's rounding of float64, and what is stored within one rounding."""
    heads, kv_heads, size, lengths = 7, 1, 16, torch.tensor([130, 65, 64, 131, 3])
    table = torch.tensor([[3, 1, 2], [4, 5, 0], [6, 7, 0], [3, 1, 8], [9, 0, 0]], dtype=torch.int32)
    qkv, norms = normal(5, (heads + 2 * kv_heads) * size), head_norms(5, size) if form == "norms" else None
    bias = head_bias(heads, kv_heads, size) if form == "bias" else None
    turns = tuple(table[lengths] for table in rotation(200, size))
    k, v = (normal(10, 64, kv_heads, size, seed=seed).half() for seed in (1, 2))
    shared = groups([[0, 3]], [2, 0, 0, 2, 0], members_for(heads, kv_heads)) if together else None
    rows, plain = CacheRows(lengths, 64, table_BN=table, shared=shared), CacheRows(lengths, 64, table_BN=table)
    found, wide = (k.clone(), v.clone()), (k.double(), v.double())
    out = attention.cached_attention(
        qkv, turns, heads, kv_heads, *found, rows, 0.25, norms, PLANS["halves"], bias=bias,
        dtype=torch.float16, output_dtype=torch.float32,
    )  # fmt: skip
    exact = attention_reference.cached_attention(
        qkv.double(), tuple(turn.double() for turn in turns), heads, kv_heads, *wide, plain, 0.25, norms, bias=bias
    )
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=4e-3 if bias is not None else 1.5e-3)
    for one, other in zip(found, wide, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2**-11, atol=1e-6)


@pytest.mark.parametrize("dtypes", [(torch.float32, FP8), (FP8, FP8)])
def test_attention_over_keys_and_values_in_fp8(dtypes):
    table = torch.tensor([[3, 1, 2], [4, 5, 0], [6, 0, 0]], dtype=torch.int32)
    # Triton's interpreter rounds to FP8 wrongly where a mantissa overflows, so new keys and values are given rounded and unturned.
    lengths, qkv = torch.tensor([130, 64, 0]), normal(3, 8 * 16).to(FP8).float()
    qkv[2, 4 * 16 :] = 1000.0  # too large a key and value: it saturates
    turns = torch.ones(3, 16), torch.zeros(3, 16)
    k, v = normal(7, 64, 2, 16, seed=1).to(dtypes[0]), normal(7, 64, 2, 16, seed=2).to(dtypes[1])
    rows, caches = CacheRows(lengths, 64, table_BN=table), [(k.clone(), v.clone()) for _ in range(2)]
    found = attention.cached_attention(qkv, turns, 4, 2, *caches[0], rows, 0.25, None, PLANS["halves"])
    expected = attention_reference.cached_attention(qkv, turns, 4, 2, *caches[1], rows, 0.25)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    assert found[2].max() == found[2].min() == 448
    for one, other in zip(*caches, strict=True):
        assert torch.equal(raw(one), raw(other))


def test_attention_without_a_table():
    qkv, lengths = normal(3, 8 * 16), torch.tensor([99, 63, 100])
    turns = tuple(table[lengths] for table in rotation(101, 16))
    caches = [[normal(4, 100, 2, 16, seed=seed) for seed in (1, 2)] for _ in range(2)]
    found = attention.cached_attention(
        qkv, turns, 4, 2, *caches[0], CacheRows(lengths, 100), 0.25, None, PLANS["halves"]
    )
    expected = attention_reference.cached_attention(qkv, turns, 4, 2, *caches[1], CacheRows(lengths, 100), 0.25)
    torch.testing.assert_close(found, expected, rtol=0, atol=ATTENTION_TOLERANCE)
    torch.testing.assert_close(caches[0], caches[1], rtol=0, atol=1e-6)


def tiles_of_parts(tiles, plan):
    """Tiles of a part by the rule of `device.part_tiles`, told in integers."""
    return max(-(-tiles // plan.most), LEAST_TILES, min(-(-tiles // plan.first), LONG_TILES))


@pytest.mark.parametrize("rows", [1, 2, 8, 24, 32, 64, 96, 256, 512])
def test_parts_fill_the_device_and_no_row_has_more_than_it_has_room_for(rows):
    plan = plan_for(rows, 4, 132, 513)
    parts = [-(-tiles // tiles_of_parts(tiles, plan)) for tiles in range(1, 514)]
    assert max(parts) <= plan.most
    # A batch of long contexts has a part for every place on the device, or one as long as is good for it.
    assert parts[-1] * rows * 4 >= 264 * 0.75 or parts[-1] >= 513 // LONG_TILES
    # Where rows fill the device, contexts of up to a thousand tokens are whole.
    if rows * 4 > 264:
        assert set(parts[:LONG_TILES]) == {1}
    short = plan_for(rows, 4, 132, 16)
    assert short.most <= 8
    assert plan_for(rows, 4, 132, 1).most == 1


@pytest.mark.parametrize("rows", [72, 96, 128, 256, 512])
def test_many_rows_of_at_most_two_thousand_tokens_are_never_cut(rows):
    """What is not cut has a leaner kernel: a launch without sums in memory, with a program for each row and head."""
    plan = plan_for(rows, 4, 132, LONG_TILES)
    assert plan == Plan(first=1, most=1, programs=4 * rows)
    assert plan_for(rows, 4, 132, LONG_TILES + 1).most > 1


def test_one_long_context_is_cut_finely_however_many_short_ones_stand_beside_it():
    assert plan_for(1, 4, 132, 513) == Plan(first=64, most=64, programs=256)
    assert plan_for(64, 4, 132, 513).programs == 264
    assert plan_for(256, 4, 132, 513).programs == 1024
    for rows in (8, 64):
        assert -(-512 // tiles_of_parts(512, plan_for(rows, 4, 132, 513))) == 16


@pytest.mark.parametrize("vocabulary", [57, 128, 389, 4000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_and_logprobs_are_those_of_the_reference(vocabulary, temperature):
    logits = 3 * normal(24, vocabulary)
    logits[0, :50] = -math.inf
    logits[2, ::2] = -math.inf
    logits[3, 5] = logits[3].max()  # a tie at the top
    logits[4, 1:] = -math.inf
    uniforms = torch.rand(24, generator=torch.Generator().manual_seed(3)).clamp(0.001, 0.999)
    before = logits.clone()
    for chosen in (uniforms, None):
        tokens, logprobs = sampling.draw_token(logits, chosen, temperature)
        expected_tokens, expected = sampling_reference.draw_token(logits, chosen, temperature)
        assert torch.equal(tokens, expected_tokens)
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=LOGPROB_TOLERANCE)
    assert torch.equal(logits, before)


TRUNCATIONS = [
    {"top_k": 1},
    {"top_k": 17},
    {"top_k": 5000},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.999999},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
]


@pytest.mark.parametrize("given", TRUNCATIONS, ids=str)
@pytest.mark.parametrize(("vocabulary", "temperature"), [(57, 1.0), (389, 0.7), (5000, 1.3)])
def test_truncations_keep_what_the_reference_keeps(vocabulary, temperature, given):
    logits = 3 * normal(6, vocabulary)
    logits[0, :50] = -math.inf
    logits[1] = (logits[1] / 2).round()  # ties everywhere
    logits[2] = -1e4 - logits[2].abs()
    logits[3] = 0.0
    before = logits.clone()
    found, share = sampling.truncate(logits, temperature, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0} | given)
    expected, whole = sampling_reference.truncate(
        logits, temperature, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0} | given
    )
    # Where a sum is within rounding of p, a token more or less may be kept.
    differ = (found != expected).sum(1)
    assert differ.sum() <= (1 if given.get("top_p") else 0)
    torch.testing.assert_close(share[differ == 0], whole[differ == 0], rtol=0, atol=LOGPROB_TOLERANCE)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("kept", "given"),
    [({1}, {"top_p": 0.5}), ({1, 3}, {"top_p": 0.51}), ({0, 1, 3}, {"top_p": 0.8}), ({1, 3}, {"top_k": 2})],
)
def test_of_equal_tokens_at_the_edge_the_first_are_kept(kept, given):
    logits = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log()
    found, share = sampling.truncate(logits, 1.0, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0} | given)
    assert set(torch.isfinite(found[0]).nonzero()[:, 0].tolist()) == kept
    assert share.item() == pytest.approx(math.log(sum(math.exp(logits[0, token]) for token in kept)), abs=1e-6)


@pytest.mark.parametrize("uniform", [2.0**-24, 1e-6, 0.5, 1 - 1e-6, 1 - 2.0**-24])
def test_a_drawn_token_holds_its_number_within_rounding_and_is_possible(uniform):
    logits = 3 * normal(16, 700, seed=5)
    logits[::2, 600:] = -math.inf
    logits[1::2, :200] = -math.inf
    tokens, logprobs = sampling.draw_token(logits, torch.full((16,), uniform), 0.8)
    ends = torch.softmax(logits.double() / 0.8, -1).cumsum(-1).gather(-1, tokens[:, None])[:, 0]
    mass = torch.softmax(logits.double() / 0.8, -1).gather(-1, tokens[:, None])[:, 0]
    assert (mass > 0).all()
    assert (ends - mass - 1e-6 <= uniform).all()
    assert (uniform <= ends + 1e-6).all()
    torch.testing.assert_close(logprobs.double(), mass.log(), rtol=0, atol=LOGPROB_TOLERANCE)


def test_a_temperature_in_device_memory_and_a_nan():
    logits, uniforms = normal(3, 300), torch.tensor([0.2, 0.5, 0.9])
    logits[1, 7] = math.nan
    tokens, logprobs = sampling.draw_token(logits, uniforms, torch.tensor([0.7], dtype=torch.float64))
    expected_tokens, expected = sampling_reference.draw_token(logits, uniforms, 0.7)
    assert tokens[[0, 2]].tolist() == expected_tokens[[0, 2]].tolist()
    assert 0 <= tokens[1] < 300
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=LOGPROB_TOLERANCE, equal_nan=True)
    assert logprobs[1].isnan()


def test_keyed_numbers_have_the_bits_of_philox():
    keys, positions = torch.arange(200) * 1_000_003 % (1 << 32), torch.arange(200)
    key_3 = torch.tensor([*philox.stream_key(7, "sample"), 41])
    expected = philox.uniform_at(7, "sample", positions, keys, 41, 0)
    assert torch.equal(sampling.keyed_uniforms(key_3, positions, keys), expected)
    assert torch.equal(sampling_reference.keyed_uniforms(key_3, positions, keys), expected)


def make_books():
    rows = 9
    return {
        "last_token_R": torch.arange(rows),
        "length_R": 3 * torch.arange(rows),
        "count_R": torch.arange(rows),
        "limit_R": torch.full((rows,), 4),
        "alive_R": torch.tensor([1, 1, 0, 1, 0, 1, 1, 1, 1]),
        "cursor_1": torch.tensor([1]),
        "eos_E": torch.tensor([11, 12]),
        "tokens_WR": torch.zeros(3, rows, dtype=torch.int32),
        "logprobs_2WR": torch.zeros(2, 3, rows),
    }


def test_the_books_are_kept_as_the_reference_keeps_them():
    tokens, behavior, sampler = torch.tensor([10, 11, 12, 13, 14, 10]), normal(6), normal(6, seed=1)
    found, expected = make_books(), make_books()
    sampling.advance_rows(tokens, behavior, sampler, **found)
    sampling_reference.advance_rows(tokens, behavior, sampler, **expected)
    alive = expected["tokens_WR"] >= 0
    for name, tensor in expected.items():
        if name == "logprobs_2WR":
            assert torch.equal(found[name][:, alive], tensor[:, alive])
        else:
            assert torch.equal(found[name], tensor), name
    assert expected["alive_R"].tolist() == [1, 0, 0, 0, 0, 0, 1, 1, 1]
    assert expected["tokens_WR"][1].tolist() == [10, 11, -1, 13, -1, 10, 0, 0, 0]
    assert expected["cursor_1"].tolist() == [2]
