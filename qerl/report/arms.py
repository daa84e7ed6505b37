"""The report of several runs: arms with all their seeds, their differences, what they cost. One page, no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qerl.metrics.files import whole_file
from qerl.report import text
from qerl.report.arm_parts import color_of, round_of
from qerl.report.comparison import ArmRow, Comparison, Spread, TargetRow
from qerl.report.page import fill, import_renderers
from qerl.report.plots_arms import arm_panels
from qerl.units import bytes_text

SECTIONS = (("quality", "Quality"), ("signal", "Learning signal"), ("bytes", "Time and memory"))
"""Sections of figures: id and heading."""
COST_NAMES = {"wall_seconds": "wall time", "device_seconds": "device time", "tokens": "tokens", "samples": "answers"}
NONE = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One of the three questions: a line an arm, and what it does not say."""

    id: str
    title: str
    rows: tuple[tuple[str, str], ...]
    """Arm and figure."""
    remark: str


def write_arms_report(comparisons: Sequence[Comparison], out: Path) -> Path:
    """Writes the page.

    Raises:
        MissingDependencyError: plotly or jinja2 is not installed.
    """
    with whole_file(out) as part:
        part.write_text(render_arms(comparisons), encoding="utf-8")
    return out


def render_arms(comparisons: Sequence[Comparison]) -> str:
    """The text of the page; one part a comparison, for protocols do not mix."""
    import_renderers()
    parts = []
    panels = []
    for index, comparison in enumerate(comparisons):
        prefix = f"t{index}-"
        shown = arm_panels(comparison, prefix)
        panels += shown
        parts.append(
            {
                "id": f"t{index}",
                "comparison": comparison,
                "heading": heading(comparison),
                "cards": cards(comparison),
                "finals": list(dict.fromkeys(name for arm in comparison.arms for name in arm.final)),
                "effects": list(dict.fromkeys(name for arm in comparison.arms for name in arm.noise_effect)),
                "costs": _costs(comparison),
                "sections": [(id, title, [p for p in shown if p.section == id]) for id, title in SECTIONS],
            }
        )
    return fill(
        "arms.html",
        panels,
        parts=parts,
        title=heading(comparisons[0])
        if len(comparisons) == 1
        else ", ".join(dict.fromkeys(comparison.title for comparison in comparisons)),
        spread_percent=spread_percent,
        seeds_text=seeds_text,
        spread_points=spread_points,
        target_text=target_text,
        color_of=color_of,
        round_of=round_of,
        cost_names=COST_NAMES,
    )


def heading(comparison: Comparison) -> str:
    """Name of a part: matrix, protocol and phase."""
    if comparison.protocol is None:
        return comparison.title
    phase = {"tune": ", trials", "final": ", final runs"}.get(comparison.phase, "")
    protocol = comparison.protocol.replace("_", " ")
    return f"{comparison.title}{phase}" if comparison.title == protocol else f"{comparison.title}: {protocol}{phase}"


def cards(comparison: Comparison) -> list[Card]:
    """The three questions, kept apart, arm by arm."""
    return [_bytes_card(comparison), _signal_card(comparison), _quality_card(comparison)]


def _bytes_card(comparison: Comparison) -> Card:
    rows = []
    timed = any(arm.step_seconds is not None or comparison.stage_seconds.get(arm.key) for arm in comparison.arms)
    for arm in comparison.arms:
        stages = comparison.stage_seconds.get(arm.key, {})
        working = sum(seconds for name, seconds in stages.items() if name not in ("evaluate", "save"))
        share = f"{stages['rollout'] / working:.0%}" if working and "rollout" in stages else NONE
        step = NONE if arm.step_seconds is None else text.seconds(arm.step_seconds.mean)
        times = f"{step} · {share} · " if timed else ""
        known = arm.step_seconds is not None or stages or arm.peak_bytes is not None
        rows.append((arm.label, times + bytes_text(arm.peak_bytes) if known else NONE))
    what = (
        "Median step, share of generation in it, peak memory."
        if timed
        else "Peak memory alone: no run has times of its own."
    )
    remark = f"{what} A format that holds fewer bytes is faster only where bytes were the bottleneck."
    return Card(id="bytes", title="Are fewer bytes moved at the real bottleneck?", rows=tuple(rows), remark=remark)


def _signal_card(comparison: Comparison) -> Card:
    rows = tuple((arm.label, spread_percent(arm.mixed)) for arm in comparison.arms)
    remark = "Share of mixed groups, mean over the steps of a run, with its interval over seeds. More signal is not yet more learned."
    return Card(id="signal", title="Do more groups carry a learning signal?", rows=rows, remark=remark)


def _quality_card(comparison: Comparison) -> Card:
    if comparison.target is None:
        remark = "No target was set beforehand, so no time to one can be stated."
        return Card(id="quality", title="Is a preset quality reached sooner?", rows=(), remark=remark)
    rows = tuple((arm.label, _short_target(arm.target.get("device_seconds"))) for arm in comparison.arms)
    budget = "" if comparison.target_budget is None else f" within {text.seconds(comparison.target_budget)}"
    remark = (
        f"{comparison.time_name[:1].upper()}{comparison.time_name[1:]} to {100 * comparison.target:g}%{budget}, median over seeds, and how many reached it. What was not reached is "
        "censored at what had been spent, not extrapolated."
    )
    return Card(id="quality", title="Is a preset quality reached sooner?", rows=rows, remark=remark)


def _short_target(row: TargetRow | None) -> str:
    if row is None or row.count == 0:
        return NONE
    return f"{_known(row, text.seconds)} · {row.reached} of {row.count}"


def _known(row: TargetRow, shown: Callable[[float], str]) -> str:
    if row.value is not None:
        return shown(row.value)
    if row.above is not None:
        return f"> {shown(row.above)}"
    return "reached" if row.reached else "not reached"


def seeds_text(arm: ArmRow) -> str:
    """Runs with a result; of how many, where some have none."""
    ended = sum(row.after is not None for row in arm.seeds)
    return str(ended) if ended == len(arm.seeds) else f"{ended} of {len(arm.seeds)}"


def _costs(comparison: Comparison) -> list[str]:
    """Costs to the target that any arm has a figure for."""
    return [cost for cost in COST_NAMES if any(_has_figure(arm, cost) for arm in comparison.arms)]


def _has_figure(arm: ArmRow, cost: str) -> bool:
    row = arm.target.get(cost)
    return row is not None and (row.value is not None or row.above is not None)


def spread_percent(value: Spread | None) -> str:
    """``44.2% (42.0–46.4%)``; the mean alone where there is no interval."""
    if value is None:
        return NONE
    ends = "" if value.low is None else f" ({text.interval(value.low, value.high)})"
    return f"{text.percent(value.mean)}{ends}"


def spread_points(value: Spread | None) -> str:
    """``+1.2 (−0.3 to +2.7)`` in percentage points."""
    if value is None:
        return NONE
    ends = (
        "" if value.low is None or value.high is None else f" ({text.points(value.low)} to {text.points(value.high)})"
    )
    return f"{text.points(value.mean)}{ends}"


def target_text(row: TargetRow | None, cost: str) -> str:
    """Median cost to the target, or what it is known to exceed, and how many seeds reached it."""
    if row is None or row.count == 0:
        return NONE
    return f"{_known(row, text.seconds if cost.endswith('seconds') else text.count)} ({row.reached} of {row.count})"
