"""From summaries of cells to what tables and the report show: arms with all their seeds, and differences of arms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from qerl.experiments.axes import axis_rows, axis_text, common_choice
from qerl.experiments.folders import Collection
from qerl.experiments.notes import WHOLE, machine, notes, policy
from qerl.experiments.pairs import CONFIDENCE, Cell, known_pairs, pair_rows, spread
from qerl.experiments.statistics import censored_median, pareto_front
from qerl.experiments.summary import asked, shares_of
from qerl.experiments.time_to_target import COSTS, device_seconds, time_to_target
from qerl.report.comparison import ArmRow, ChangedRow, Comparison, Curve, SeedRow, Spread, TargetRow
from qerl.report.text import flatten, plain

SURROUNDINGS = ("train.seed", "run.", "log.", "train.save", "train.keep", "model.device", "diagnostics.probe")
"""Settings that do not make an arm."""
ENDS = (
    "groups/mixed",
    "entropy",
    "probe/entropy_conditional/by_token",
    "completions/mean_length",
    "completions/clipped_ratio",
)
"""Metrics that are told of the beginning and the end of training."""


def compare_cells(collection: Collection, *, target: float | None = None) -> list[Comparison]:
    """One comparison for every matrix and phase, and one for all runs that belong to no matrix: protocols do not mix.

    Args:
        collection: what is compared.
        target: accuracy set beforehand, for runs that belong to no matrix.
    """
    groups: dict[tuple[str | None, str], list[Cell]] = {}
    for cell in map(_with_own_times, collection.cells):
        groups.setdefault((cell.get("matrix"), cell.get("phase", "run")), []).append(cell)
    order = {"final": 0, "run": 1, "tune": 2}
    keys = sorted(groups, key=lambda key: order.get(key[1], 3))
    own = {"plan": {"target": {"accuracy": target}}} if target is not None else {}
    return [
        _comparison(name, phase, groups[name, phase], own if name is None else collection.plans.get(name, {}))
        for name, phase in keys
    ]


def _comparison(name: str | None, phase: str, cells: Sequence[Cell], known: Mapping[str, Any]) -> Comparison:
    plan = known.get("plan") or {}
    stated = next((cell["target"] for cell in cells if cell.get("target")), plan.get("target")) or {}
    below = next((cell["collapsed_below"] for cell in cells if cell.get("collapsed_below") is not None), 0.5)
    by_arm = _by_arm(cells, alone=name is None)
    arms = _with_front([_arm(key, part, stated, below) for key, part in by_arm.items()])
    on_gpu = bool(cells) and all(cell.get("devices") for cell in cells if cell.get("steps"))
    with_config = [cell for cell in cells if cell.get("config")]
    return Comparison(
        title=name or "Runs side by side",
        protocol=plan.get("protocol") or next((cell["protocol"] for cell in cells if cell.get("protocol")), None),
        phase=phase,
        model=", ".join(dict.fromkeys(str(cell["model"]) for cell in cells if cell.get("model"))),
        evaluation=policy(with_config),
        confidence=CONFIDENCE,
        target=stated.get("accuracy"),
        target_budget=stated.get("device_seconds"),
        collapsed_below=below,
        on_gpu=on_gpu,
        arms=tuple(arms),
        pairs=tuple(pair_rows(by_arm, arms, known, phase)),
        curves=_curves(by_arm, arms),
        accuracy_curves=_accuracy_curves(by_arm, arms, lambda point: float(point["step"])),
        accuracy_by_seconds=_accuracy_curves(by_arm, arms, device_seconds),
        stage_seconds={arm.key: _mean_stages(by_arm[arm.key]) for arm in arms},
        changed=tuple(_changed(by_arm, arms)),
        choices=_choices(known) if phase == "final" else _common_choice(plan, phase, arms),
        notes=tuple(notes(cells, with_config, arms, plan)),
        machine=machine(cells),
    )


def _with_own_times(cell: Cell) -> Cell:
    """The cell; without its times if it shared its device with another, for they are not its own."""
    if not cell.get("shared_device"):
        return cell
    none = dict.fromkeys(("train_seconds", "device_seconds", "wall_seconds"))
    changes = {
        "train_seconds": None,
        "stage_seconds": None,
        "evaluations": [point | none for point in cell["evaluations"]],
        "curves": {key: curve for key, curve in cell["curves"].items() if not key.startswith("time/")},
    }
    return {**cell, **changes}


def _by_arm(cells: Sequence[Cell], *, alone: bool) -> dict[str, list[Cell]]:
    """Arm key -> its cells by seed. Runs without a matrix are one arm when only their surroundings differ."""
    found: dict[str, list[Cell]] = {}
    kinds: dict[str, str] = {}
    for cell in cells:
        if alone:
            settings = str(sorted(_own_settings(cell).items(), key=lambda item: item[0]))
            key = kinds.setdefault(settings, str(cell["run"]))
        else:
            key = str(cell["run"]).rpartition("-s")[0]
        found.setdefault(key, []).append(cell)
    return {key: sorted(part, key=lambda cell: cell.get("seed") or 0) for key, part in found.items()}


def _own_settings(cell: Cell) -> dict[str, Any]:
    flat = flatten(dict(cell.get("config") or {}))
    return {key: value for key, value in flat.items() if not key.startswith(SURROUNDINGS)}


def _arm(key: str, cells: Sequence[Cell], target: Mapping[str, Any], below: float) -> ArmRow:
    seeds = tuple(_seed(cell, target, below) for cell in cells)
    judged = [row for row in seeds if _is_judged(row)]
    # A run that failed made fewer steps: its time is not that of the arm.
    seconds = [row.device_seconds for row in judged if row.device_seconds and row.state in WHOLE]
    peaks = [row.peak_bytes for row in seeds if row.peak_bytes is not None]
    first = cells[0]
    axes = dict(first.get("axes") or {})
    suffix = axis_text(axes)
    label = str(first.get("label") or first.get("arm") or key)
    return ArmRow(
        key=key,
        label=f"{label} ({suffix})" if suffix else label,
        axes=axes,
        seeds=seeds,
        after=spread((row.after for row in seeds), share=True),
        gain=spread(None if row.after is None or row.before is None else row.after - row.before for row in seeds),
        final={name: part for name, part in _finals(cells).items() if part is not None},
        noise_effect=_noise_effects(cells),
        collapsed=sum(row.collapsed for row in judged),
        judged=len(judged),
        device_seconds=math.fsum(seconds) / len(seconds) if seconds else None,
        peak_bytes=max(peaks, default=None),
        target=_targets(seeds) if target else {},
        # The share falls while a model learns: that of a run that was cut short is not the arm's.
        mixed=spread(
            (_over_steps(cell, "groups/mixed", fmean) for cell in cells if cell["state"] in WHOLE), share=True
        ),
        ends=_ends(cells),
        step_seconds=spread(_over_steps(cell, "time/step", median) for cell in cells),
        on_front=False,
        temperature=(first.get("matched") or {}).get("temperature"),
    )


def _is_judged(row: SeedRow) -> bool:
    """Whether a run says what becomes of its arm: it made all its steps, or its training could not go on. One that the machine ended
    does not."""
    return row.state in WHOLE or row.collapsed


def _over_steps(cell: Cell, key: str, average: Callable[[Sequence[float]], float]) -> float | None:
    curve = cell["curves"].get(key)
    return average(curve[1]) if curve else None


def _ends(cells: Sequence[Cell]) -> dict[str, tuple[Spread, Spread]]:
    whole = [cell for cell in cells if cell["state"] in WHOLE]
    found = {}
    for key in ENDS:
        first = spread(_over_steps(cell, key, lambda values: fmean(values[: _tenth(values)])) for cell in whole)
        last = spread(_over_steps(cell, key, lambda values: fmean(values[-_tenth(values) :])) for cell in whole)
        if first is not None and last is not None:
            found[key] = (first, last)
    return found


def _tenth(values: Sequence[float]) -> int:
    return max(1, len(values) // 10)


def _seed(cell: Cell, target: Mapping[str, Any], below: float) -> SeedRow:
    points = list(cell["evaluations"])
    before = next((point["accuracy"] for point in points if point["step"] == 0), None)
    after = accuracy_after(cell)
    fell = after is not None and before is not None and after < below * before
    reached = time_to_target(points, float(target["accuracy"]), target.get("device_seconds")) if target else None
    peak = cell.get("peak_memory") or {}
    train = cell.get("train_seconds")
    return SeedRow(
        name=str(cell["run"]),
        seed=cell.get("seed"),
        state=str(cell["state"]),
        error=cell.get("error"),
        steps=int(cell.get("steps") or 0),
        planned_steps=cell.get("planned_steps"),
        before=before,
        after=after,
        collapsed=fell or (cell["state"] == "failed" and bool(cell.get("collapse"))),
        bit_exact=cell.get("bit_exact"),
        device_seconds=None if train is None else train * (cell.get("devices") or 1),
        peak_bytes=peak.get("bytes"),
        target_step=None if reached is None else reached.step,
        target={} if reached is None else reached.spent,
        target_bound={} if reached is None else reached.bound,
    )


def accuracy_after(cell: Cell) -> float | None:
    """Last accuracy of a run that made all its steps; None of others, and of one that was not evaluated after its start."""
    points = cell["evaluations"]
    ended = cell["state"] in WHOLE and bool(points) and points[-1]["step"] > 0
    return float(points[-1]["accuracy"]) if ended else None


def _finals(cells: Sequence[Cell]) -> dict[str, Spread | None]:
    names = dict.fromkeys(name for cell in cells for name in cell["final"])
    return {name: spread((cell["final"].get(name, {}).get("accuracy") for cell in cells), share=True) for name in names}


def _noise_effects(cells: Sequence[Cell]) -> dict[str, Spread]:
    """Greedy evaluation under noise minus the clean evaluation after training, of each run."""
    found: dict[str, list[float]] = {}
    for cell in cells:
        clean = cell["questions"].get("after")
        for name, value in cell["final"].items():
            noisy = cell["questions"].get(name)
            under_noise = (value.get("policy") or {}).get("noise") is not None
            if under_noise and clean and noisy and asked(clean) == asked(noisy):
                pairs = known_pairs(shares_of(clean), shares_of(noisy))
                if pairs:
                    found.setdefault(name, []).append(math.fsum(b - a for a, b in pairs) / len(pairs))
    return {name: part for name, values in found.items() if (part := spread(values)) is not None}


def _targets(seeds: Sequence[SeedRow]) -> dict[str, TargetRow]:
    """Cost -> median over the runs that have ended or reached the target; none where what one of them spent to reach it is not known."""
    counted = [row for row in seeds if _is_judged(row) or row.target_step is not None]
    reached = [row for row in counted if row.target_step is not None]
    found = {}
    for cost in COSTS:
        if any(row.target.get(cost) is None for row in reached):
            found[cost] = TargetRow(value=None, above=None, reached=len(reached), count=len(counted))
            continue
        median = censored_median(
            [row.target.get(cost) for row in counted], [row.target_bound.get(cost) for row in counted]
        )
        found[cost] = TargetRow(value=median.value, above=median.above, reached=median.reached, count=median.count)
    return found


def _with_front(arms: Sequence[ArmRow]) -> list[ArmRow]:
    """Marks the arms on the front of accuracy (mean over seeds), device-seconds and peak memory. One arm alone that has all three is
    on none: it beats nobody."""
    points = [(None if arm.after is None else -arm.after.mean, arm.device_seconds, arm.peak_bytes) for arm in arms]
    if sum(None not in point for point in points) < 2:
        return list(arms)
    return [replace(arm, on_front=on_front) for arm, on_front in zip(arms, pareto_front(points), strict=True)]


def _curves(by_arm: Mapping[str, Sequence[Cell]], arms: Sequence[ArmRow]) -> dict[str, tuple[Curve, ...]]:
    found: dict[str, list[Curve]] = {}
    for arm in arms:
        for cell in by_arm[arm.key]:
            for key, (steps, values) in cell["curves"].items():
                found.setdefault(key, []).append(
                    Curve(arm=arm.key, seed=cell.get("seed"), steps=tuple(steps), values=tuple(values))
                )
    return {key: tuple(curves) for key, curves in found.items()}


def _accuracy_curves(
    by_arm: Mapping[str, Sequence[Cell]], arms: Sequence[ArmRow], place: Callable[[Mapping[str, Any]], float | None]
) -> tuple[Curve, ...]:
    """Evaluations of every run over ``place``; those without one are left out."""
    found = []
    for arm in arms:
        for cell in by_arm[arm.key]:
            points = [(x, float(point["accuracy"])) for point in cell["evaluations"] if (x := place(point)) is not None]
            if points:
                steps, values = zip(*points, strict=True)
                found.append(Curve(arm=arm.key, seed=cell.get("seed"), steps=steps, values=values))
    return tuple(found)


def _mean_stages(cells: Sequence[Cell]) -> dict[str, float]:
    rows = [cell["stage_seconds"] for cell in cells if cell.get("stage_seconds")]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: math.fsum(float(row.get(name, 0.0)) for row in rows) / len(rows) for name in names}


def _changed(by_arm: Mapping[str, Sequence[Cell]], arms: Sequence[ArmRow]) -> list[ChangedRow]:
    """Settings that are not the same in all arms; of an arm no run of which has begun none are known, and none differ."""
    settings = [next(filter(None, map(_own_settings, by_arm[arm.key])), {}) for arm in arms]
    rows = []
    for key in dict.fromkeys(key for part in settings for key in part):
        values = [part.get(key) for part in settings if part]
        if any(value != values[0] for value in values):
            rows.append(ChangedRow(key=key, values=tuple(part.get(key) if part else "–" for part in settings)))
    return rows


def _common_choice(plan: Mapping[str, Any], phase: str, arms: Sequence[ArmRow]) -> tuple[str, ...]:
    """Under mechanism: the value of the axes that one rule takes for all arms."""
    choice = common_choice(axis_rows(arms)) if plan.get("protocol") == "mechanism" and phase == "run" else None
    return () if choice is None else (choice,)


def _choices(known: Mapping[str, Any]) -> tuple[str, ...]:
    found = []
    for arm, choice in (known.get("choices") or {}).items():
        chosen = choice["axes"]
        what = "none" if chosen is None else ", ".join(f"{key} {plain(value)}" for key, value in chosen.items())
        score = "" if choice["score"] is None else f" at {choice['score']:.1%}"
        found.append(f"{arm}: {what}{score}, best of {choice['trials']} trials, {choice['failed']} failed")
    return tuple(found)
