"""The figures of learning, and the list of all figures. A figure whose metrics are absent is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from qerl.report.collect import RunData
from qerl.report.plot_parts import (
    PERCENT,
    SMOOTH_FROM,
    Panel,
    add_band,
    add_level,
    add_line,
    binned,
    mark_single_points,
    new_figure,
    rounded,
)
from qerl.report.plots_diagnostics import (
    canary_panel,
    causes_panel,
    diversity_panel,
    information_panel,
    perturbation_panel,
    probe_panel,
)
from qerl.report.plots_machine import logprob_panel, memory_panel, probability_panel, speed_panel, stages_panel

if TYPE_CHECKING:
    import plotly.graph_objects as go

GROUP_KINDS = (
    ("mixed", "mixed", "blue"),
    ("all_correct", "all right", "green"),
    ("all_wrong", "all wrong", "red"),
    ("all_truncated", "all truncated", "amber"),
    ("unscorable", "unscorable", "slate"),
)
OUTCOMES = (
    ("correct", "correct", "green"),
    ("wrong", "wrong", "red"),
    ("unparsable", "unparsable", "violet"),
    ("truncated", "truncated", "amber"),
    ("unscorable", "unscorable", "slate"),
)
FEW_STEPS = 12
"""Up to so many steps, each has a tick of its own: a plot of one must not count in halves."""
MOST_AREA_POINTS = 400
"""Steps are averaged into at most this many points of a stacked area."""


def panels(run: RunData) -> list[Panel]:
    """Every figure that the run has data for, in the order of the page."""
    found = [panel for build in _BUILDERS if (panel := build(run)) is not None]
    for panel in found:
        mark_single_points(panel.figure)
        if run.last_step <= FEW_STEPS and panel.figure.layout.xaxis.title.text == "step":
            panel.figure.update_xaxes(dtick=1)
    return found


def accuracy_panel(run: RunData) -> Panel | None:
    figure = new_figure(yaxis={"tickformat": PERCENT, "title": "accuracy"})
    steps, values = run.series("accuracy")
    add_line(figure, steps, values, "training answers (sampled)", "blue", form=".1%")
    points = run.evaluations
    if points:
        up = [(point.high if point.high is not None else point.accuracy) - point.accuracy for point in points]
        down = [point.accuracy - (point.low if point.low is not None else point.accuracy) for point in points]
        figure.add_scatter(
            x=[point.step for point in points],
            y=[point.accuracy for point in points],
            error_y={
                "array": up,
                "arrayminus": down,
                "symmetric": False,
                "color": "var(--c-amber)",
                "width": 5,
                "thickness": 1.6,
            },
            mode="lines+markers",
            name="held-out questions",
            line={"color": "var(--c-amber)", "width": 2, "dash": "dot"},
            marker={"size": 9, "color": "var(--c-amber)", "line": {"color": "var(--card)", "width": 1.5}},
            hovertemplate="%{y:.1%}",
        )
    if not steps and not points:
        return None
    caption = (
        "Held-out points carry their interval over questions. Training answers are sampled with the training "
        "temperature and noise, so the two curves need not meet."
    )
    return Panel(id="accuracy", section="quality", title="Accuracy", caption=caption, figure=figure, wide=True)


def progress_panel(run: RunData) -> Panel | None:
    """Held-out accuracy against training time: what "sooner" means. Left out with fewer than two timed points."""
    points = [point for point in run.evaluations if point.seconds is not None]
    if len(points) < 2:
        return None
    minutes = max(point.seconds or 0.0 for point in points) >= 300
    figure = new_figure(
        xaxis={"title": f"{'minutes' if minutes else 'seconds'} of training"},
        yaxis={"tickformat": PERCENT, "title": "held-out accuracy"},
    )
    known = [point for point in points if point.low is not None and point.high is not None]
    at = [(point.seconds or 0.0) / (60 if minutes else 1) for point in known]
    if len(known) >= 2:
        add_band(figure, at, [p.low or 0.0 for p in known], [p.high or 0.0 for p in known], "interval", "amber")
    figure.add_scatter(
        x=[(point.seconds or 0.0) / (60 if minutes else 1) for point in points],
        y=[point.accuracy for point in points],
        mode="lines+markers",
        name="held-out accuracy",
        line={"color": "var(--c-amber)", "width": 2},
        marker={"size": 7, "color": "var(--c-amber)"},
        customdata=[[point.step, point.tokens or 0] for point in points],
        hovertemplate="%{y:.1%} (step %{customdata[0]}, %{customdata[1]:,.3s} tokens)",
    )
    caption = (
        "The clock counts steps alone, evaluation and saving left out. It compares with another run only on the same machine, "
        "alone on it."
    )
    return Panel(id="progress", section="quality", title="Accuracy against time", caption=caption, figure=figure)


def reward_panel(run: RunData) -> Panel | None:
    rows = [row for row in run.metrics if row.get("reward") is not None]
    if not rows:
        return None
    figure = new_figure(yaxis={"title": "reward"})
    steps = [row["step"] for row in rows]
    rewards = [row["reward"] for row in rows]
    spread = [row.get("reward_std") or 0.0 for row in rows]
    low = [reward - std for reward, std in zip(rewards, spread, strict=True)]
    high = [reward + std for reward, std in zip(rewards, spread, strict=True)]
    add_band(figure, steps, low, high, "± 1 standard deviation", "teal")
    add_line(figure, steps, rewards, "reward", "teal", form=".3f")
    caption = "Mean over the scored answers of a step, with shaping. The band is the spread of single answers, not an error bar."
    return Panel(id="reward", section="quality", title="Reward", caption=caption, figure=figure)


def entropy_panel(run: RunData) -> Panel | None:
    return _single(
        run,
        "entropy",
        section="signal",
        title="Entropy",
        unit="nats per token",
        color="violet",
        form=".3f",
        caption="Of softmax(logits / T) over the full vocabulary, averaged over answer tokens. A fall to 0 means that the group's answers become one.",
    )


def sigma_panel(run: RunData) -> Panel | None:
    steps, sigmas = run.series("aqn/sigma")
    if not steps:
        return None
    stages = dict(zip(*run.series("aqn/stage"), strict=True))
    figure = new_figure(yaxis={"title": "sigma", "rangemode": "tozero"})
    figure.add_scatter(
        x=steps,
        y=rounded(sigmas),
        mode="lines",
        line={"color": "var(--c-pink)", "width": 2, "shape": "hv"},
        fill="tozeroy",
        fillcolor="var(--c-pink-soft)",
        name="sigma",
        customdata=[int(stages.get(step, 0)) for step in steps],
        hovertemplate="%{y:.3g} (stage %{customdata})",
        showlegend=False,
    )
    others = (("aqn/controller/sigma_schedule", "schedule"), ("aqn/displacement", "accumulated displacement"))
    for key, name in others:
        at, values = run.series(key)
        if at:
            line = {"color": "var(--c-amber)", "width": 1.5, "shape": "hv", "dash": "dot"}
            figure.add_scatter(
                x=at, y=rounded(values), mode="lines", line=line, name=name, hovertemplate="%{y:.3g}", showlegend=True
            )
    caption = "Standard deviation of the noise on the RMSNorm scales, by stage of its schedule. Stage 0 is noise-free; evaluation is too unless stated."
    if run.setting("aqn.controller.enabled"):
        caption += " The controller sets it; the line is the fixed schedule."
    if run.setting("aqn.mode") == "accumulate":
        caption += " Draws of all rollouts add up (mode accumulate); the line is the standard deviation of their sum."
    if run.setting("aqn.magnitude") not in (None, "absolute"):
        caption += f" Magnitude {run.setting('aqn.magnitude')}: in units of |w|."
    return Panel(id="sigma", section="signal", title="Adaptive quantization noise", caption=caption, figure=figure)


def length_panel(run: RunData) -> Panel | None:
    steps, means = run.series("completions/mean_length")
    if not steps:
        return None
    figure = new_figure(yaxis={"title": "tokens", "rangemode": "tozero"})
    low_steps, low = run.series("completions/min_length")
    _, high = run.series("completions/max_length")
    if len(low) == len(high) == len(steps):
        add_band(figure, low_steps, low, high, "shortest to longest", "blue")
    add_line(figure, steps, means, "mean length", "blue", form=".1f")
    limit = run.setting("rollout.max_new_tokens")
    if limit is not None and high and max(high) >= 0.8 * limit:
        add_level(figure, float(limit), "length limit", "amber")
        figure.update_layout(yaxis={"range": [0, 1.15 * limit]})
    caption = "Answers that touch the length limit are cut off and count as truncated."
    return Panel(id="length", section="quality", title="Answer length", caption=caption, figure=figure)


def groups_panel(run: RunData) -> Panel | None:
    figure = _shares(run, "groups/", GROUP_KINDS)
    if figure is None:
        return None
    caption = (
        "Only mixed groups teach: when all answers to a question are equally right or wrong, their advantages are zero."
    )
    return Panel(id="groups", section="signal", title="Groups by kind", caption=caption, figure=figure)


def outcomes_panel(run: RunData) -> Panel | None:
    figure = _shares(run, "outcomes/", OUTCOMES)
    if figure is None:
        return None
    caption = "Every training answer has exactly one outcome. Unparsable and truncated answers fail in form: they say little about what the model can work out."
    return Panel(id="outcomes", section="signal", title="Answers by outcome", caption=caption, figure=figure)


def gradient_panel(run: RunData) -> Panel | None:
    steps, norms = run.series("grad_norm")
    if not steps:
        return None
    top = max(norms)
    clip = run.setting("optim.max_grad_norm")
    figure = new_figure()
    add_line(figure, steps, norms, "gradient norm", "blue", form=".3g")
    if clip is not None and top >= 0.5 * clip:
        add_level(figure, float(clip), "clipped above", "red")
        top = max(top, clip)
    figure.update_layout(yaxis={"title": {"text": "gradient norm"}, "range": [0, 1.15 * top or 1.0]})
    rate_steps, rates = run.series("learning_rate")
    if rate_steps:
        figure.add_scatter(
            x=rate_steps,
            y=rounded(rates),
            yaxis="y2",
            mode="lines",
            name="learning rate (right axis)",
            line={"color": "var(--c-slate)", "width": 1.6, "dash": "dot"},
            hovertemplate="%{y:.2e}",
        )
        figure.update_layout(
            margin={"r": 58},
            yaxis2={
                "overlaying": "y",
                "side": "right",
                "showgrid": False,
                "zeroline": False,
                "range": [0, 1.3 * max(rates) or 1.0],
                "exponentformat": "e",
                "showexponent": "all",
                "tickvals": [0, float(f"{max(rates) / 2:.2g}"), float(f"{max(rates):.2g}")],
            },
        )
    caption = "The norm before clipping. A norm that grows while reward falls calls for a lower learning rate."
    return Panel(
        id="gradient", section="health", title="Gradient norm and learning rate", caption=caption, figure=figure
    )


def clip_panel(run: RunData) -> Panel | None:
    figure = new_figure(yaxis={"title": "share of tokens", "tickformat": PERCENT, "rangemode": "tozero"})
    top = 0.0
    for key, name, color in (
        ("high_mean", "above the upper clip", "teal"),
        ("low_mean", "below the lower clip", "amber"),
    ):
        steps, values = run.series(f"clip_ratio/{key}")
        if steps:
            add_line(figure, steps, values, name, color, form=".3%")
            top = max(top, *values)
    if top == 0.0:
        # With one update a rollout nothing is clipped: an empty figure would say no more.
        return None
    caption = "Tokens whose gradient the clip stops. Near zero with one update per rollout; more with several."
    return Panel(id="clip", section="health", title="Clipped tokens", caption=caption, figure=figure)


_BUILDERS: tuple[Callable[[RunData], Panel | None], ...] = (
    accuracy_panel,
    progress_panel,
    reward_panel,
    length_panel,
    groups_panel,
    outcomes_panel,
    entropy_panel,
    sigma_panel,
    probe_panel,
    information_panel,
    diversity_panel,
    gradient_panel,
    clip_panel,
    probability_panel,
    logprob_panel,
    causes_panel,
    canary_panel,
    perturbation_panel,
    stages_panel,
    speed_panel,
    memory_panel,
)


def _single(
    run: RunData, key: str, *, section: str, title: str, unit: str, color: str, form: str, caption: str
) -> Panel | None:
    steps, values = run.series(key)
    if not steps:
        return None
    figure = new_figure(yaxis={"title": unit})
    add_line(figure, steps, values, title.lower(), color, form=form)
    figure.update_layout(showlegend=len(steps) >= SMOOTH_FROM)
    return Panel(id=key, section=section, title=title, caption=caption, figure=figure)


def _shares(run: RunData, prefix: str, kinds: Sequence[tuple[str, str, str]]) -> go.Figure | None:
    """Fractions that add up to 1, as stacked areas; kinds that never occur are left out."""
    figure = new_figure(yaxis={"tickformat": PERCENT, "range": [0, 1]})
    rows = [row for row in run.metrics if row.get(prefix + kinds[0][0]) is not None]
    for key, name, color in kinds:
        steps, values = binned([(row["step"], row.get(prefix + key) or 0.0) for row in rows], most=MOST_AREA_POINTS)
        if len(steps) == 1 and any(values):
            # An area has no width at a single step.
            marker = {"color": f"var(--c-{color}-fill)"}
            figure.add_bar(x=steps, y=rounded(values), width=0.3, name=name, marker=marker, hovertemplate="%{y:.1%}")
            figure.update_layout(barmode="stack")
        elif any(values):
            figure.add_scatter(
                x=steps,
                y=rounded(values),
                mode="lines",
                stackgroup="all",
                name=name,
                line={"width": 0.8, "color": f"var(--c-{color})"},
                fillcolor=f"var(--c-{color}-fill)",
                hovertemplate="%{y:.1%}",
            )
    return figure if figure.data else None
