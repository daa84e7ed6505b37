"""Which rows read which pages together: the groups that steps are told of, while answers of all lengths start, move and end."""

import pytest
from rollout_builders import EOS_IDS, PAGE, PAGE_BYTES, load_tiny, make_prompts

from qerl.errors import ConfigError
from qerl.kernels.cached_attention import reference
from qerl.model.aqn import NoiseState
from qerl.model.tokenizer import load_tokenizer
from qerl.records import SamplingSpec
from qerl.rollout import together
from qerl.rollout.engine import Engine
from qerl.rollout.pages import PageBook
from qerl.rollout.sequence import Sequence
from qerl.rollout.workspace import Layout, Workspace

SPEC = SamplingSpec(max_new_tokens=18, seed=4)


@pytest.fixture
def steps(monkeypatch):
    """Rows in groups of every step, as the kernel was given them, all of them checked; None where there was nothing of groups."""
    seen, last, plain = [], [None], reference.cached_attention

    def watched(qkv_BX, rotation, heads, kv_heads, k_cache, v_cache, rows, scale, norms=None, **more):
        if last[0] is not rows:
            last[0] = rows
            seen.append(None if rows.shared is None else check(rows))
        return plain(qkv_BX, rotation, heads, kv_heads, k_cache, v_cache, rows, scale, norms, **more)

    for name, value in (("LEAST_ROWS", 2), ("LEAST_PAGES", 2), ("LEAST_SPARED", 1)):
        monkeypatch.setattr(together, name, value)
    monkeypatch.setattr(reference, "cached_attention", watched)
    return seen


def check(rows):
    """How many rows are in groups. Members of a group have its pages in common, tokens in all of them, and each row is in at most one group."""
    pages_B, lengths_B = rows.shared.pages_B, rows.lengths_B
    members = []
    for line in rows.shared.members_CM.tolist():
        group = [row for row in line if row >= 0]
        assert line[: len(group)] == group, "members come first"
        assert len(group) != 1
        members += group
        for row in group:
            assert pages_B[row] == pages_B[group[0]] >= 2
            assert rows.table_BN[row, : pages_B[row]].tolist() == rows.table_BN[group[0], : pages_B[row]].tolist()
            assert lengths_B[row] >= pages_B[row] * PAGE
    assert len(set(members)) == len(members)
    assert sorted(members) == pages_B.nonzero()[:, 0].tolist()
    return len(members)


def noise_of(model, scope):
    sites = ("attn_norm", "mlp_norm")
    return NoiseState(seed=1, rollout=2, stage=1, sigma=0.3, group_size=5, scope=scope, sites=sites).materialize(model)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("rows", [3, 8, 40])
@pytest.mark.parametrize("pages", [None, 30])
@pytest.mark.parametrize("ahead", [0, 1])
def test_groups_follow_rows_as_they_start_move_and_end(qwen2_folder, steps, rows, pages, ahead):
    model, tokenizer = load_tiny(qwen2_folder), load_tokenizer(qwen2_folder)
    prompts = make_prompts((20, 3, 33, 9, 17, 24))
    expected, _ = Engine(model, tokenizer).generate(prompts, SPEC, group_size=5)
    engine = Engine(
        model,
        tokenizer,
        max_num_seqs=rows,
        paged=True,
        read_together=True,
        window=3,
        kv_bytes=pages and pages * PAGE_BYTES,
    )
    engine.buckets, engine.ahead = (2, 4, 8, 16, 40), ahead
    found, _ = engine.generate(prompts, SPEC, group_size=5)
    assert [completion.token_ids for completion in found] == [completion.token_ids for completion in expected]
    assert len(set(steps)) > 2
    assert max(filter(None, steps)) >= 2


@pytest.mark.usefixtures("small_pages")
def test_prompts_that_are_short_or_not_shared_are_not_read_together(qwen2_folder, steps):
    model, tokenizer = load_tiny(qwen2_folder), load_tokenizer(qwen2_folder)
    engine = Engine(model, tokenizer, max_num_seqs=8, paged=True, read_together=True)
    for lengths, group, noise in (((4, 4), 4, None), ((30, 30), 1, None), ((30, 30), 4, noise_of(model, "response"))):
        engine.generate(make_prompts(lengths), SPEC, group_size=group, noise=noise)
    assert set(steps) == {None}
    engine.generate(make_prompts((30, 30)), SPEC, group_size=4, noise=noise_of(model, "rollout"))
    assert max(filter(None, steps)) == 8


def sequences_of(*groups, apart=False):
    """(tokens of a prompt, its answers) each; ``apart``: noise gives every answer a prompt of its own."""
    keys = [(prompt, length) for prompt, (length, answers) in enumerate(groups) for _ in range(answers)]
    return [
        Sequence(index=index, prompt_index=prompt, prompt_length=length, sample_key=index, prefix_key=index * apart)
        for index, (prompt, length) in enumerate(keys)
    ]


@pytest.mark.parametrize(
    ("groups", "reads"),
    [
        # 16 full pages of 64 stored tokens, of which a row of eight is spared 14; the last token of a prompt is not stored.
        ([(1025, 8)] * 8, True),
        ([(1024, 8)] * 8, False),
        # A group of 16 is read in two parts, so a row is spared as much as in one of 8.
        ([(1025, 16)] * 8, True),
        # Twelve pages a row: two answers spare each other half of a prompt, three two thirds.
        ([(1537, 2)] * 40, True),
        ([(1536, 2)] * 40, False),
        ([(1153, 3)] * 40, True),
        ([(1152, 3)] * 40, False),
        ([(8000, 1)] * 64, False),
        # On average over all answers of the call; a prompt below 16 pages spares nothing.
        ([(2049, 8), (100, 8)] * 8, True),
        ([(2049, 8), (100, 8), (1000, 8)] * 8, False),
    ],
    ids=str,
)
def test_prompts_are_read_together_where_rows_are_spared_enough(groups, reads):
    assert together.pays(sequences_of(*groups), 8, 64) is reads
    assert not together.pays(sequences_of(*groups, apart=True), 8, 64)


def test_large_groups_are_cut_evenly_and_single_rows_left_out():
    book = PageBook(pages=100, page_tokens=4, rows=16)
    book.start(range(9), 13, prefill=True, keep=False)
    book.start([9], 20, prefill=True, keep=False)
    book.start([10, 11], 7, prefill=True, keep=False)
    assert book.groups(4, 1) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [10, 11]]
    assert book.groups(8, 2) == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
    for row in (1, 2, 11):
        book.release(row)
    book.move(8, 1)
    assert book.groups(8, 1) == [[0, 1, 3, 4, 5, 6, 7]]
    assert book.shared[1] == 3
    assert book.shared[8] == 0


def test_steps_of_many_rows_are_captured_for_short_contexts_and_for_all(qwen2_folder):
    """Two key/value heads: 144 rows are many."""
    model = load_tiny(qwen2_folder)

    def keys(rows, *, whole_table=False):
        layout = Layout(
            rows=160,
            pages=161,
            page_tokens=64,
            columns=40,
            window=8,
            buckets=None,
            graphs=False,
            kv_dtypes=(model.dtype,) * 2,
            whole_table=whole_table,
        )
        space = Workspace(model, EOS_IDS, layout, model.device)
        return [space.graph_key(rows, longest) for longest in (9, 2048, 2049, 2500)]

    short, edge, long, longer = keys(144)
    assert short == edge != long == longer
    assert len(set(keys(143))) == len(set(keys(144, whole_table=True))) == 1


def test_rows_that_read_together_and_static_shapes_exclude_each_other(qwen2_folder):
    with pytest.raises(ConfigError, match="keep their bits"):
        Engine(load_tiny(qwen2_folder), load_tokenizer(qwen2_folder), read_together=True, static_shapes=True)
