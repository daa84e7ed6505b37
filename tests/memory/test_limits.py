"""The most that fits is what fits with everything less: a plan never needs less for longer answers."""

import pytest
from memory_builders import configured, qwen

from qerl import memory
from qerl.memory.advice import changed
from qerl.memory.ledger import wanted_kv_bytes


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
