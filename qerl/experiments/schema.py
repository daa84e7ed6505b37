"""What a matrix file may say: strict and frozen, like the configuration of a run. Free of torch."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from qerl.config.section import Fraction, NonNegative, Positive, Section

Values = Annotated[tuple[Any, ...], Field(min_length=1)]
Setting = dict[str, Any]
"""Dotted key of the configuration -> value."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+]*")
"""Names of arms become parts of folder names; ``-`` separates the parts."""


class MatchConfig(Section):
    """The temperature of an arm, found so that its entropy on the probe set is that of another arm."""

    arm: str
    """The arm whose initial entropy is matched: at its own temperature, under the noise of its first noisy stage if it has any (mean over draws of the entropies under each)."""
    low: Annotated[float, Field(gt=0)] = 0.5
    """Lowest temperature that is tried."""
    high: Annotated[float, Field(gt=0)] = 2.0
    """Highest temperature that is tried."""
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 1.0e-3
    """Relative error of the entropy at which the bisection ends."""
    draws: Positive = 4
    """Noise draws that the matched entropy is averaged over."""

    @model_validator(mode="after")
    def _check(self) -> MatchConfig:
        if self.low >= self.high:
            raise ValueError(f"match_temperature: low={self.low} must be below high={self.high}")
        return self


class ArmConfig(Section):
    """One way of training; everything it does not set is that of the base configuration."""

    name: str
    """Part of folder names: letters, digits, `_`, `.` and `+`."""
    label: str | None = None
    """What tables and figures call it; none takes the name."""
    set: Setting = {}
    """Dotted keys of the configuration and their values, e.g. `{quant.format: bf16, aqn.enabled: false}`."""
    seeds: tuple[NonNegative, ...] | None = None
    """Seeds of this arm, in place of those of the matrix."""
    axes: dict[str, Values] | None = None
    """best_recipe only: values this arm tries, in place of those of the matrix; as many combinations as every other arm."""
    match_temperature: MatchConfig | None = None
    """Find rollout.temperature before training."""

    @model_validator(mode="after")
    def _check(self) -> ArmConfig:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"arm name {self.name!r} may hold letters, digits, _ . + and no -")
        if self.match_temperature is not None and "rollout.temperature" in self.set:
            raise ValueError(f"arm {self.name} sets rollout.temperature and asks for it to be found")
        return self


class FinalConfig(Section):
    """One more evaluation of the trained model, beside the one that `eval` declares."""

    name: str
    """Key in summaries."""
    data: str | None = None
    """Other questions, named as `data.eval` is; null: those of `data.eval`."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass."""
    samples: Positive = 1
    """Answers per question; more than 1 needs a temperature above 0."""
    noise: Literal["off", "first", "last"] = "off"
    """Evaluate under the noise of the first noisy or of the last stage; left out for arms without noise."""

    @model_validator(mode="after")
    def _check(self) -> FinalConfig:
        if self.name in ("before", "after"):
            raise ValueError(f"evaluation name {self.name!r} is that of the evaluations of training itself")
        if not NAME.fullmatch(self.name):
            raise ValueError(f"evaluation name {self.name!r} may hold letters, digits, _ . + and no -")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(f"evaluation {self.name}: {self.samples} greedy answers would all be the same")
        return self


class TargetConfig(Section):
    """The quality that time to target asks for, fixed before any run."""

    accuracy: Fraction
    """First evaluation at or above it counts."""
    device_seconds: Annotated[float, Field(gt=0)] | None = None
    """Budget in seconds of training times GPUs; what comes later does not count. None: a run's own end."""


class DetectConfig(Section):
    """How small a difference of arms the matrix can be expected to show, stated before any run."""

    sd: Annotated[float, Field(gt=0)]
    """Standard deviation of the final accuracy over seeds (a fraction), assumed or from a pilot."""
    source: str = "assumed"
    """Where it comes from, in words."""
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Two-sided level of the test."""
    power: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Chance of finding it when it is there."""


class TuningConfig(Section):
    """best_recipe: how each arm's settings are chosen before its final runs."""

    seeds: Annotated[tuple[NonNegative, ...], Field(min_length=1)]
    """Seeds of every trial, none of them a seed of the final runs."""
    set: Setting = {}
    """What trials change, e.g. `{train.steps: 30, data.eval: svamp}`: the questions of the selection should not be those of the table."""


class MatrixConfig(Section):
    """A whole matrix."""

    name: str
    """Name of the matrix; results go to `results/NAME/`."""
    base: str
    """Configuration file of a run, relative to the matrix file."""
    protocol: Literal["mechanism", "best_recipe"]
    """`mechanism`: one optimizer for all arms; the learning rate may only be an axis. `best_recipe`: every arm is tuned with as many trials by one rule, then trained anew."""
    set: Setting = {}
    """Dotted keys and values for all cells."""
    arms: Annotated[tuple[ArmConfig, ...], Field(min_length=1)]
    """What is compared."""
    axes: dict[str, Values] = {}
    """Dotted key -> values; every arm is run at every combination (mechanism), or tries them (best_recipe)."""
    seeds: Annotated[tuple[NonNegative, ...], Field(min_length=1)]
    """Training seeds of every arm."""
    target: TargetConfig
    """Fixed beforehand."""
    detect: DetectConfig
    """Fixed beforehand."""
    compare: tuple[tuple[str, str], ...] = ()
    """Pairs of arms whose difference (second minus first) is the question; none compares each arm with the first."""
    vary: tuple[Literal["model.path"], ...] = ()
    """What arms may differ in that is otherwise equal in all: `model.path`, for folders that hold one model quantized in several ways."""
    collapsed_below: Fraction = 0.5
    """A seed has collapsed when its training could not go on, or ended below this share of its accuracy before training."""
    final: tuple[FinalConfig, ...] = ()
    """Evaluations of the trained model beside `eval`."""
    tuning: TuningConfig | None = None
    """best_recipe only."""

    @model_validator(mode="after")
    def _check(self) -> MatrixConfig:
        for problem in (_name_problem(self), _reference_problem(self), _protocol_problem(self)):
            if problem is not None:
                raise ValueError(problem)
        return self

    def seeds_of(self, arm: ArmConfig) -> tuple[int, ...]:
        """Seeds of an arm's runs."""
        return self.seeds if arm.seeds is None else arm.seeds

    def axes_of(self, arm: ArmConfig) -> dict[str, tuple[Any, ...]]:
        """Axes of an arm's runs or trials."""
        return self.axes if arm.axes is None else arm.axes


def _name_problem(matrix: MatrixConfig) -> str | None:
    if not NAME.fullmatch(matrix.name):
        return f"name {matrix.name!r} may hold letters, digits, _ . + and no -"
    for what, names in (
        ("arm", [arm.name for arm in matrix.arms]),
        ("arm label", [arm.label or arm.name for arm in matrix.arms]),
        ("evaluation", [final.name for final in matrix.final]),
    ):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            return f"{what} {', '.join(twice)} is named twice"
    seeds = [matrix.seeds, *(arm.seeds for arm in matrix.arms if arm.seeds is not None)]
    if any(len(set(part)) < len(part) or not part for part in seeds):
        return "a list of seeds is empty or names one twice"
    return None


def _reference_problem(matrix: MatrixConfig) -> str | None:
    names = [arm.name for arm in matrix.arms]
    asked = [("compare", name) for pair in matrix.compare for name in pair]
    asked += [("match_temperature", arm.match_temperature.arm) for arm in matrix.arms if arm.match_temperature]
    for where, name in asked:
        if name not in names:
            return f"{where} names an unknown arm {name!r}; arms are {', '.join(names)}"
    asked_for = [frozenset(pair) for pair in matrix.compare]
    for pair, arms in zip(matrix.compare, asked_for, strict=True):
        # Every question that is asked makes the p-values of the others larger (Holm).
        if len(arms) == 1 or asked_for.count(arms) > 1:
            what = "holds an arm against itself" if len(arms) == 1 else "asks one question twice"
            return f"compare {what}: {', '.join(pair)}"
    for arm in matrix.arms:
        other = next((a for a in matrix.arms if arm.match_temperature and a.name == arm.match_temperature.arm), None)
        if other is not None and other.match_temperature is not None:
            return f"arm {arm.name} matches {other.name}, whose own temperature is still to be found"
    return None


def _protocol_problem(matrix: MatrixConfig) -> str | None:
    if matrix.protocol == "mechanism":
        if matrix.tuning is not None or any(arm.axes is not None for arm in matrix.arms):
            return "protocol mechanism has no tuning and no axes of single arms: use protocol: best_recipe"
        return None
    if matrix.tuning is None:
        return "protocol best_recipe needs `tuning: {seeds: [...]}`"
    trials = {arm.name: _combinations(matrix.axes_of(arm)) for arm in matrix.arms}
    if len(set(trials.values())) > 1:
        shown = ", ".join(f"{name} {count}" for name, count in trials.items())
        return f"protocol best_recipe gives every arm as many trials; got {shown}"
    final = {seed for arm in matrix.arms for seed in matrix.seeds_of(arm)}
    shared = sorted(final & set(matrix.tuning.seeds))
    if shared:
        return f"tuning.seeds and seeds share {', '.join(map(str, shared))}: a choice must not be judged on the runs that made it"
    return None


def _combinations(axes: dict[str, tuple[Any, ...]]) -> int:
    count = 1
    for values in axes.values():
        count *= len(values)
    return count
