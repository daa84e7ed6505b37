"""Reads a run folder into one record, whatever state the run is in.

Every file but the folder itself may be missing: a run that is still going or has crashed has no summary, and the page
then says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from qerl.config.schema import Config
from qerl.config.yaml_io import parse_yaml
from qerl.metrics.catalogue import ALARMS
from qerl.metrics.files import damaged_file
from qerl.metrics.run_dir import RunDir
from qerl.report.questions import Questions, read_questions
from qerl.report.samples import OUTCOMES, SampleSet, read_kernels, read_samples
from qerl.report.text import flatten


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One held-out evaluation. Shares are fractions; ``low`` and ``high`` bound the accuracy."""

    step: int
    accuracy: float
    low: float | None
    high: float | None
    count: int | None
    truncated: float | None
    unparsable: float | None
    mean_length: float | None
    confidence: float
    seconds: float | None = None
    """Of training up to its step, evaluation and saving left out."""
    tokens: float | None = None
    """Prompt and answer tokens of training up to its step."""
    noise: bool = False
    """The policy was evaluated with noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """Everything the report shows."""

    name: str
    config: dict[str, Any]
    config_text: str
    env: dict[str, Any]
    metrics: list[dict[str, Any]]
    """Lines of steps 1, 2, …; the evaluation before training is in ``evaluations`` alone."""
    evaluations: list[Evaluation]
    """By step; the summary's before and after included."""
    summary: dict[str, Any]
    memory: dict[str, Any]
    samples: list[SampleSet]
    kernels: dict[str, str]
    """Operation -> implementation that ran, of the newest rollout whose records are kept."""
    questions: Questions | None
    """Held-out questions before and after; None where no evaluation is kept."""
    status: str
    """``finished``, ``interrupted`` or ``unfinished`` (no summary)."""

    @property
    def last_step(self) -> int:
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def planned_steps(self) -> int | None:
        planned = self.setting("train.steps")
        return int(planned) if planned is not None else None

    def setting(self, key: str) -> Any:
        """A resolved setting by its dotted key; None when it is not there."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, lines without it left out."""
        rows = [(int(row["step"]), float(row[key])) for row in self.metrics if row.get(key) is not None]
        return [step for step, _ in rows], [value for _, value in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Accuracy after minus before, with an interval at the evaluations' confidence."""

    value: float
    low: float | None
    high: float | None
    paired: bool
    """Made question by question; otherwise from the two intervals alone."""
    gained: int | None = None
    """Questions right only after; known when paired."""
    lost: int | None = None
    count: int | None = None
    """Questions compared; known when paired."""

    @property
    def direction(self) -> str:
        """``up`` or ``down`` when the interval leaves 0 out (or there is none), else ``unclear``."""
        low = self.value if self.low is None else self.low
        high = self.value if self.high is None else self.high
        return "up" if low > 0 else "down" if high < 0 else "unclear"


def read_run(path: str | Path, *, samples: bool = True) -> RunData:
    """Reads a run folder.

    Args:
        path: the folder.
        samples: also read answers and held-out questions, which takes longer than all the rest.

    Raises:
        RunFolderError: the folder holds no run, or one of its files is damaged beyond a half-written last line.
    """
    run = RunDir.open(path)
    config_text, config = _settings(run)
    rows = run.read_metrics()
    summary = run.read_json(run.summary_path) or {}
    return RunData(
        name=str(summary.get("run") or run.path.resolve().name),
        config=config,
        config_text=config_text,
        env=run.read_json(run.env_path) or {},
        metrics=[row for row in rows if row["step"] > 0],
        evaluations=_evaluations(rows, summary, config),
        summary=summary,
        memory=run.read_json(run.memory_path) or {},
        samples=read_samples(run) if samples else [],
        kernels=read_kernels(run) if samples else {},
        questions=read_questions(run, OUTCOMES) if samples else None,
        status=str(summary.get("status", "unfinished")),
    )


def _settings(run: RunDir) -> tuple[str, dict[str, Any]]:
    """What really ran, as it was written and as it reads; nothing where it was not written."""
    if not run.config_path.exists():
        return "", {}
    with damaged_file(run.config_path, "the settings of a run", yaml.YAMLError):
        text = run.config_path.read_text(encoding="utf-8")
        values = parse_yaml(text)[0] or {}
        if not isinstance(values, dict):
            raise ValueError("it holds no sections")
    return text, values


def _evaluations(rows: list[dict[str, Any]], summary: Mapping[str, Any], config: Mapping[str, Any]) -> list[Evaluation]:
    """From the metrics, with the summary's before (step 0) and after (last step) where the metrics lack them."""
    confidence = float((config.get("eval") or {}).get("confidence", 0.95))
    found: dict[int, Evaluation] = {}
    last_step = max((int(row["step"]) for row in rows), default=0)
    for when, step in (("before", 0), ("after", last_step)):
        values = (summary.get("evaluation") or {}).get(when)
        if values:
            found[step] = _evaluation(step, values, "", float(values.get("confidence", confidence)))
    for row in rows:
        if row.get("eval/accuracy") is not None:
            found.setdefault(int(row["step"]), _evaluation(int(row["step"]), row, "eval/", confidence))
    return [_with_cost(found[step], rows) for step in sorted(found)]


def _with_cost(point: Evaluation, rows: list[dict[str, Any]]) -> Evaluation:
    """``point`` with the seconds and tokens of the steps before it."""
    before = [row for row in rows if 0 < row["step"] <= point.step]
    seconds = [row["time/step"] for row in before if row.get("time/step") is not None]
    tokens = [row["num_tokens"] for row in before if row.get("num_tokens") is not None]
    return replace(
        point,
        seconds=math.fsum(seconds) if len(seconds) == len(before) else None,
        tokens=tokens[-1] if tokens else 0 if point.step == 0 else None,
    )


def _evaluation(step: int, values: Mapping[str, Any], prefix: str, confidence: float) -> Evaluation:
    low, high = ("accuracy_low", "accuracy_high") if prefix else ("low", "high")
    return Evaluation(
        step=step,
        accuracy=float(values[f"{prefix}accuracy"]),
        low=values.get(f"{prefix}{low}"),
        high=values.get(f"{prefix}{high}"),
        count=values.get(f"{prefix}count"),
        truncated=values.get(f"{prefix}truncated"),
        unparsable=values.get(f"{prefix}unparsable"),
        mean_length=values.get(f"{prefix}mean_length"),
        confidence=confidence,
        noise=bool((values.get("policy") or {}).get("noise")),
    )


def difference(run: RunData, before: Evaluation, after: Evaluation) -> Difference:
    """The paired difference of the summary where there is one, else Newcombe's.

    Newcombe's interval for two proportions, built from their own intervals: low = d - sqrt((p2 - l2)^2 + (u1 - p1)^2),
    high = d + sqrt((u2 - p2)^2 + (p1 - l1)^2) (R. G. Newcombe, Statistics in Medicine 17, 1998, method 10). It takes the
    two evaluations as independent; asking the same questions twice makes the true interval narrower.
    """
    paired = run.summary.get("paired")
    if paired and before.step == 0 and after.step == run.last_step:
        return Difference(
            value=paired["difference"],
            low=paired["low"],
            high=paired["high"],
            paired=True,
            gained=paired.get("gained"),
            lost=paired.get("lost"),
            count=paired.get("count"),
        )
    value = after.accuracy - before.accuracy
    if before.low is None or before.high is None or after.low is None or after.high is None:
        return Difference(value=value, low=None, high=None, paired=False)
    down = math.hypot(after.accuracy - after.low, before.high - before.accuracy)
    up = math.hypot(after.high - after.accuracy, before.accuracy - before.low)
    return Difference(value=value, low=value - down, high=value + up, paired=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedSetting:
    """A setting that differs from its default."""

    key: str
    value: Any
    default: Any


def changed_settings(config: Mapping[str, Any]) -> list[ChangedSetting]:
    """Settings that differ from the defaults of this version, in the order of the configuration."""
    defaults = flatten(Config().model_dump(mode="json"))
    values = flatten(dict(config))
    return [
        ChangedSetting(key=key, value=value, default=defaults.get(key))
        for key, value in values.items()
        if key not in defaults or value != defaults[key]
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOwner:
    """Bytes of one owner; None where there is no figure."""

    name: str
    predicted: float | None
    measured: float | None

    @property
    def error(self) -> str:
        """The prediction's, in percent; empty where one of the two is missing."""
        if not self.predicted or not self.measured:
            return ""
        return f"{100 * (self.predicted / self.measured - 1):+.1f} %".replace("-", "−")


def memory_owners(run: RunData) -> list[MemoryOwner]:
    """Every owner with any bytes, largest first."""
    predicted, measured = run.memory.get("predicted") or {}, run.memory.get("measured") or {}
    names = [name for name in {**predicted, **measured} if predicted.get(name) or measured.get(name)]
    owners = [
        MemoryOwner(name=name.replace("_", " "), predicted=predicted.get(name), measured=measured.get(name))
        for name in names
    ]
    return sorted(owners, key=lambda owner: -max(owner.predicted or 0.0, owner.measured or 0.0))


def rests_of_phases(run: RunData) -> list[MemoryOwner]:
    """What the owners of a phase that nobody measures have together; of the backward pass also beside a plan for the tokens that its largest
    pass had. Known on a GPU alone."""
    found, largest = run.memory.get("by_owner") or {}, run.memory.get("largest_pass") or {}
    tokens = f"planned for its largest pass of {largest.get('tokens', 0):,} tokens"
    return [
        MemoryOwner(name=f"{name}{end}", predicted=row.get("predicted"), measured=row.get("measured"))
        for rows, end in ((found, " at its peak"), (largest, f", {tokens}"))
        for name, row in rows.items()
        if name.endswith(", all else")
    ]


def warnings_of(run: RunData) -> list[str]:
    """Warnings of the run itself, and what the page must add: an early end, and crossed alarm lines."""
    warnings = [str(text) for text in run.summary.get("warnings", ())]
    planned = f" of {run.planned_steps}" if run.planned_steps else ""
    if run.status == "unfinished":
        warnings.insert(0, f"This run has no summary: it is still going, or stopped at step {run.last_step}{planned}.")
    elif run.status != "finished":
        warnings.insert(0, f"This run was {run.status} at step {run.last_step}{planned}.")
    told = " ".join(warnings)
    return warnings + [text for metric, text in alarm_warnings(run).items() if f": {metric} " not in told]


def alarm_warnings(run: RunData) -> dict[str, str]:
    """Metric -> its highest crossed alarm line. Lines for equal noise are left out where the trainer sees none: the noise in
    the engine alone would cross them."""
    noise_differs = run.setting("objective.noise") == "absent" and run.setting("aqn.enabled")
    worst: dict[str, str] = {}
    for alarm in ALARMS:
        if noise_differs and alarm.same_noise_only:
            continue
        steps, values = run.series(alarm.metric)
        over = [step for step, value in zip(steps, values, strict=True) if value > alarm.level]
        if over:
            worst[alarm.metric] = (
                f"{alarm.severity.capitalize()}: {alarm.metric} was above {alarm.level:g} in {len(over)} of {len(steps)} steps "
                f"(first at step {over[0]}, highest {max(values):.3g}). {alarm.meaning}"
            )
    return worst
