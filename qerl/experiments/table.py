"""The tables of the README, from committed summaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qerl.experiments.axes import AxisRow, axis_rows
from qerl.report import text
from qerl.report.comparison import ArmRow, Comparison, PairRow, Spread
from qerl.units import bytes_text

DASH = "–"


def markdown(comparisons: Sequence[Comparison]) -> str:
    """One table of arms and one of differences for each comparison, with what they stand on."""
    return "\n\n".join(_section(comparison) for comparison in comparisons)


def _section(comparison: Comparison) -> str:
    phase = {"tune": ", trials", "final": ", final runs"}.get(comparison.phase, "")
    parts = [f"**{comparison.title}** (protocol {comparison.protocol or 'none'}{phase}): {_conditions(comparison)}"]
    parts.append(_arms(comparison))
    if any(arm.ends for arm in comparison.arms):
        parts.append(_signal(comparison))
    rows = axis_rows(comparison.arms) if comparison.protocol == "mechanism" else []
    if rows:
        parts.append(_axis(rows))
    if comparison.known_pairs:
        parts.append(_pairs(comparison))
    unanswered = [f"Not yet against {first}: {'; '.join(arms)}." for first, arms in comparison.open_pairs.items()]
    remarks = [*comparison.choices, *unanswered, *comparison.notes]
    if remarks:
        parts.append("\n".join(f"* {remark}" for remark in remarks))
    return "\n\n".join(parts)


def _conditions(comparison: Comparison) -> str:
    parts = [comparison.model, comparison.machine, comparison.evaluation]
    intervals = f"{100 * comparison.confidence:g} % t-intervals over seeds"
    return "; ".join(part for part in [*parts, intervals] if part) + "."


def _arms(comparison: Comparison) -> str:
    finals = list(dict.fromkeys(name for arm in comparison.arms for name in arm.final))
    effects = list(dict.fromkeys(name for arm in comparison.arms for name in arm.noise_effect))
    head = ["Arm", "Seeds", "Before", "After", "Gain, points", *finals]
    head += [*(f"{name} − clean, points" for name in effects), "Collapsed"]
    if comparison.target is not None:
        head.append(f"{comparison.time_name} to {100 * comparison.target:g} %")
    head += [comparison.time_name, "Peak memory", "Front"]
    rows = [_arm(comparison, arm, finals, effects) for arm in comparison.arms]
    return _table(head, rows)


def _arm(comparison: Comparison, arm: ArmRow, finals: Sequence[str], effects: Sequence[str]) -> list[str]:
    before = [row.before for row in arm.seeds if row.before is not None]
    temperature = "" if arm.temperature is None else f", T {arm.temperature:.3f}"
    row = [
        arm.label + temperature,
        " ".join(f"{100 * value:.1f}" for value in arm.after.values) if arm.after else DASH,
        f"{100 * sum(before) / len(before):.1f} %" if before else DASH,
        percent_spread(arm.after),
        points_spread(arm.gain),
        *(percent_spread(arm.final.get(name)) for name in finals),
        *(points_spread(arm.noise_effect.get(name)) for name in effects),
        f"{arm.collapsed} of {arm.judged}",
    ]
    if comparison.target is not None:
        row.append(target_text(arm, "device_seconds"))
    seconds = DASH if arm.device_seconds is None else f"{arm.device_seconds:.0f}"
    return [*row, seconds, bytes_text(arm.peak_bytes), "yes" if arm.on_front else ""]


SIGNAL = (
    ("groups/mixed", "Mixed groups", 100, 1, " %"),
    ("entropy", "Entropy of the sampled answers, nats a token", 1, 3, ""),
    ("probe/entropy_conditional/by_token", "Entropy on the probe set", 1, 3, ""),
    ("completions/mean_length", "Tokens an answer", 1, 0, ""),
    ("completions/clipped_ratio", "Cut off", 100, 1, " %"),
)
"""Metric, column, factor, decimals and unit of what is told of the first and the last tenth of the steps."""


def _signal(comparison: Comparison) -> str:
    """What there was to learn from, over all steps and from the first to the last tenth of them."""
    shown = [row for row in SIGNAL if any(row[0] in arm.ends for arm in comparison.arms)]
    head = ["First → last tenth of the steps", "Mixed groups, all steps", *(title for _, title, *_ in shown)]
    rows = []
    for arm in comparison.arms:
        if not arm.ends:
            continue
        cells = []
        for key, _, factor, places, unit in shown:
            ends = arm.ends.get(key)
            values = [] if ends is None else [text.decimals(factor * end.mean, places) for end in ends]
            cells.append(" → ".join(values) + unit if values else DASH)
        rows.append([arm.label, percent_spread(arm.mixed), *cells])
    return _table(head, rows)


def _axis(rows: Sequence[AxisRow]) -> str:
    """A line a value: accuracy after training of each arm, with how many of its runs collapsed."""
    arms = list(dict.fromkeys(label for row in rows for label in row.arms))
    lines = []
    for row in rows:
        cells = [row.arms.get(label) for label in arms]
        texts = [
            DASH if arm is None else f"{percent_spread(arm.after)} ({arm.collapsed} of {arm.judged})" for arm in cells
        ]
        mean = DASH if row.mean is None else f"{100 * row.mean:.1f} %"
        lines.append([row.name, *texts, mean, f"{row.collapsed} of {row.judged}"])
    return _table(["After training (collapsed)", *arms, "Mean over arms", "Collapsed"], lines)


def _pairs(comparison: Comparison) -> str:
    finals = comparison.paired_finals
    known = next((row.pooled for row in comparison.pairs if row.pooled is not None), None)
    scatter = "" if known is None else f" (sd {100 * known.sd:.1f}, {known.freedom} degrees of freedom)"
    head = [
        "Difference",
        "Over shared seeds, points",
        "Verdict",
        f"Over all seeds, scatter pooled{scatter}, points",
        "Its p (Holm)",
        *(f"{name}, points" for name in finals),
        "Over questions, points",
        "Before training, over questions, points",
        "McNemar p by seed",
        "Detectable, planned (finished) seeds",
    ]
    return _table(head, [_pair(row, finals) for row in comparison.known_pairs])


def _pair(row: PairRow, finals: Sequence[str]) -> list[str]:
    axes = ", ".join(f"{key.rpartition('.')[2]} {text.plain(value)}" for key, value in row.axes.items())
    questions = DASH
    if row.question_difference is not None and row.question_low is not None and row.question_high is not None:
        questions = _points(row.question_difference, row.question_low, row.question_high)
    return [
        f"{row.second} − {row.first}" + (f" ({axes})" if axes and "(" not in row.second else ""),
        points_spread(row.over_seeds),
        row.verdict,
        DASH if row.pooled is None else _points(row.pooled.mean, row.pooled.low, row.pooled.high),
        DASH if row.pooled is None else f"{row.pooled.p_value:.2g}",
        *(points_spread(row.finals.get(name)) for name in finals),
        questions,
        DASH if row.before is None else _points(row.before.mean, row.before.low, row.before.high),
        ", ".join(f"{test.p_value:.2g}" for test in row.tests) or DASH,
        _detectable(row),
    ]


def _detectable(row: PairRow) -> str:
    """``2.0 (4.1)``; once where the seeds are those that were planned."""
    planned, now = (DASH if value is None else f"{100 * value:.1f}" for value in (row.detectable, row.detectable_now))
    return planned if now == planned else f"{planned} ({now})"


def percent_spread(value: Spread | None) -> str:
    """``44.2 % [42.0, 46.4]``; without an interval for one seed."""
    if value is None:
        return DASH
    if value.low is None or value.high is None:
        return f"{100 * value.mean:.1f} %"
    return f"{100 * value.mean:.1f} % [{100 * value.low:.1f}, {100 * value.high:.1f}]"


def points_spread(value: Spread | None) -> str:
    """``+1.2 [−0.3, +2.7]`` in percentage points."""
    if value is None:
        return DASH
    if value.low is None or value.high is None:
        return text.points(value.mean)
    return _points(value.mean, value.low, value.high)


def _points(mean: float, low: float, high: float) -> str:
    return f"{text.points(mean)} [{text.points(low)}, {text.points(high)}]"


def target_text(arm: ArmRow, cost: str) -> str:
    """Median cost to the target, or that it is above what was spent, with how many seeds reached it."""
    row = arm.target.get(cost)
    if row is None or row.count == 0:
        return DASH
    reached = f"({row.reached} of {row.count})"
    if row.value is not None:
        return f"{row.value:.0f} {reached}"
    if row.above is not None:
        return f"censored, > {row.above:.0f} {reached}"
    return f"{'reached, time unknown' if row.reached else 'not reached'} {reached}"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    # A label may have several lines, a row may not.
    return "\n".join(
        "| " + " | ".join(" ".join(str(cell).splitlines()).replace("|", "\\|") for cell in line) + " |"
        for line in lines
    )
