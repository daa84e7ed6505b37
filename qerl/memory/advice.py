"""What a plan decides, does it fit, and what does each setting buy?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import or_
from typing import Any

from pydantic import ValidationError

from qerl.config.schema import Config
from qerl.errors import ConfigError, MemoryBudgetError
from qerl.memory.budget import Budget
from qerl.memory.copies import copies_pay, with_copies
from qerl.memory.ledger import PHASES, check_cache, mini_batch_tokens, predict, wanted_kv_bytes
from qerl.model.recompute import Checkpointing
from qerl.model.spec import ModelSpec
from qerl.units import GB, bytes_text

NOTABLE = 0.999
"""Share of a phase from which on a saving is not worth a line."""
SHARE = 0.7
"""Share of the budget that larger passes may fill: their pieces leave gaps between them."""
MOST_PASS_TOKENS, MOST_ELEMENTS = 1 << 16, 1 << 30
"""Most tokens of a pass, and elements of its widest tensor."""
HALF = 0.5
"""Share of what keys and values could have by being given back, from which they are rather kept."""
SMALLEST_GB = 1e-6
"""Stands for no room at all, which the setting does not allow."""
SEQUENCES = "rollout.max_num_seqs"
ORDER: tuple[Checkpointing, ...] = ("none", "selective", "full")
"""Ways of checkpointing, from fastest to smallest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One setting changed, with what it needs beside it."""

    change: str
    """As ``key=value``, as it can be added to the settings that were asked for; more than one with spaces."""
    peak: int
    """Bytes at the peak with it."""
    phase: str
    """The phase that then needs most."""
    price: str
    """What is paid for it, in words."""


def check_offloading(config: Config, device_type: str) -> None:
    """Refuse ``train.activation_offloading`` on the CPU, whose memory is the host's: what is moved there takes the same memory.

    Raises:
        ConfigError: it is asked for.
    """
    if config.train.activation_offloading and device_type == "cpu":
        raise ConfigError(
            "train.activation_offloading saves nothing on the CPU: it moves a GPU's layer inputs to the host's memory",
            got="train.activation_offloading=true on the CPU",
            remedy="Use train.activation_offloading=false; fewer tokens in train.token_budget take less memory",
        )


def resolve(config: Config, spec: ModelSpec, budget: Budget | None, *, device_type: str) -> Config:
    """The configuration with everything decided that ``auto`` leaves to the plan.

    Without a budget nothing is computed again and all sequences have room. Otherwise ``train.checkpointing`` is the first of none,
    selective and full with which all of it fits. If none does: full, and the keys and values of a GPU get what is left, while training
    too if that is at least half of what they could have by being given back (``rollout.keep_cache``, ``rollout.kv_cache_gb``).
    ``train.token_budget`` is decided before all that, with the way of checkpointing that its passes leave room for. ``quant.dense_cache`` is
    on where copies pay (:func:`qerl.memory.copies.copies_pay`) and change none of the other decisions but that of tokens.

    Raises:
        ConfigError: ``rollout.kv_cache_gb`` has no room for one sequence, or the CPU is to offload layer inputs.
    """
    check_offloading(config, device_type)
    pays = copies_pay(config, spec, None if budget is None else budget.size, device_type=device_type)
    if pays is None:
        return _resolve(config, spec, budget, device_type)
    without = _resolve(with_copies(config, False), spec, budget, device_type)
    if budget is None or not pays:
        return without
    kept = _resolve(with_copies(config, True), spec, budget, device_type)
    fits = predict(kept, spec, device_type=device_type).peak <= budget.size
    alike = with_copies(kept, False) == changed(without, "train.token_budget", kept.train.token_budget)
    return kept if fits and alike else without


def _resolve(config: Config, spec: ModelSpec, budget: Budget | None, device_type: str) -> Config:
    """All but the copies of weights."""
    check_cache(config, spec, device_type)
    config, first = _with_token_budget(config, spec, budget, device_type)
    ways = ORDER[ORDER.index(first) :] if config.train.checkpointing == "auto" else (config.train.checkpointing,)
    for way in ways:
        chosen = changed(config, "train.checkpointing", way)
        if budget is None or predict(chosen, spec, device_type=device_type).peak <= budget.size:
            return _kept(chosen, "on")
    assert budget is not None
    if device_type != "cuda" or config.rollout.kv_cache_gb != "auto":
        given_back = _kept(chosen, "off")
        fits = predict(given_back, spec, device_type=device_type).peak <= budget.size
        return given_back if fits and device_type == "cuda" else _kept(chosen, "on")
    room = {way: _kv_room(_kept(chosen, way), spec, budget) for way in ("on", "off")}
    needed = wanted_kv_bytes(config, spec, device_type, sequences=1)
    wanted = wanted_kv_bytes(config, spec, device_type)
    keep = "on" if room["on"] >= max(needed, HALF * min(wanted, room["off"])) else "off"
    keep = keep if config.rollout.keep_cache == "auto" else config.rollout.keep_cache
    size = min(wanted, max(needed, room[keep]))
    # Rounded to kilobytes, downwards where there is a choice.
    shown = size // 1000 / 1e6 if size > needed else -(-size // 1000) / 1e6
    return changed(_kept(chosen, keep), "rollout.kv_cache_gb", shown)


def _with_token_budget(
    config: Config, spec: ModelSpec, budget: Budget | None, device_type: str
) -> tuple[Config, Checkpointing]:
    """``train.token_budget=auto`` as the most tokens for which the plan stays within a share of the budget, by the first way of
    checkpointing that has room for as many as there are by default; else at most these, by the smallest way and within the whole budget.
    Also the way of checkpointing to begin with."""
    if config.train.token_budget != "auto":
        return config, ORDER[0]
    if budget is None:
        return changed(config, "train.token_budget", config.pass_tokens), ORDER[0]
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    most = min(MOST_PASS_TOKENS, MOST_ELEMENTS // (2 * spec.intermediate_size), mini_batch_tokens(config, device_type))
    most = max(most, longest)
    ways = ORDER if config.train.checkpointing == "auto" else (config.train.checkpointing,)
    measured = config
    if device_type == "cuda" and config.rollout.kv_cache_gb == "auto":
        # Keys and values take what passes leave, not the other way round.
        least = -(-wanted_kv_bytes(config, spec, device_type, sequences=1) // 1000) / 1e6
        measured = changed(_kept(config, "off"), "rollout.kv_cache_gb", least)

    def found(way: str, low: int, high: int, size: float) -> int | None:
        chosen = changed(measured, "train.checkpointing", way)

        def fits(tokens: int) -> bool:
            tried = changed(chosen, "train.token_budget", tokens)
            return predict(tried, spec, device_type=device_type).peak <= size

        return largest_that(fits, low, high)

    usual = max(longest, min(config.pass_tokens, most))
    for way in ways:
        tokens = found(way, usual, most, SHARE * budget.size)
        if tokens is not None:
            return changed(config, "train.token_budget", tokens), way
    tokens = found(ways[-1], longest, usual, budget.size) or longest
    return changed(config, "train.token_budget", tokens), ways[-1]


def _kept(config: Config, choice: str) -> Config:
    return changed(config, "rollout.keep_cache", choice) if config.rollout.keep_cache == "auto" else config


def _kv_room(config: Config, spec: ModelSpec, budget: Budget) -> int:
    """Bytes that the budget leaves for keys and values."""
    ledger = predict(changed(config, "rollout.kv_cache_gb", SMALLEST_GB), spec, device_type="cuda")
    phases = PHASES if config.rollout.keep_cache == "on" else ("rollout",)
    return budget.size - max(ledger.total(phase) for phase in phases if phase != "load") + int(SMALLEST_GB * GB)


def check_budget(config: Config, spec: ModelSpec, budget: Budget | None, *, device_type: str, text: str) -> None:
    """Refuse a plan that does not fit.

    Args:
        config: resolved.
        text: the plan in words, shown with the refusal.

    Raises:
        MemoryBudgetError: the predicted peak exceeds the budget.
    """
    ledger = predict(config, spec, device_type=device_type)
    if budget is not None and ledger.peak > budget.size:
        raise MemoryBudgetError(
            f"the plan does not fit in memory\n{text}\n{ledger.peak_phase} needs {bytes_text(ledger.peak)}, {bytes_text(ledger.peak - budget.size)} too much",
            expected=f"at most {bytes_text(budget.size)} ({budget.source})",
            remedy="Take one of the settings that `qerl plan` lists, or train.memory_budget=off to try all the same",
        )


def changed(config: Config, setting: str, value: Any) -> Config:
    """The configuration with one dotted setting changed.

    Raises:
        ValidationError: the other settings do not allow it.
    """
    return altered(config, {setting: value})


def altered(config: Config, changes: Mapping[str, Any]) -> Config:
    """The configuration with dotted settings changed at once.

    Raises:
        ValidationError: the other settings do not allow them.
    """
    values = config.model_dump()
    for setting, value in changes.items():
        section, _, key = setting.rpartition(".")
        values[section][key] = value
    return Config.model_validate(values)


def largest_that(test: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest value in [low, high] that passes a test which small values pass and large ones do not; None if none does."""
    if high < low or not test(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if test(middle) else (low, middle - 1)
    return low


def options(
    config: Config, spec: ModelSpec, budget: Budget | None, *, device_type: str, asked: Config | None = None
) -> list[Option]:
    """What each setting that saves memory would bring, one at a time, least peak first. Those are left out that change neither the
    peak nor another phase that is beyond the budget.

    Args:
        config: resolved; peaks are those of it with the change.
        asked: as it was before :func:`resolve`, to which the changes can be added; None: ``config`` itself.
    """
    now = predict(config, spec, device_type=device_type)
    tight = [now.peak_phase, *(phase for phase in PHASES if budget is not None and now.total(phase) > budget.size)]
    found = []
    for changes, price in _candidates(config, asked or config, device_type):
        try:
            altered(asked or config, changes)
            tried = altered(config, changes)
        except ValidationError:
            continue
        ledger = predict(tried, spec, device_type=device_type)
        if any(ledger.total(phase) < NOTABLE * now.total(phase) for phase in tight):
            found.append(Option(change=_as_text(changes), peak=ledger.peak, phase=ledger.peak_phase, price=price))
    return sorted(found, key=lambda option: option.peak)


def fits_with(changes: Mapping[str, Any], asked: Config, spec: ModelSpec, budget: Budget, *, device_type: str) -> bool:
    """Whether the plan fits with dotted settings added to those asked for, and what they leave to it decided anew."""
    try:
        tried = resolve(altered(asked, changes), spec, budget, device_type=device_type)
    except ValidationError:
        return False
    return predict(tried, spec, device_type=device_type).peak <= budget.size


def together(asked: Config, spec: ModelSpec, budget: Budget, *, device_type: str) -> str | None:
    """Settings that make a plan fit together when they are added to those asked for, none of which can be left out; None if all of them do
    not.

    They are taken in the order of ``_candidates``, the least harmful first, and answers are never cut shorter. Where all of them with half
    of the sequences are not enough, it is the first of them with which fewer sequences are, and the most of these.

    Args:
        asked: not resolved, so that what it leaves to the plan is decided anew.
    """
    config = resolve(asked, spec, budget, device_type=device_type)

    def fits(changes: dict[str, Any]) -> bool:
        return fits_with(changes, asked, spec, budget, device_type=device_type)

    def sequences(changes: dict[str, Any]) -> int | None:
        return largest_that(lambda count: fits(changes | {SEQUENCES: count}), 1, config.decode_slots // 2)

    ways = [
        changes for changes, _ in _candidates(config, asked, device_type) if "rollout.max_new_tokens" not in changes
    ]
    # What is added up: nothing, the first, the first two, and so on to all.
    sums: list[dict[str, Any]] = list(accumulate(ways, or_, initial={}))
    chosen = next((tried for tried in sums[1:] if fits(tried)), None)
    if chosen is None:
        fewer = ((tried, sequences(tried)) for tried in sums)
        chosen = next((tried | {SEQUENCES: count} for tried, count in fewer if count is not None), None)
    if chosen is None:
        return None
    while needless := next((key for key in chosen if fits({k: v for k, v in chosen.items() if k != key})), None):
        del chosen[needless]
    return _as_text(chosen)


def _as_text(changes: Mapping[str, Any]) -> str:
    """As arguments of a command."""
    shown = {True: "true", False: "false"}
    return " ".join(f"{key}={shown[value] if isinstance(value, bool) else value}" for key, value in changes.items())


def _candidates(config: Config, asked: Config, device_type: str) -> Iterator[tuple[dict[str, Any], str]]:
    """(settings, price) of what needs less memory than a resolved configuration, the least harmful first; each can be added to the
    settings asked for, from which it was made."""
    train, rollout, quant = config.train, config.rollout, config.quant
    for choice, price in (
        ("selective", "norms and activations computed twice"),
        ("full", "a third more arithmetic in training"),
    ):
        now = ORDER.index(train.checkpointing) if train.checkpointing != "auto" else 0
        if ORDER.index(choice) > now:
            yield {"train.checkpointing": choice}, price
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    half = max(longest, config.pass_tokens // 2)
    smaller = "smaller products; the loss is the same"
    if half < config.pass_tokens:
        yield {"train.token_budget": half}, smaller
    if device_type != "cpu" and not train.activation_offloading:
        # It means something with full checkpointing alone, which the plan may have chosen without being told.
        fixed = {} if asked.train.checkpointing == "full" else {"train.checkpointing": "full"}
        more = "" if train.checkpointing == "full" else "; a third more arithmetic"
        yield {**fixed, "train.activation_offloading": True}, f"layer inputs cross the bus twice{more}"
    if longest < half:
        yield {"train.token_budget": longest}, smaller
    if config.decode_slots > 1:
        yield {SEQUENCES: config.decode_slots // 2}, "more waves of answers"
    yield {"rollout.max_new_tokens": rollout.max_new_tokens // 2}, "long answers are cut off"
    if config.optim.name == "adamw":
        yield {"optim.name": "adamw_8bit"}, "moments rounded to 8 bits; needs bitsandbytes"
    if train.mode == "lora":
        if quant.format == "bf16":
            yield {"quant.format": "nvfp4"}, "the base is rounded to 4 bits"
        if quant.lm_head == "bf16":
            yield {"quant.lm_head": "fp8"}, "the LM head is rounded to 8 bits"
            yield {"quant.lm_head": "nvfp4"}, "the LM head is rounded to 4 bits"
        if config.lora.rank > 1:
            yield {"lora.rank": config.lora.rank // 2}, "half the adapter"
    if quant.dense_cache == "on":
        yield {"quant.dense_cache": "off"}, "weights are unpacked at every product"
