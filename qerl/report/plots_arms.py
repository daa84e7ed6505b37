"""Figures of several runs: arms with all their seeds, differences, curves over seeds, time to target, the front."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from qerl.metrics.machine_catalogue import STAGES
from qerl.report.arm_parts import color_of, round_of, safe, target_line
from qerl.report.comparison import Comparison, PairRow
from qerl.report.plot_parts import PERCENT, Panel, new_figure, rounded
from qerl.report.plots_courses import CURVES, accuracy_by_seconds, accuracy_by_step, metric
from qerl.report.plots_machine import STAGE_COLORS
from qerl.units import bytes_text

if TYPE_CHECKING:
    import plotly.graph_objects as go

ROW_PIXELS = 62
"""Height of a line of a figure with one for each arm or difference (``arms.html``)."""


def arm_panels(comparison: Comparison, prefix: str) -> list[Panel]:
    """All figures of a comparison that have data; ``prefix`` keeps their ids apart from those of another."""
    panels = [
        _accuracy(comparison, prefix),
        _differences(comparison, prefix),
        accuracy_by_step(comparison, prefix),
        accuracy_by_seconds(comparison, prefix),
        _front(comparison, prefix),
        *(metric(comparison, prefix, *row) for row in CURVES),
        _stages(comparison, prefix),
    ]
    return [panel for panel in panels if panel is not None]


def _accuracy(comparison: Comparison, prefix: str) -> Panel | None:
    """One line an arm: every seed, mean and interval, and where the arm began."""
    arms = [arm for arm in comparison.arms if arm.after is not None]
    if not arms:
        return None
    figure = new_figure(
        xaxis={"title": "held-out accuracy", "tickformat": PERCENT, "showgrid": True},
        yaxis={"autorange": "reversed", "showgrid": False, "tickfont": {"color": "var(--ink)"}},
    )
    figure.update_layout(hovermode="closest", showlegend=False)
    for index, arm in enumerate(comparison.arms):
        if arm.after is None:
            continue
        color = f"var(--c-{color_of(index)})"
        if arm.after.low is not None and arm.after.high is not None:
            _bar(figure, wrapped(arm.label), arm.after.low, arm.after.high, f"var(--c-{color_of(index)}-soft2)", 11)
        ended = [row for row in arm.seeds if row.after is not None]
        _dots(
            figure,
            wrapped(arm.label),
            [row.after or 0.0 for row in ended],
            color,
            "circle-open" if round_of(index) % 2 else "circle",
            9,
            [f"seed {row.seed}" for row in ended],
        )
        if len(ended) > 1:
            _dots(figure, wrapped(arm.label), [arm.after.mean], "var(--ink)", "line-ns", 16, ["mean over seeds"])
        before = [row.before for row in arm.seeds if row.before is not None]
        if before:
            _dots(figure, wrapped(arm.label), [fmean(before)], "var(--c-slate)", "diamond-open", 9, ["before training"])
    if comparison.target is not None:
        target_line(figure, comparison.target, vertical=True)
    _pad(figure, [] if comparison.target is None else [comparison.target])
    caption = (
        f"Every dot is a seed; the bar is the {100 * comparison.confidence:g}% t-interval of their mean, the stroke the mean, the diamond "
        "the accuracy before training."
    )
    return Panel(
        id=f"{prefix}accuracy",
        section="quality",
        title="Accuracy by arm",
        caption=caption,
        figure=figure,
        wide=True,
        rows=len(arms),
    )


def _differences(comparison: Comparison, prefix: str) -> Panel | None:
    rows = [row for row in comparison.pairs if row.over_seeds is not None]
    if not rows:
        return None
    figure = new_figure(
        xaxis={
            "title": "difference, percentage points",
            "showgrid": True,
            "zeroline": True,
            "zerolinecolor": "var(--muted)",
        },
        yaxis={"autorange": "reversed", "showgrid": False, "tickfont": {"color": "var(--ink)"}},
    )
    figure.update_layout(hovermode="closest", showlegend=False)
    for row in rows:
        assert row.over_seeds is not None
        name = pair_name(row)
        if row.detectable is not None:
            _bar(figure, name, -100 * row.detectable, 100 * row.detectable, "var(--grid)", 22)
        if row.question_low is not None and row.question_high is not None:
            _bar(figure, name, 100 * row.question_low, 100 * row.question_high, "var(--c-amber-soft2)", 12)
        spread = row.over_seeds
        if spread.low is not None and spread.high is not None:
            _bar(figure, name, 100 * spread.low, 100 * spread.high, "var(--c-blue)", 3)
        _dots(
            figure,
            name,
            [100 * value for value in spread.values],
            "var(--c-blue)",
            "circle",
            8,
            ["one seed"] * len(spread.values),
        )
        if len(spread.values) > 1:
            _dots(figure, name, [100 * spread.mean], "var(--ink)", "line-ns", 16, ["mean over seeds"])
    _pad(figure, [0.0])
    cut = _cut(figure, rows)
    caption = (
        "Second arm minus first. Dots: runs with one seed. Blue line: t-interval over seeds, of which the verdict is. Amber: "
        "interval over questions, of these very models. Grey: smaller than what was stated to be detectable."
        f"{' A blue line that leaves the picture is longer than it.' if cut else ''}"
    )
    return Panel(
        id=f"{prefix}differences",
        section="quality",
        title="Paired differences",
        caption=caption,
        figure=figure,
        wide=True,
        rows=_rows_for([pair_name(row) for row in rows]),
    )


def _rows_for(names: Sequence[str]) -> int:
    """Lines of a figure whose names do not run into one another: one each, more where a name has more than three lines of text."""
    tallest = max(name.count("<br>") + 1 for name in names)
    return math.ceil(len(names) * max(1.0, (15 * tallest + 8) / ROW_PIXELS))


def _cut(figure: go.Figure, rows: Sequence[PairRow]) -> bool:
    """Keeps intervals over a few seeds from squeezing all other marks: none is shown beyond twice what else is there."""
    marks = [0.0]
    for row in rows:
        marks += [row.detectable or 0.0, *(row.over_seeds.values if row.over_seeds else ())]
        marks += [row.question_low or 0.0, row.question_high or 0.0]
    most = 200 * max(abs(mark) for mark in marks)
    low, high = figure.layout.xaxis.range
    if not most or (low >= -most and high <= most):
        return False
    figure.update_xaxes(range=[max(low, -most), min(high, most)])
    return True


def pair_name(row: PairRow) -> str:
    """The pair in short lines."""
    return f"{wrapped(row.second)}<br>− {wrapped(row.first)}"


def wrapped(label: str) -> str:
    """A label in lines that leave room for the figure on a phone, safe where plotly reads tags."""
    lines = textwrap.wrap(label, 22, break_long_words=False) or [label]
    return "<br>".join(safe(line) for line in lines)


def _front(comparison: Comparison, prefix: str) -> Panel | None:
    """Accuracy over time, with memory as the size of the mark; none of one arm alone."""
    arms = [arm for arm in comparison.arms if arm.after is not None and arm.device_seconds]
    if len(arms) < 2:
        return None
    figure = new_figure(
        xaxis={"title": f"{comparison.time_name}, whole run", "showgrid": True, "rangemode": "tozero"},
        yaxis={"title": "accuracy", "tickformat": PERCENT},
    )
    figure.update_layout(hovermode="closest")
    largest = max((arm.peak_bytes or 0.0) for arm in arms) or 1.0
    for index, arm in enumerate(comparison.arms):
        if arm not in arms or arm.after is None:
            continue
        size = 10 + 26 * ((arm.peak_bytes or 0.0) / largest) ** 0.5
        edge = "var(--ink)" if arm.on_front else f"var(--c-{color_of(index)})"
        figure.add_scatter(
            x=[arm.device_seconds],
            y=[arm.after.mean],
            mode="markers",
            marker={"size": size, "color": f"var(--c-{color_of(index)}-fill)", "line": {"width": 2, "color": edge}},
            name=safe(arm.label),
            hovertemplate=f"%{{y:.1%}} after %{{x:.0f}} s, peak {bytes_text(arm.peak_bytes)}<extra>{safe(arm.label)}</extra>",
        )
    caption = "Size: peak memory. A dark edge marks the front: no other arm is as accurate, as fast and as small, and better in one of these."
    return Panel(
        id=f"{prefix}front",
        section="bytes",
        title="Accuracy, time and memory",
        caption=caption,
        figure=figure,
        wide=True,
    )


def _stages(comparison: Comparison, prefix: str) -> Panel | None:
    arms = [arm for arm in comparison.arms if comparison.stage_seconds.get(arm.key)]
    if not arms:
        return None
    figure = new_figure(
        xaxis={"title": "seconds, mean of the arm's runs", "showgrid": True},
        yaxis={"autorange": "reversed", "showgrid": False, "tickfont": {"color": "var(--ink)"}},
    )
    figure.update_layout(barmode="stack", bargap=0.35, hovermode="closest")
    for stage, color in zip(STAGES, STAGE_COLORS, strict=True):
        seconds = [comparison.stage_seconds[arm.key].get(stage, 0.0) for arm in arms]
        if any(seconds):
            figure.add_bar(
                y=[wrapped(arm.label) for arm in arms],
                x=rounded(seconds),
                orientation="h",
                name=stage,
                marker={"color": f"var(--c-{color})", "line": {"width": 0}},
                hovertemplate="%{x:.3g} s",
            )
    caption = "Wall time of whole runs by stage. What quantization saves in generation it may lose elsewhere."
    return Panel(
        id=f"{prefix}stages",
        section="bytes",
        title="Time by stage",
        caption=caption,
        figure=figure,
        wide=True,
        rows=len(arms),
    )


def _bar(figure: go.Figure, name: str, low: float, high: float, color: str, width: float) -> None:
    figure.add_scatter(
        x=rounded([low, high]),
        y=[name, name],
        mode="lines",
        line={"color": color, "width": width},
        hovertemplate="%{x:.4g}<extra></extra>",
    )


def _dots(
    figure: go.Figure, name: str, values: Sequence[float], color: str, symbol: str, size: float, remarks: Sequence[str]
) -> None:
    figure.add_scatter(
        x=rounded(values),
        y=[name] * len(values),
        mode="markers",
        text=list(remarks),
        marker={"symbol": symbol, "size": size, "color": color, "line": {"width": 2, "color": color}},
        hovertemplate="%{x:.4g} (%{text})<extra></extra>",
    )


def _pad(figure: go.Figure, also: Sequence[float]) -> None:
    """A horizontal range that holds every mark whole, and the values ``also``."""
    values = [*also, *(float(x) for trace in figure.data for x in trace.x)]
    room = 0.04 * (max(values) - min(values) or 1.0)
    figure.update_xaxes(range=[min(values) - room, max(values) + room])
