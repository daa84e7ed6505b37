import dataclasses

import pytest
from builders import group
from scripted_draws import CUT, LOST, MIXED, RIGHT, WRONG, C, Source, T, W

from qerl.config.load import load_config
from qerl.train.collect import collect, merge_rollouts, refill_size, shortage


def config_of(*settings, wanted=3):
    return load_config(None, [f"rollout.prompts_per_step={wanted}", "rollout.group_size=2", "objective.dynamic_sampling=true", *settings])  # fmt: skip


def test_without_dynamic_sampling_one_draw_is_the_batch():
    source = Source(MIXED, WRONG, RIGHT)
    config = load_config(None, ["rollout.prompts_per_step=3", "rollout.group_size=2"])
    found = collect(config, source)
    assert source.calls == [(3, 0)] and found.in_batch == (True, True, True) and found.metrics(config) == {}
    assert shortage(config, found) is None


def test_only_groups_that_are_mixed_by_accuracy_are_kept():
    found = collect(config_of(), Source(MIXED, RIGHT, CUT, LOST, MIXED, (C, T), MIXED))
    kept = [[score.outcome for score in kept.scores] for kept in found.batch]
    assert kept == [[C, W], [C, W], [C, T]]
    assert found.in_batch == (True, False, False, False, True, True)[: len(found.in_batch)]


def test_draws_until_the_batch_is_full_with_sample_keys_that_go_on_counting():
    source = Source(MIXED, WRONG, WRONG, MIXED, WRONG, WRONG, WRONG, MIXED)
    config = config_of()
    found = collect(config, source)
    # One of 3 teaches, 2 are missing: 6 would be needed, 3 is the most. Then 2 of 6: one more needs 3.
    assert source.calls == [(3, 0), (3, 6), (3, 12)]
    keys = [completion.sample_key for completion in found.rollout.completions]
    assert keys == list(range(18)) and found.rollout.index == 4
    assert list(found.in_batch) == [True, False, False, True, False, False, False, True, False]
    assert found.metrics(config) == {
        "sampling/refill_rounds": 2,
        "sampling/groups_kept": 3,
        "sampling/groups_dropped": 6,
        "sampling/tokens_wasted": 24,
    }
    assert shortage(config, found) is None


def test_what_is_too_much_is_dropped_in_the_order_drawn():
    found = collect(config_of(), Source(MIXED, MIXED, WRONG, MIXED, MIXED))
    assert found.in_batch[:4] == (True, True, False, True) and sum(found.in_batch) == 3


@pytest.mark.parametrize(("outcomes", "kept"), [((MIXED,), 1), ((), 0)])
def test_a_cap_ends_in_a_smaller_batch_and_a_warning(outcomes, kept):
    source, config = Source(*outcomes), config_of("objective.dynamic_sampling_max_rounds=4")
    found = collect(config, source)
    assert len(source.calls) == found.rounds == 4
    assert len(found.batch) == kept
    text = shortage(config, found)
    assert "dynamic_sampling_max_rounds=4" in text
    assert ("no update" in text) == (kept == 0)


@pytest.mark.parametrize(
    ("wanted", "informative", "drawn", "size"),
    [(8, 0, 8, 8), (8, 4, 8, 8), (8, 6, 8, 3), (8, 7, 16, 3), (8, 1, 16, 8), (8, 7, 8, 2)],
)
def test_a_refill_is_sized_by_the_share_that_taught_so_far(wanted, informative, drawn, size):
    assert refill_size(wanted, informative, drawn) == size


def test_masked_truncated_answers_alone_do_not_teach():
    """A mixed group all of whose answers were cut: right by accuracy in one of them, and nothing of it in the loss."""
    cut = group([T, T])
    scores = (dataclasses.replace(cut.scores[0], outcome=C, reward=1.0), cut.scores[1])
    source = Source(*[MIXED] * 9)

    def draw(count, first_key):
        rollout, groups = source(count, first_key)
        if first_key == 0:
            groups[1] = dataclasses.replace(groups[1], completions=cut.completions, scores=scores)
        return rollout, groups

    assert collect(config_of(), draw).in_batch == (True, True, True)
    found = collect(config_of("objective.mask_truncated=true"), draw)
    assert found.in_batch[:3] == (True, False, True)


def test_rounds_merge_into_one_rollout():
    source = Source()
    merged = merge_rollouts([source(3, 0)[0], source(2, 6)[0]])
    assert [completion.sample_key for completion in merged.completions] == list(range(10))
    assert merged.stats == {
        "generated_tokens": 16.0, "prompt_tokens": 12.0, "seconds": 4.0, "kv_bytes": 5.0, "peak_rows": 4.0, "tokens_per_second": 4.0,
    }  # fmt: skip
