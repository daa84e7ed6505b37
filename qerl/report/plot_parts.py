"""What figures are built of: an empty one in the page's look, lines, bands and levels.

Colors are the page's CSS variables (``var(--c-blue)``): the page's script replaces them by their values and draws again
when the reader's theme changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go

SMOOTH_FROM = 60
"""From this many points on, a line is drawn with its running mean."""
PERCENT = ".3~%"
"""Ticks of an axis of fractions: with the decimals that they need, so that no two of them read alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One figure with its words."""

    id: str
    section: str
    title: str
    caption: str
    figure: go.Figure
    wide: bool = False
    rows: int | None = None
    """Lines of a figure with one for each arm or difference, which its height follows."""


def new_figure(*, xaxis: dict[str, Any] | None = None, yaxis: dict[str, Any] | None = None) -> go.Figure:
    """An empty figure in the page's look.

    Args:
        xaxis: settings of the axis on top of the look, ``title`` as text; None is an axis of steps. One without a title has none.
        yaxis: the same; None is an axis without a title.
    """
    import plotly.graph_objects as go

    steps = {"showgrid": False, "zeroline": False}
    # Given whole: plotly takes ten times as long to change the layout of a figure.
    figure = go.Figure(
        layout={
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": "var(--muted)", "size": 12},
            "margin": {"l": 52, "r": 12, "t": 8, "b": 36},
            "hovermode": "x unified",
            "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--grid)", "font": {"color": "var(--ink)"}},
            "legend": {
                "orientation": "h",
                "x": 0,
                "xanchor": "left",
                "y": 1.02,
                "yanchor": "bottom",
                "bgcolor": "rgba(0,0,0,0)",
                "traceorder": "normal",
            },
            "xaxis": _axis(steps | ({"title": "step"} if xaxis is None else {"title": ""} | xaxis), standoff=6),
            "yaxis": _axis(yaxis or {}, standoff=8),
        }
    )
    figure.layout.template = None
    return figure


def _axis(change: dict[str, Any], *, standoff: int) -> dict[str, Any]:
    """An axis in the page's look; ``standoff``: pixels from its labels to its title."""
    title = {"standoff": standoff, "font": {"size": 12}}
    return {
        "gridcolor": "var(--grid)",
        "zerolinecolor": "var(--grid)",
        "linecolor": "var(--grid)",
        "automargin": True,
        **change,
        "title": title | ({"text": change["title"]} if "title" in change else {}),
    }


def log_axis(title: str, values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis that holds all positive ``values`` and whole powers of ten around them."""
    exponents = [math.log10(value) for value in values if value > 0.0] or [0.0]
    low, high = math.floor(min(exponents)), math.ceil(max(exponents) + 0.1)
    return {"title": title, "type": "log", "exponentformat": "e", "dtick": 1, "range": [low, high]}


def add_line(
    figure: go.Figure, steps: Sequence[int], values: Sequence[float], name: str, color: str, *, form: str
) -> None:
    """A line; a long one is drawn thin, with its running mean over it."""
    if not steps:
        return
    smooth = len(steps) >= SMOOTH_FROM
    figure.add_scatter(
        x=list(steps),
        y=rounded(values),
        mode="lines",
        name=name,
        line={"color": f"var(--c-{color}{'-soft2' if smooth else ''})", "width": 1 if smooth else 2},
        hovertemplate=f"%{{y:{form}}}",
        legendgroup=name,
        showlegend=None if not smooth else False,
    )
    if smooth:
        window = max(5, len(steps) // 20) | 1
        figure.add_scatter(
            x=list(steps),
            y=rounded(running_mean(values, window)),
            mode="lines",
            name=f"{name}, mean of {window} steps",
            legendgroup=name,
            line={"color": f"var(--c-{color})", "width": 2.2},
            hovertemplate=f"%{{y:{form}}}",
        )


def add_band(
    figure: go.Figure, steps: Sequence[float], low: Sequence[float], high: Sequence[float], name: str, color: str
) -> None:
    if len(steps) == 1:
        # A band has no width at a single step: it is drawn as a bar.
        bar = {"width": 8, "color": f"var(--c-{color}-soft2)"}
        ends = rounded([*low, *high])
        figure.add_scatter(x=[steps[0]] * 2, y=ends, mode="lines", line=bar, hoverinfo="skip", name=name)
        return
    edge = {"width": 0, "color": f"var(--c-{color})"}
    figure.add_scatter(x=list(steps), y=rounded(low), mode="lines", line=edge, hoverinfo="skip", showlegend=False)
    figure.add_scatter(
        x=list(steps),
        y=rounded(high),
        mode="lines",
        line=edge,
        fill="tonexty",
        fillcolor=f"var(--c-{color}-soft)",
        hoverinfo="skip",
        name=name,
    )


def mark_single_points(figure: go.Figure) -> None:
    """Gives every line of a single point a marker: without one it cannot be seen."""
    for trace in figure.data:
        if trace.type == "scatter" and len(trace.x) == 1 and trace.mode == "lines" and trace.line.width != 0:
            trace.update(mode="lines+markers", marker={"size": 8, "color": trace.line.color})


def add_level(figure: go.Figure, level: float, text: str, color: str, *, above: bool = True) -> None:
    """A dashed horizontal line with its name at the right end, above or below it."""
    line = {"color": f"var(--c-{color})", "width": 1.4, "dash": "dash"}
    label = {
        "text": text,
        "textposition": "end",
        "yanchor": "bottom" if above else "top",
        "font": {"color": f"var(--c-{color})", "size": 11},
    }
    figure.add_shape(type="line", xref="paper", x0=0, x1=1, y0=level, y1=level, line=line, label=label)


def binned(points: Sequence[tuple[int, float]], most: int) -> tuple[list[float], list[float]]:
    """Means of neighbors, so that at most ``most`` points are left."""
    width = -(-len(points) // most) if points else 1
    bins = [points[start : start + width] for start in range(0, len(points), width)]
    return [sum(x for x, _ in part) / len(part) for part in bins], [
        sum(y for _, y in part) / len(part) for part in bins
    ]


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean over a centered window, narrower at both ends."""
    half = window // 2
    parts = [values[max(0, index - half) : index + half + 1] for index in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def rounded(values: Sequence[float]) -> list[float]:
    """Six significant digits: what a figure can show, at half the size."""
    return [float(f"{value:.6g}") for value in values]
