"""The figures of the diagnostics: probe entropies, what noise changes, mismatch by cause, diversity, the canary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qerl.metrics.catalogue import ALARMS
from qerl.report.collect import RunData
from qerl.report.plot_parts import PERCENT, Panel, add_level, add_line, log_axis, new_figure, rounded

if TYPE_CHECKING:
    import plotly.graph_objects as go

CAUSES = (
    ("noise", "noise", "pink"),
    ("staleness", "updates of the step", "violet"),
    ("truncation", "top-k, top-p, min-p", "amber"),
    ("kernel", "kernels and formats", "blue"),
)
PROJECTIONS = (("q", "blue"), ("k", "teal"), ("v", "violet"), ("gate", "amber"), ("up", "red"))
PAIRS = ("q_k", "q_v", "k_v", "gate_up")


def probe_panel(run: RunData) -> Panel | None:
    figure = new_figure(yaxis={"title": "nats per token"})
    for key, name, color in (
        ("entropy_mixture", "noise averaged first, H(O)", "pink"),
        ("entropy_conditional", "given the noise, E[H(O|z)]", "violet"),
        ("entropy_tempered", "without noise", "blue"),
    ):
        _marked(figure, run, f"probe/{key}/by_token", name, color, form=".4f")
    if not figure.data:
        return None
    caption = (
        "At the tokens of one fixed set of answers, so that only the policy changes from point to point, and runs that share "
        "the set can be compared. Full vocabulary, tempered, mean over tokens."
    )
    return Panel(id="probe", section="signal", title="Entropy on the probe set", caption=caption, figure=figure)


def information_panel(run: RunData) -> Panel | None:
    figure = new_figure(yaxis={"title": "nats"})
    drawn = _marked(figure, run, "probe/information/by_token", "next token", "violet", form=".2e")
    if not any(drawn):
        return None
    caption = (
        "Mutual information I(O;Z) of the next token and the noise: how much a noise draw changes what is said, apart from "
        "making it more random. 0 without noise; may fall below 0 by its error."
    )
    return Panel(id="information", section="signal", title="What noise changes", caption=caption, figure=figure)


def diversity_panel(run: RunData) -> Panel | None:
    figure = new_figure(yaxis={"title": "per group", "rangemode": "tozero"})
    for key, name, color in (
        ("answers/distinct", "distinct answers", "blue"),
        ("paths/distinct_correct", "distinct ways to a right answer", "green"),
    ):
        steps, values = run.series(key)
        if steps:
            add_line(figure, steps, values, name, color, form=".2f")
    if not figure.data:
        return None
    caption = (
        "Final answers that differ within a group, and sequences of equations that differ among its correct answers. Ways that "
        "fall to one while accuracy rises mean that the model found a habit; answers that grow mean guessing."
    )
    return Panel(id="diversity", section="signal", title="Distinct answers", caption=caption, figure=figure)


def causes_panel(run: RunData) -> Panel | None:
    key = "mismatch/{}/mean_abs_prob_difference"
    found = [(name, color, *run.series(key.format(cause))) for cause, name, color in CAUSES]
    found = [entry for entry in found if entry[2]]
    if not found:
        return None
    kernel_alarms = [alarm for alarm in ALARMS if alarm.metric == key.format("kernel")]
    heights = [value for *_, values in found for value in values] + [alarm.level for alarm in kernel_alarms]
    figure = new_figure(yaxis=log_axis("mean |Δp|", heights))
    for name, color, steps, values in found:
        _marks(figure, steps, values, name, color, form=".2e", positive=True)
    for alarm in kernel_alarms:
        fault = alarm.severity == "fault"
        add_level(figure, alarm.level, f"{alarm.severity} (kernels)", "red" if fault else "amber", above=fault)
    caption = (
        "The same tokens scored twice, one thing changed at a time. The alarm lines are for kernels and formats alone; noise and "
        "updates are meant to move the policy."
    )
    return Panel(id="causes", section="health", title="Mismatch by cause", caption=caption, figure=figure)


def canary_panel(run: RunData) -> Panel | None:
    pairs = [
        (name, color, *run.series(key))
        for name, color, key in (
            ("effect of the adapters", "green", "canary/own/adapters_effect"),
            ("effect of the noise", "amber", "canary/own/noise_effect"),
            ("engine against trainer", "blue", "canary/own/engine_difference"),
        )
    ]
    pairs = [pair for pair in pairs if pair[2]]
    if not pairs:
        return None
    figure = new_figure(yaxis=log_axis("|Δ log p|, nats", [value for *_, values in pairs for value in values]))
    for name, color, steps, values in pairs:
        figure.add_scatter(
            x=steps,
            y=[value if value > 0 else None for value in rounded(values)],
            mode="lines",
            name=name,
            line={"color": f"var(--c-{color})", "width": 2},
            hovertemplate="%{y:.2e}",
        )
    caption = (
        "One of each step's own answers. Its log-probs must move away from the base model's and from those without noise, in the trainer and in the engine, "
        "and both must agree on it; a fault stops the run before the update."
    )
    return Panel(id="canary", section="health", title="Adapter canary", caption=caption, figure=figure)


def perturbation_panel(run: RunData) -> Panel | None:
    figure = new_figure(yaxis={"title": "relative size", "tickformat": PERCENT, "rangemode": "tozero"})
    for name, color in PROJECTIONS:
        _marked(figure, run, f"perturbation/{name}/relative", name, color, form=".2%")
    if not figure.data:
        return None
    last = [(pair, run.series(f"perturbation/{pair}/dependence")[1]) for pair in PAIRS]
    ties = ", ".join(f"{pair.replace('_', '–')} {values[-1]:.2f}" for pair, values in last if values)
    caption = (
        "How far the noise on a norm moves the outputs of the projections that read it. Dependence of two projections at the last "
        f"measurement (1: they move together, 0: unrelated): {ties}."
    )
    return Panel(id="perturbation", section="health", title="Noise at the projections", caption=caption, figure=figure)


def _marked(figure: go.Figure, run: RunData, key: str, name: str, color: str, *, form: str) -> list[float]:
    """A metric that only some steps have, as marks joined by a line; its values."""
    steps, values = run.series(key)
    _marks(figure, steps, values, name, color, form=form)
    return values


def _marks(
    figure: go.Figure,
    steps: Sequence[int],
    values: Sequence[float],
    name: str,
    color: str,
    *,
    form: str,
    positive: bool = False,
) -> None:
    if not steps:
        return
    figure.add_scatter(
        x=list(steps),
        y=[value if value > 0 or not positive else None for value in rounded(values)],
        mode="lines+markers",
        name=name,
        line={"color": f"var(--c-{color})", "width": 2},
        marker={"size": 5, "color": f"var(--c-{color})"},
        hovertemplate=f"%{{y:{form}}}",
    )
