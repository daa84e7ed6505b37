"""What the report of several runs shows: records that ``experiments.compare`` fills. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LEAST_SEEDS = 3
"""Shared seeds of a verdict: with two, two differences that happen to be alike make an interval of no width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A quantity over seeds: every value, their mean and its t-interval (None with one seed, or with equal values)."""

    values: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedRow:
    """One run of an arm."""

    name: str
    seed: int | None
    state: str
    error: str | None
    steps: int
    planned_steps: int | None
    before: float | None
    after: float | None
    """Accuracy after training; None while there is none."""
    collapsed: bool
    bit_exact: bool | None
    device_seconds: float | None
    peak_bytes: float | None
    target_step: int | None
    target: dict[str, float | None]
    """Cost -> value at the first evaluation at or above the target."""
    target_bound: dict[str, float | None]
    """Cost -> what is known to be too little, where the target was not reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRow:
    """Median cost to the target over an arm's seeds; ``value`` None: the median is above ``above``, or nothing is known of it."""

    value: float | None
    above: float | None
    reached: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRow:
    """One arm at one point of the axes."""

    key: str
    label: str
    axes: dict[str, Any]
    seeds: tuple[SeedRow, ...]
    after: Spread | None
    gain: Spread | None
    """After minus before, run by run."""
    final: dict[str, Spread]
    """Further evaluations of the trained model."""
    noise_effect: dict[str, Spread]
    """Evaluations under noise minus the clean one, run by run."""
    collapsed: int
    judged: int
    """Runs that made all their steps, or could not for their training's sake: what ``collapsed`` is out of."""
    device_seconds: float | None
    """Mean over the runs that made all their steps."""
    peak_bytes: float | None
    """Largest of all runs."""
    target: dict[str, TargetRow]
    mixed: Spread | None
    """Share of mixed groups, mean over the steps of each run that made all of them."""
    ends: dict[str, tuple[Spread, Spread]]
    """Metric -> its mean over the first and over the last tenth of each run's steps (at least one), of runs that made them all."""
    step_seconds: Spread | None
    """Median seconds of a step of each run."""
    on_front: bool
    """No other arm is as accurate, as fast and as small, and better in one of these."""
    temperature: float | None
    """Found for this arm; None for the configured one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedTest:
    """Exact McNemar test of two runs with one seed on the same questions."""

    seed: int
    gained: int
    lost: int
    p_value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A difference of fractions with its interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledDifference:
    """Difference of the means of two arms over all their seeds, with the scatter of seeds pooled over all arms of the comparison."""

    mean: float
    low: float
    high: float
    sd: float
    """Pooled standard deviation over seeds."""
    freedom: int
    """Its degrees of freedom."""
    p_value: float
    """Two-sided, corrected by Holm's method for the questions that the comparison asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """Second arm minus first arm."""

    first: str
    second: str
    axes: dict[str, Any]
    over_seeds: Spread | None
    """Differences of the runs with one seed (one data order), with their t-interval."""
    pooled: PooledDifference | None
    """All seeds of both arms, unpaired; None where seeds of no arm show a scatter."""
    finals: dict[str, Spread]
    """``over_seeds`` for each further evaluation without noise that both had."""
    before: Difference | None
    """Before training, over the questions; None where both begin from one model."""
    question_difference: float | None
    question_low: float | None
    question_high: float | None
    questions: int
    """Interval over the questions alone: a paired bootstrap of each question's mean over the shared seeds."""
    tests: tuple[SeedTest, ...]
    detectable: float | None
    """Smallest detectable difference that was stated beforehand, for the planned seeds."""
    detectable_now: float | None
    """The same for the seeds of the two arms that have a result; None with fewer than two of either."""

    @property
    def has_figures(self) -> bool:
        """Whether anything is known of the difference."""
        return self.over_seeds is not None or self.pooled is not None or self.before is not None

    @property
    def verdict(self) -> str:
        """In words, from the interval over shared seeds alone."""
        if self.over_seeds is None:
            return "no finished seed in common"
        count = len(self.over_seeds.values)
        if count < LEAST_SEEDS:
            return "one seed" if count == 1 else "two seeds"
        if self.over_seeds.low is None or self.over_seeds.high is None:
            return "no interval"
        if self.over_seeds.low > 0:
            return "higher"
        return "lower" if self.over_seeds.high < 0 else "not distinguishable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A metric of one run."""

    arm: str
    """Key of the arm."""
    seed: int | None
    steps: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedRow:
    """A setting that differs between arms: one value an arm, in the order of the arms."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Arms that may stand in one table: one matrix, one protocol, one phase; or runs put side by side."""

    title: str
    protocol: str | None
    """None for runs that belong to no matrix."""
    phase: str
    model: str
    evaluation: str
    """The evaluation policy in words."""
    confidence: float
    target: float | None
    """Accuracy that time to target asks for."""
    target_budget: float | None
    collapsed_below: float
    on_gpu: bool
    arms: tuple[ArmRow, ...]
    pairs: tuple[PairRow, ...]
    curves: dict[str, tuple[Curve, ...]]
    accuracy_curves: tuple[Curve, ...]
    """Evaluations by step."""
    accuracy_by_seconds: tuple[Curve, ...]
    """Evaluations by device-seconds of training."""
    stage_seconds: dict[str, dict[str, float]]
    """Key of the arm -> stage -> mean seconds over its runs."""
    changed: tuple[ChangedRow, ...]
    choices: tuple[str, ...]
    """In words. best_recipe: what each arm's trials chose; mechanism: the value of an axis that one rule takes for all arms."""
    notes: tuple[str, ...]
    """What keeps the comparison from being clean."""
    machine: str

    @property
    def known_pairs(self) -> list[PairRow]:
        """Differences of which something is known."""
        return [row for row in self.pairs if row.has_figures]

    @property
    def open_pairs(self) -> dict[str, list[str]]:
        """First arm -> second arms of the differences of which nothing is known yet."""
        found: dict[str, list[str]] = {}
        for row in self.pairs:
            if not row.has_figures:
                found.setdefault(row.first, []).append(row.second)
        return found

    @property
    def paired_finals(self) -> list[str]:
        """Further evaluations in which arms are compared."""
        return list(dict.fromkeys(name for row in self.pairs for name in row.finals))

    @property
    def time_name(self) -> str:
        """What a second of training is here."""
        return "GPU-seconds" if self.on_gpu else "seconds of training (CPU)"
