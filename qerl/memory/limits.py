"""The most of a setting that fits, everything else as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pydantic import ValidationError

from qerl.config.schema import Config
from qerl.memory.advice import changed, largest_that
from qerl.memory.budget import Budget
from qerl.memory.ledger import kv_bytes, predict, sequences_with_room, wanted_kv_bytes
from qerl.model.aqn.noise import TABLE_ROWS
from qerl.model.spec import ModelSpec

MOST_TRIED = 1 << 20
"""Tokens of a pass up to which the most that fits is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The most of one setting that fits, everything else as it is."""

    setting: str
    now: int
    largest: int | None
    """None when no value fits."""
    held_by: str
    """What a larger value runs into: memory, or a bound that is none of memory."""
    others_wait: bool = False
    """The plan holds with the value of now: so many at their longest run at a time, and the others wait."""


def limits(
    config: Config, spec: ModelSpec, budget: Budget, *, device_type: str, asked: Config | None = None
) -> list[Limit]:
    """The most sequences that have room at their longest at the same time, tokens of a micro-batch and new tokens that fit, one at a
    time. For the last two, keys and values of one sequence are enough: others wait.

    Args:
        config: resolved.
        asked: as it was before; None: ``config`` itself.
    """
    open_kv = changed(config, "rollout.kv_cache_gb", "auto")
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    whole = "train.token_budget" if config.pass_tokens < spec.max_positions else "positions of the model"
    positions = min(spec.max_positions, config.pass_tokens) - config.rollout.max_prompt_tokens
    # Shorter answers than the punishment of long ones begins at are no setting.
    shortest = config.reward.overlong.buffer_tokens + 1 if config.reward.overlong.enabled else 1

    def fits(setting: str, value: int) -> bool:
        try:
            tried = changed(open_kv, setting, value)
        except ValidationError:
            return False
        if setting != "rollout.max_num_seqs" and device_type == "cuda":
            one = -(-wanted_kv_bytes(tried, spec, device_type, sequences=1) // 1000) / 1e6
            tried = changed(tried, "rollout.kv_cache_gb", one)
        return predict(tried, spec, device_type=device_type).peak <= budget.size

    waiting = _of_those_that_wait(config, spec, budget, device_type, asked or config)
    found = [waiting or _most_sequences(config, partial(fits, "rollout.max_num_seqs"))]
    for setting, now, low, high, otherwise in (
        ("train.token_budget", config.pass_tokens, longest, MOST_TRIED, "nothing"),
        ("rollout.max_new_tokens", config.rollout.max_new_tokens, shortest, positions, whole),
    ):
        largest = largest_that(partial(fits, setting), low, high)
        held_by = otherwise if largest == high else "memory"
        found.append(Limit(setting=setting, now=now, largest=largest, held_by=held_by))
    return found


def _of_those_that_wait(
    config: Config, spec: ModelSpec, budget: Budget, device_type: str, asked: Config
) -> Limit | None:
    """Sequences, where a plan that fits gives keys and values less than all would have at their longest."""
    cut = kv_bytes(config, spec, device_type) < wanted_kv_bytes(config, spec, device_type)
    if not cut or predict(config, spec, device_type=device_type).peak > budget.size:
        return None
    return Limit(
        setting="rollout.max_num_seqs",
        now=config.decode_slots,
        largest=sequences_with_room(config, spec, device_type),
        held_by="memory" if asked.rollout.kv_cache_gb == "auto" else "rollout.kv_cache_gb",
        others_wait=True,
    )


def _most_sequences(config: Config, fits: Callable[[int], bool]) -> Limit:
    """Where all have room, or nothing fits. A GPU keeps no noise of more than ``TABLE_ROWS`` rows, so that one more may need less."""
    answers = config.rollout.prompts_per_step * config.rollout.group_size
    largest = largest_that(fits, TABLE_ROWS + 1, answers) or largest_that(fits, 1, min(TABLE_ROWS, answers))
    held_by = "answers of a step" if largest == answers else "memory"
    return Limit(setting="rollout.max_num_seqs", now=config.decode_slots, largest=largest, held_by=held_by)
