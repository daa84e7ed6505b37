"""The most that fits is what fits with everything less: a plan never needs less for longer answers."""

import json
import re

import pytest
from memory_builders import configured, qwen, qwen_config

from qerl import memory
from qerl.memory.advice import changed
from qerl.memory.ledger import wanted_kv_bytes
from qerl.train.fit import plan


@pytest.mark.parametrize(
    "settings", [(), ("aqn.scope=response",), ("reward.overlong.enabled=true", "reward.overlong.buffer_tokens=64")]
)
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_longer_answers_never_need_less(checkpointing, settings):
    """Prompts that are shared have copies of their keys, the more answers stand in a pass; a longer answer is one that may also be short."""
    spec = qwen("0.5b")
    config = configured(f"train.checkpointing={checkpointing}", "rollout.prompts_per_step=32", *settings)
    lengths = [*range(70, 500, 13), *range(500, 15_000, 331)]
    totals = [
        memory.predict(changed(config, "rollout.max_new_tokens", length), spec, device_type="cuda")
        for length in lengths
    ]
    for phase in memory.PHASES:
        found = [ledger.total(phase) for ledger in totals]
        assert found == sorted(found), phase


def test_the_most_new_tokens_that_fit_are_the_last_that_do():
    spec, bound = qwen("3b"), memory.Budget(size=8_800_000_000, source="test")
    config = configured("train.checkpointing=full", "train.token_budget=16384", "rollout.max_num_seqs=16")
    (limit,) = [
        found
        for found in memory.limits(config, spec, bound, device_type="cuda")
        if found.setting == "rollout.max_new_tokens"
    ]

    def fits(length):
        tried = changed(config, "rollout.max_new_tokens", length)
        one = wanted_kv_bytes(tried, spec, "cuda", sequences=1) / 1e9
        return memory.predict(changed(tried, "rollout.kv_cache_gb", one), spec, device_type="cuda").peak <= bound.size

    assert limit.largest is not None and limit.held_by == "memory"
    assert all(fits(length) for length in range(1, limit.largest, 7)) and fits(limit.largest)
    assert not any(fits(length) for length in range(limit.largest + 64, 15_000, 97))


def test_more_rows_are_found_where_the_noise_of_few_has_no_room():
    """With short answers the draws of 64 rows need more than keys, values and logits of a few further rows; of more than 64 none are kept."""
    spec = qwen("7b")
    settings = ("aqn.scope=response", "rollout.prompts_per_step=16", "quant.format=bf16")
    config = configured(*settings, "rollout.max_prompt_tokens=32", "rollout.max_new_tokens=32", "train.token_budget=64")

    def peak(rows):
        return memory.predict(changed(config, "rollout.max_num_seqs", rows), spec, device_type="cuda").peak

    assert peak(65) < peak(64)
    bound = memory.Budget(size=peak(65), source="test")
    limit = memory.limits(config, spec, bound, device_type="cuda")[0]
    assert (limit.largest or 0) >= 65 and not limit.others_wait


@pytest.mark.parametrize(
    ("size", "card", "given", "held_by"),
    [("7b", 24, "auto", "memory"), ("32b", 48, "auto", "memory"), ("7b", 80, 2, "rollout.kv_cache_gb")],
)
def test_sequences_that_have_room_are_as_many_in_both_places(tmp_path, size, card, given, held_by):
    """The request, how many of it run at a time, and that the others wait; not what would fit if fewer were asked for."""
    (tmp_path / "config.json").write_text(json.dumps(qwen_config(size)))
    settings = ("rollout.max_new_tokens=1024", "train.token_budget=16384", f"rollout.kv_cache_gb={given}")
    text, fitting = plan(configured(*settings, f"model.path={tmp_path}"), gpu=f"{card}GB", width=200)
    (room,) = re.findall(r"room for (\d+) of 256 sequences at their longest; the others wait", text)
    row = r"rollout.max_num_seqs +│ 256 asked for +│ (\d+) at a time +│ (\S+); the others wait"
    assert re.findall(row, text) == [(room, held_by)]
    assert fitting and 1 < int(room) < 256


def test_where_all_sequences_have_room_or_nothing_fits_none_is_said_to_wait(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(qwen_config("7b")))
    for card, most in ((80, "256"), (8, "none")):
        text, fitting = plan(configured(f"model.path={tmp_path}"), gpu=f"{card}GB", width=200)
        assert re.search(rf"rollout.max_num_seqs +│ 256 +│ {most} ", text)
        assert fitting == (card == 80)
