"""What figures of several arms share: an arm's color, its name, the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go

COLORS = ("blue", "amber", "teal", "violet", "red", "green", "pink", "slate", "brown", "olive")
DASHES = ("solid", "dash", "dot")


def color_of(index: int) -> str:
    """Color of the n-th arm."""
    return COLORS[index % len(COLORS)]


def round_of(index: int) -> int:
    """How often all colors have been used before the n-th arm: its lines are dashed and its marks hollow then."""
    return index // len(COLORS)


def target_line(figure: go.Figure, level: float, *, vertical: bool) -> None:
    """A dashed line at the target, in the figure's range even where no run came near it."""
    line = {"color": "var(--c-green)", "width": 1.4, "dash": "dash"}
    label: dict[str, Any] = {
        "text": f"target {100 * level:g}%",
        "font": {"color": "var(--c-green)", "size": 11},
        "textposition": "end",
    }
    if vertical:
        label |= {"textangle": 0, "textposition": "start", "xanchor": "right", "yanchor": "bottom"}
        figure.add_shape(type="line", yref="paper", y0=0, y1=1, x0=level, x1=level, line=line, label=label)
    else:
        label |= {"yanchor": "bottom"}
        figure.add_shape(type="line", xref="paper", x0=0, x1=1, y0=level, y1=level, line=line, label=label)


def safe(text: str) -> str:
    """Names come from files: plotly reads tags in hover labels."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
