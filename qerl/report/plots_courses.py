"""Figures of courses: accuracy and metrics of all arms over steps or seconds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from qerl.report.arm_parts import DASHES, color_of, round_of, safe, target_line
from qerl.report.comparison import Comparison, Curve
from qerl.report.plot_parts import PERCENT, Panel, new_figure, rounded, running_mean

CROWDED = 20
"""With more runs than this, long lines are drawn as means of arms alone, over ``WINDOW`` steps."""
WINDOW = 5
CURVES = (
    ("groups/mixed", "Mixed groups", "share of groups", ".0%", "Groups with both right and wrong answers: what there is to learn from."),
    ("reward", "Reward", "mean reward", ".3f", "Of the training answers, which are sampled with the arm's own noise and temperature."),
    ("entropy", "Entropy", "nats a token", ".3f", "Of the policy that samples, on the answers it samples: not one set of contexts for all arms."),
    ("probe/entropy_conditional/by_token", "Entropy on the probe set", "nats a token", ".3f", "On the fixed contexts of the matrix, mean over draws of noise: what may be compared, unless it is said above that there are several sets."),
    ("completions/mean_length", "Answer length", "tokens", ".0f", "Of the training answers."),
    ("aqn/sigma", "Noise", "sigma", ".2g", "Level of the noise on norm scales."),
)  # fmt: skip
"""Metric, title, axis, format and caption of each course over the steps."""


def accuracy_by_step(comparison: Comparison, prefix: str) -> Panel | None:
    """Evaluations over the steps."""
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


def accuracy_by_seconds(comparison: Comparison, prefix: str) -> Panel | None:
    """Evaluations over seconds of training, of the runs that have times of their own."""
    return _curves(
        comparison,
        f"{prefix}seconds",
        "quality",
        f"Held-out accuracy over {comparison.time_name}",
        "Seconds of the steps; no set-up, evaluation or saving. The first point at or above the target is the time to target.",
        comparison.accuracy_by_seconds,
        {"title": "accuracy", "tickformat": PERCENT},
        ".1%",
        target=True,
        x_title=comparison.time_name,
        means=False,
    )


def metric(
    comparison: Comparison, prefix: str, key: str, title: str, axis: str, form: str, caption: str
) -> Panel | None:
    """A metric over the steps; none where no run has it."""
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
    crowded = shape == "linear" and len(curves) > CROWDED and max(len(curve.values) for curve in curves) > 12
    if crowded:
        curves = _means(comparison, curves)
        caption += f" Means of each arm's runs over {WINDOW} steps; runs by themselves are left out here."
    for index, arm in enumerate(comparison.arms):
        own = [curve for curve in curves if curve.arm == arm.key and curve.values]
        color, dash = color_of(index), DASHES[round_of(index) % len(DASHES)]
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
                name=safe(arm.label),
                legendgroup=arm.key,
                showlegend=single and number == 0,
                hovertemplate=f"%{{y:{form}}} ({'mean' if crowded else f'seed {curve.seed}'})<extra>{safe(arm.label)}</extra>",
            )
        if mean is not None:
            figure.add_scatter(
                x=mean[0],
                y=rounded(mean[1]),
                mode="lines",
                line={"width": 2.4, "dash": dash, "shape": shape, "color": f"var(--c-{color})"},
                name=safe(arm.label),
                legendgroup=arm.key,
                hovertemplate=f"%{{y:{form}}} (mean)<extra>{safe(arm.label)}</extra>",
            )
    if target and comparison.target is not None:
        target_line(figure, comparison.target, vertical=False)
    return Panel(id=id, section=section, title=title, caption=caption, figure=figure, wide=True)


def _means(comparison: Comparison, curves: Sequence[Curve]) -> list[Curve]:
    """One smooth curve an arm."""
    found = []
    for arm in comparison.arms:
        own = [curve for curve in curves if curve.arm == arm.key and curve.values]
        if own:
            steps, values = _mean_curve(own)
            found.append(Curve(arm=arm.key, seed=None, steps=tuple(steps), values=tuple(running_mean(values, WINDOW))))
    return found


def _mean_curve(curves: Sequence[Curve]) -> tuple[list[float], list[float]]:
    """Means at the steps that all seeds have."""
    tables = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    shared = sorted(set(tables[0]).intersection(*tables[1:]))
    return shared, [fmean(table[step] for table in tables) for step in shared]
