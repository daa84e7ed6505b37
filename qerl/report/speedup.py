"""Speed-up of one run over another, with its denominator stated.

A step of the baseline takes T seconds, the fraction f of them generating answers. The other run generates s times as fast and takes
eta T seconds more (or less, eta < 0) for everything else:

    S = 1 / ((1 - f) + f / s + eta)          it pays while eta < f (1 - 1/s)

So f = .7, s = 1.5 gives 1.30, with eta = .2 no more than 1.03; f = .4 and eta = .2 make a loss, .94. Changing over between engine and
trainer is no part of generation: it is in eta, once. Only runs that did the same work have a speed-up: where tokens differ, the other run's
seconds are scaled to the baseline's tokens, stage by stage (changing over, which moves memory and no tokens, as it is), and that is said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qerl.errors import RunFolderError
from qerl.report.collect import RunData

SAME_TOKENS = 0.02
"""Relative difference of token totals up to which two runs did the same work."""
WORKLOAD = (
    "rollout.prompts_per_step",
    "rollout.group_size",
    "rollout.max_new_tokens",
    "optim.updates_per_rollout",
    "model.path",
)
"""Settings that say how much work a step is."""


def speed_up(fraction: float, stage: float, overhead: float = 0.0) -> float:
    """S of the module's formula.

    Args:
        fraction: f, share of the baseline's time in the stage that is faster, in [0, 1].
        stage: s > 0, how much faster it is.
        overhead: eta, time added elsewhere, in units of the baseline's.
    """
    return 1.0 / ((1.0 - fraction) + fraction / stage + overhead)


def break_even(fraction: float, stage: float) -> float:
    """The overhead eta at which a faster stage gains nothing: f (1 - 1/s)."""
    return fraction * (1.0 - 1.0 / stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run against a baseline. Seconds are medians of the steps that both have, the first left out."""

    baseline: str
    steps: int
    seconds: float
    baseline_seconds: float
    fraction: float
    """f: generation's share of the baseline's step."""
    stage: float
    """s: the baseline's generation time over this run's, at equal tokens."""
    overhead: float
    """eta: what the rest takes more than in the baseline, over the baseline's step, at equal tokens."""
    switch: float
    """Of eta, what changing over between engine and trainer takes more."""
    prompt_tokens: tuple[float, float]
    """A step, (this run, baseline)."""
    completion_tokens: tuple[float, float]
    differences: tuple[str, ...]
    """What makes the workloads or machines differ, in words; empty when they are the same."""

    @property
    def predicted(self) -> float:
        """S from f, s and eta."""
        return speed_up(self.fraction, self.stage, self.overhead)

    @property
    def measured(self) -> float:
        """The baseline's step over this run's, by the clock."""
        return self.baseline_seconds / self.seconds

    @property
    def same_work(self) -> bool:
        """Whether the seconds may be compared as they are."""
        return not self.differences


def compare_speed(run: RunData, baseline: RunData) -> Comparison:
    """Compare the steps that both runs have.

    Raises:
        RunFolderError: a run has no steps. A baseline that ran out of memory is not runnable, and no speed-up is made of it.
    """
    ours, theirs = _by_step(run), _by_step(baseline)
    steps = sorted(ours.keys() & theirs.keys())
    if not steps:
        raise RunFolderError(
            "two runs without a step in common cannot be compared",
            got=f"{run.name} has {len(ours)} steps, {baseline.name} has {len(theirs)}",
            remedy="A baseline that did not run (out of memory, say) is not runnable: that is no speed-up",
        )
    steps = steps[1:] or steps
    rows, base_rows = [ours[step] for step in steps], [theirs[step] for step in steps]
    total, base_total = _median(rows, "time/step"), _median(base_rows, "time/step")
    rollout, base_rollout = _median(rows, "time/rollout"), _median(base_rows, "time/rollout")
    switch, base_switch = _median(rows, "time/switch"), _median(base_rows, "time/switch")
    prompt = (_sum(rows, "tokens/prompt") / len(steps), _sum(base_rows, "tokens/prompt") / len(steps))
    completion = (_sum(rows, "tokens/completion") / len(steps), _sum(base_rows, "tokens/completion") / len(steps))
    differences = _differences(run, baseline, prompt, completion)
    generated = completion[1] / completion[0]
    seen = (prompt[1] + completion[1]) / (prompt[0] + completion[0])
    return Comparison(
        baseline=baseline.name,
        steps=len(steps),
        seconds=total,
        baseline_seconds=base_total,
        fraction=base_rollout / base_total,
        stage=base_rollout / (rollout * generated),
        overhead=((total - rollout - switch) * seen + switch - (base_total - base_rollout)) / base_total,
        switch=(switch - base_switch) / base_total,
        prompt_tokens=prompt,
        completion_tokens=completion,
        differences=differences,
    )


def comparison_rows(found: Comparison) -> list[tuple[str, str]]:
    """The comparison as labels and values."""
    rows = [
        ("baseline", f"{found.baseline}, {found.steps} steps in common"),
        ("seconds a step (median)", f"{found.seconds:.3g}, baseline {found.baseline_seconds:.3g}"),
        ("f, generation's share of the baseline's step", f"{found.fraction:.3f}"),
        ("s, generation is faster by", f"{found.stage:.3f}"),
        ("eta, what the rest takes more", f"{found.overhead:+.3f} of the baseline's step"),
        ("of it, changing over between engine and trainer", f"{found.switch:+.3f}"),
    ]
    if found.same_work:
        rows.append(("speed-up end to end, by the clock", f"{found.measured:.3f}"))
        rows.append(("the same from f, s and eta", f"{found.predicted:.3f}"))
    else:
        rows.append(("speed-up end to end", "not stated: the runs did different work"))
        rows += [("different", text) for text in found.differences]
        rows.append(("scaled to the baseline's tokens, from f, s and eta", f"{found.predicted:.3f}"))
    bound = break_even(found.fraction, found.stage)
    pays = "pays" if found.overhead < bound else "does not pay"
    rows.append(("break-even", f"eta < f (1 - 1/s) = {bound:.3f}: it {pays}"))
    return rows


def _differences(
    run: RunData, baseline: RunData, prompt: tuple[float, float], completion: tuple[float, float]
) -> tuple[str, ...]:
    found = [
        f"{kind} tokens a step: {ours:,.0f}, baseline {theirs:,.0f}"
        for kind, (ours, theirs) in (("prompt", prompt), ("answer", completion))
        if abs(ours - theirs) > SAME_TOKENS * max(ours, theirs)
    ]
    found += [
        f"{key}: {run.setting(key)}, baseline {baseline.setting(key)}"
        for key in WORKLOAD
        if run.setting(key) != baseline.setting(key)
    ]
    machines = [_machine(data) for data in (run, baseline)]
    if machines[0] != machines[1]:
        found.append(f"machine: {machines[0]}, baseline {machines[1]}")
    return tuple(found)


def _machine(run: RunData) -> str:
    """Device of a run: its GPUs, or its processor."""
    gpus = [str(gpu["name"]) for gpu in run.env.get("gpus") or []]
    return ", ".join(gpus) or str((run.env.get("cpu") or {}).get("model") or "unknown")


def _by_step(run: RunData) -> dict[int, dict[str, float]]:
    return {int(row["step"]): row for row in run.metrics if row.get("time/step")}


def _median(rows: Sequence[dict[str, float]], key: str) -> float:
    """Of a stage; runs from before it was timed have none of it."""
    values = sorted(float(row.get(key, 0.0)) for row in rows)
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def _sum(rows: Sequence[dict[str, float]], key: str) -> float:
    return math.fsum(float(row[key]) for row in rows)
