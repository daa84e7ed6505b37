"""The reward of an answer: the weighted sum of the configured functions, with shaping, and the answer's outcome."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qerl.config.schema import RewardConfig
from qerl.errors import RewardError, nearest
from qerl.records import Completion, Outcome, Score
from qerl.reward.accuracy import AccuracyChecker, Judgement
from qerl.reward.functions import IsolatedFunction, Value, format_function
from qerl.reward.shaping import soft_overlong
from qerl.reward.worker import LARGEST_REWARD

BUILT_IN = ("accuracy", "format")
OVERLONG = "overlong"


class Rewarder:
    """Scores answers. Holds worker processes: use it as a context manager, or ``close`` it.

    The outcome is decided by accuracy alone, whether or not accuracy is part of the reward; shaping never touches it.

    Args:
        cfg: reward functions, weights and shaping.
        max_new_tokens: longest answer, for the overlong punishment.

    Raises:
        RewardError: when a function cannot be loaded, or two have the same name.
        MissingDependencyError: when math-verify is not installed.
    """

    def __init__(self, cfg: RewardConfig, max_new_tokens: int):
        self.cfg = cfg
        self.max_new_tokens = max_new_tokens
        _check_names(cfg.functions)
        self._accuracy = AccuracyChecker(cfg.timeout_seconds)
        self._others = {
            spec: format_function(cfg.format_pattern, cfg.timeout_seconds)
            if spec == "format"
            else IsolatedFunction(spec, cfg.timeout_seconds)
            for spec in cfg.functions
            if spec != "accuracy"
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Keys of ``Score.parts``, in order."""
        shaping = (OVERLONG,) if self.cfg.overlong.enabled else ()
        return tuple(_short_name(spec) for spec in self.cfg.functions) + shaping

    def warm_up(self) -> None:
        """Begin to start what the first scores would wait for, without waiting: worth it where answers take only seconds."""
        self._accuracy.warm_up()

    def score(self, completions: Sequence[Completion]) -> list[Score]:
        """One score an answer, in order. Faults of reward functions become notes, never exceptions."""
        judgements = self._accuracy.judge(completions)
        columns = [
            [_accuracy_value(judgement) for judgement in judgements]
            if spec == "accuracy"
            else self._others[spec].values(completions)
            for spec in self.cfg.functions
        ]
        return [
            self._compose(completion, judgement, [column[index] for column in columns])
            for index, (completion, judgement) in enumerate(zip(completions, judgements, strict=True))
        ]

    def take_warnings(self) -> list[str]:
        """Warnings in words since the last call of this method."""
        warnings: list[str] = []
        for function in self._others.values():
            warnings += function.warnings
            function.warnings.clear()
        return warnings

    def close(self) -> None:
        """End all worker processes."""
        self._accuracy.close()
        for function in self._others.values():
            function.close()

    def __enter__(self) -> Rewarder:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _compose(self, completion: Completion, judgement: Judgement, values: list[Value]) -> Score:
        parts = {_short_name(spec): value.value for spec, value in zip(self.cfg.functions, values, strict=True)}
        reward: float | None = 0.0
        for value, weight in zip(values, self.cfg.weights, strict=True):
            reward = None if reward is None or value.value is None else reward + weight * value.value
        overlong = self.cfg.overlong
        if overlong.enabled:
            punishment = soft_overlong(
                len(completion.token_ids),
                max_new_tokens=self.max_new_tokens,
                buffer_tokens=overlong.buffer_tokens,
                penalty=overlong.penalty,
            )
            parts[OVERLONG] = punishment
            reward = None if reward is None else reward + punishment
        notes = [value.note for value in values if value.note] or ([judgement.note] if judgement.note else [])
        if reward is not None and not abs(reward) <= LARGEST_REWARD:
            notes.append(f"the weighted sum of the rewards is {reward:g}; it is at most {LARGEST_REWARD:g} in size")
            reward = None
        return Score(
            reward=reward,
            parts=parts,
            outcome=_outcome(reward, judgement, completion),
            parsed=judgement.parsed,
            note="; ".join(notes) or None,
        )


def _outcome(reward: float | None, judgement: Judgement, completion: Completion) -> Outcome:
    """The first that applies, in the precedence of ``Outcome``.

    An answer that only the accuracy checker cannot judge stays in the group when accuracy is not part of the reward.
    """
    if reward is None:
        return Outcome.UNSCORABLE
    if judgement.correct:
        return Outcome.CORRECT
    if completion.stop_reason == "length":
        return Outcome.TRUNCATED
    return Outcome.UNPARSABLE if judgement.parsed is None else Outcome.WRONG


def _accuracy_value(judgement: Judgement) -> Value:
    return Value(None if judgement.correct is None else float(judgement.correct), judgement.note)


def _short_name(spec: str) -> str:
    return spec.rpartition(":")[2]


def _check_names(functions: Sequence[str]) -> None:
    for spec in functions:
        if spec not in BUILT_IN and ":" not in spec:
            close = nearest(spec, BUILT_IN)
            remedy = "Name a function after a colon, as in rewards.py:shorter"
            raise RewardError(
                "there is no such reward function",
                got=repr(spec),
                expected="`accuracy`, `format`, `module:function` or `path/file.py:function`",
                remedy=f"Did you mean `{close}`?" if close else remedy,
            )
    names = [_short_name(spec) for spec in functions] + [OVERLONG]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RewardError(
            f"several reward functions are called {twice[0]!r}, and the metrics are named after them",
            got=", ".join(functions),
            remedy="Rename one of them",
        )
