"""Figures of several runs: arms with all their seeds, differences, curves over seeds, time to target, the front."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from qerl.metrics.machine_catalogue import STAGES
from qerl.report.comparison import Comparison, Curve, PairRow
from qerl.report.plot_parts import PERCENT, Panel, new_figure, rounded
from qerl.report.plots_machine import STAGE_COLORS
from qerl.units import bytes_text

if TYPE_CHECKING:
    import plotly.graph_objects as go

COLORS = ("blue", "amber", "teal", "violet", "red", "green", "pink", "slate", "brown")
DASHES = ("solid", "dash", "dot")
CURVES = (
    ("groups/mixed", "Mixed groups", "share of groups", ".0%", "Groups with both right and wrong answers: what there is to learn from."),
    ("reward", "Reward", "mean reward", ".3f", "Of the training answers, which are sampled with the arm's own noise and temperature."),
    ("entropy", "Entropy", "nats a token", ".3f", "Of the policy that samples, on the answers it samples: not one set of contexts for all arms."),
    ("probe/entropy_conditional/by_token", "Entropy on the probe set", "nats a token", ".3f", "On one fixed set of contexts for all arms, mean over draws of noise: what may be compared."),
    ("completions/mean_length", "Answer length", "tokens", ".0f", "Of the training answers."),
    ("aqn/sigma", "Noise", "sigma", ".2g", "Level of the noise on norm scales."),
)  # fmt: skip
"""Metric, title, axis, format and caption of each course over the steps."""


def color_of(index: int) -> str:
    """Color of the n-th arm."""
    return COLORS[index % len(COLORS)]


def arm_panels(comparison: Comparison, prefix: str) -> list[Panel]:
    """All figures of a comparison that have data; ``prefix`` keeps their ids apart from those of another."""
    panels = [
        _accuracy(comparison, prefix),
        _differences(comparison, prefix),
        _course(comparison, prefix),
        _course_by_seconds(comparison, prefix),
        _front(comparison, prefix),
        *(_metric(comparison, prefix, *row) for row in CURVES),
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
            "circle",
            9,
            [f"seed {row.seed}" for row in ended],
        )
        _dots(figure, wrapped(arm.label), [arm.after.mean], "var(--ink)", "line-ns", 16, ["mean over seeds"])
        before = [row.before for row in arm.seeds if row.before is not None]
        if before:
            _dots(figure, wrapped(arm.label), [fmean(before)], "var(--c-slate)", "diamond-open", 9, ["before training"])
    if comparison.target is not None:
        _target(figure, comparison.target, vertical=True)
    _pad(figure, [] if comparison.target is None else [comparison.target])
    caption = (
        f"Every dot is a seed; the bar is the {100 * comparison.confidence:g}% t-interval of their mean, the stroke the mean, the diamond "
        "the accuracy before training."
    )
    return Panel(
        id=f"{prefix}accuracy", section="quality", title="Accuracy by arm", caption=caption, figure=figure, wide=True
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
        _dots(figure, name, [100 * spread.mean], "var(--ink)", "line-ns", 16, ["mean over seeds"])
    _pad(figure, [0.0])
    caption = (
        "Second arm minus first. Dots: runs with one seed. Blue line: t-interval over seeds, which alone speaks of training again. Amber: "
        "interval over questions, of these very models. Grey: smaller than what was stated to be detectable."
    )
    return Panel(
        id=f"{prefix}differences",
        section="quality",
        title="Paired differences",
        caption=caption,
        figure=figure,
        wide=True,
    )


def pair_name(row: PairRow) -> str:
    """The pair in short lines."""
    return f"{wrapped(row.second)}<br>− {wrapped(row.first)}"


def wrapped(label: str) -> str:
    """A label in lines that leave room for the figure on a phone, safe where plotly reads tags."""
    lines = textwrap.wrap(label, 22, break_long_words=False) or [label]
    return "<br>".join(_safe(line) for line in lines)


def _course(comparison: Comparison, prefix: str) -> Panel | None:
    return _curves(
        comparison,
        f"{prefix}course",
        "quality",
        "Held-out accuracy over steps",
        "Thin: seeds. Thick: their mean, where all of them were evaluated.",
        comparison.accuracy_curves,
        {"title": "accuracy", "tickformat": PERCENT},
        ".1%",
        target=True,
    )


def _course_by_seconds(comparison: Comparison, prefix: str) -> Panel | None:
    return _curves(
        comparison,
        f"{prefix}seconds",
        "quality",
        f"Held-out accuracy over {comparison.time_name}",
        "Seconds of the steps; no set-up, evaluation or saving. Where a line first meets the target is the time to target.",
        comparison.accuracy_by_seconds,
        {"title": "accuracy", "tickformat": PERCENT},
        ".1%",
        target=True,
        x_title=comparison.time_name,
        means=False,
    )


def _metric(
    comparison: Comparison, prefix: str, key: str, title: str, axis: str, form: str, caption: str
) -> Panel | None:
    curves = comparison.curves.get(key, ())
    if key == "aqn/sigma" and not any(value for curve in curves for value in curve.values):
        return None
    percent = {"tickformat": PERCENT} if form.endswith("%") else {}
    return _curves(
        comparison,
        f"{prefix}{key.replace('/', '-')}",
        "signal",
        title,
        caption,
        curves,
        {"title": axis, **percent},
        form,
        shape="hv" if key == "aqn/sigma" else "linear",
    )


def _curves(
    comparison: Comparison,
    id: str,
    section: str,
    title: str,
    caption: str,
    curves: Sequence[Curve],
    yaxis: dict[str, str],
    form: str,
    *,
    target: bool = False,
    x_title: str = "step",
    means: bool = True,
    shape: str = "linear",
) -> Panel | None:
    """Thin lines for seeds and a thick one for the mean of an arm; ``hv`` draws what stays until it is changed as steps."""
    if not any(curve.values for curve in curves):
        return None
    figure = new_figure(xaxis={"title": x_title}, yaxis=dict(yaxis))
    figure.update_layout(hovermode="closest")
    for index, arm in enumerate(comparison.arms):
        own = [curve for curve in curves if curve.arm == arm.key and curve.values]
        color, dash = color_of(index), DASHES[index // len(COLORS) % len(DASHES)]
        mean = _mean_curve(own) if means and len(own) > 1 else None
        for number, curve in enumerate(own):
            single = mean is None
            figure.add_scatter(
                x=list(curve.steps),
                y=rounded(curve.values),
                mode="lines+markers" if len(curve.values) <= 12 else "lines",
                marker={"size": 4},
                line={
                    "width": 2 if single else 1,
                    "dash": dash,
                    "shape": shape,
                    "color": f"var(--c-{color}{'' if single else '-soft2'})",
                },
                name=_safe(arm.label),
                legendgroup=arm.key,
                showlegend=single and number == 0,
                hovertemplate=f"%{{y:{form}}} (seed {curve.seed})<extra>{_safe(arm.label)}</extra>",
            )
        if mean is not None:
            figure.add_scatter(
                x=mean[0],
                y=rounded(mean[1]),
                mode="lines",
                line={"width": 2.4, "dash": dash, "shape": shape, "color": f"var(--c-{color})"},
                name=_safe(arm.label),
                legendgroup=arm.key,
                hovertemplate=f"%{{y:{form}}} (mean)<extra>{_safe(arm.label)}</extra>",
            )
    if target and comparison.target is not None:
        _target(figure, comparison.target, vertical=False)
    return Panel(id=id, section=section, title=title, caption=caption, figure=figure, wide=True)


def _mean_curve(curves: Sequence[Curve]) -> tuple[list[float], list[float]]:
    """Means at the steps that all seeds have."""
    tables = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    shared = sorted(set(tables[0]).intersection(*tables[1:]))
    return shared, [fmean(table[step] for table in tables) for step in shared]


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
            name=_safe(arm.label),
            hovertemplate=f"%{{y:.1%}} after %{{x:.0f}} s, peak {bytes_text(arm.peak_bytes)}<extra>{_safe(arm.label)}</extra>",
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
        id=f"{prefix}stages", section="bytes", title="Time by stage", caption=caption, figure=figure, wide=True
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


def _target(figure: go.Figure, level: float, *, vertical: bool) -> None:
    """A dashed line at the target, in the figure's range even where no run came near it."""
    line = {"color": "var(--c-green)", "width": 1.4, "dash": "dash"}
    label: dict[str, Any] = {
        "text": f"target {100 * level:g}%",
        "font": {"color": "var(--c-green)", "size": 11},
        "textposition": "end",
    }
    if vertical:
        label |= {"textangle": 0, "textposition": "start", "xanchor": "left", "yanchor": "bottom"}
        figure.add_shape(type="line", yref="paper", y0=0, y1=1, x0=level, x1=level, line=line, label=label)
    else:
        label |= {"yanchor": "bottom"}
        figure.add_shape(type="line", xref="paper", x0=0, x1=1, y0=level, y1=level, line=line, label=label)


def _safe(text: str) -> str:
    """Names come from files: plotly reads tags in hover labels."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
