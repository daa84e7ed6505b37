"""The figures of the machinery: trainer against engine, time, memory."""

from __future__ import annotations

from qerl.metrics.catalogue import ALARMS
from qerl.metrics.machine_catalogue import STAGES
from qerl.report.collect import RunData, memory_owners
from qerl.report.plot_parts import SMOOTH_FROM, Panel, add_level, add_line, binned, log_axis, new_figure, rounded

STAGE_COLORS = ("olive", "blue", "teal", "violet", "amber", "red", "green", "brown", "pink", "slate")
"""In the order of `STAGES`."""
MOST_BARS = 120
"""Steps are averaged into at most this many bars."""


def probability_panel(run: RunData) -> Panel | None:
    key = "mean_abs_prob_difference"
    steps, values = run.series(key)
    if not steps:
        return None
    figure = new_figure(yaxis=log_axis("mean |Δp|", [*values, *(alarm.level for alarm in ALARMS)]))
    figure.add_scatter(
        x=steps,
        y=[value if value > 0 else None for value in rounded(values)],
        mode="lines+markers" if len(steps) <= SMOOTH_FROM else "lines",
        marker={"size": 4},
        name="mean |Δp|",
        line={"color": "var(--c-blue)", "width": 2},
        hovertemplate="%{y:.2e}",
        showlegend=False,
    )
    for alarm in ALARMS:
        if alarm.metric == key:
            fault = alarm.severity == "fault"
            name = f"{alarm.severity} {alarm.level:g}"
            add_level(figure, alarm.level, name, "red" if fault else "amber", above=fault)
    caption = (
        "How far trainer and engine are apart on the chosen tokens, with the same parameters on both sides. Log scale."
    )
    return Panel(id="probability", section="health", title="Probability mismatch", caption=caption, figure=figure)


def logprob_panel(run: RunData) -> Panel | None:
    prefix = "sampling/sampling_logp_difference/"
    steps, means = run.series(f"{prefix}mean")
    max_steps, largest = run.series(f"{prefix}max")
    if not steps:
        return None
    figure = new_figure(yaxis=log_axis("|Δ log p|, nats", [*means, *largest]))
    for name, color, at, values in (("largest", "red", max_steps, largest), ("mean", "blue", steps, means)):
        figure.add_scatter(
            x=at,
            y=[value if value > 0 else None for value in rounded(values)],
            mode="lines",
            name=name,
            line={"color": f"var(--c-{color})", "width": 2},
            hovertemplate="%{y:.2e}",
        )
    caption = "Rounding alone gives about 1e-6 in float32 and 1e-2 in bfloat16. Noise adds to it when the trainer's pass leaves it out."
    return Panel(id="logprob", section="health", title="Log-prob mismatch", caption=caption, figure=figure)


def stages_panel(run: RunData) -> Panel | None:
    rows = run.metrics
    present = [name for name in STAGES if any(row.get(f"time/{name}") for row in rows)]
    if not present:
        return None
    figure = new_figure(yaxis={"title": "seconds per step", "rangemode": "tozero"})
    figure.update_layout(barmode="stack", bargap=0.08)
    for name in present:
        steps, seconds = binned([(row["step"], row.get(f"time/{name}") or 0.0) for row in rows], most=MOST_BARS)
        figure.add_bar(
            x=steps,
            y=rounded(seconds),
            name=name,
            width=0.3 if len(rows) == 1 else None,
            marker={"color": f"var(--c-{STAGE_COLORS[STAGES.index(name)]})", "line": {"width": 0}},
            hovertemplate="%{y:.3g} s",
        )
    averaged = "" if len(rows) <= MOST_BARS else f" Steps are averaged into {MOST_BARS} bars."
    caption = f"Where each step's wall time goes.{averaged}"
    return Panel(id="stages", section="bytes", title="Time by stage", caption=caption, figure=figure, wide=True)


def speed_panel(run: RunData) -> Panel | None:
    figure = new_figure(yaxis={"title": "tokens per second", "rangemode": "tozero"})
    for key, name, color in (
        ("tokens_per_second", "whole step", "blue"),
        ("rollout/tokens_per_second", "generation only (answer tokens)", "teal"),
    ):
        steps, values = run.series(key)
        if steps:
            add_line(figure, steps, values, name, color, form=",.0f")
    if not figure.data:
        return None
    caption = "Whole step: prompt and answer tokens over the time of the step. Lengths drift over a run, and throughput with them."
    put_back = sum(run.series("rollout/preemptions")[1])
    if put_back:
        caption += (
            f" Answers were put back {put_back:,.0f} times for want of room for keys and values, and computed again."
        )
    return Panel(id="speed", section="bytes", title="Throughput", caption=caption, figure=figure)


def memory_panel(run: RunData) -> Panel | None:
    owners = memory_owners(run)
    if not owners:
        return None
    figure = new_figure(
        xaxis={"title": "MB", "type": "log", "showgrid": True, "exponentformat": "none"},
        yaxis={"autorange": "reversed", "showgrid": False},
    )
    figure.update_layout(barmode="group", bargap=0.3, hovermode="closest")
    for name, color in (("predicted", "slate"), ("measured", "blue")):
        figure.add_bar(
            y=[owner.name for owner in owners],
            x=[size / 1e6 if (size := getattr(owner, name)) else None for owner in owners],
            orientation="h",
            name=name,
            marker={"color": f"var(--c-{color})"},
            hovertemplate="%{x:.3g} MB",
        )
    caption = "By owner, on a log scale. An owner with one bar exists only during part of a step and is predicted, not measured."
    return Panel(id="memory", section="bytes", title="Memory by owner", caption=caption, figure=figure)
