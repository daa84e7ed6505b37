"""The three questions that one number must not answer together: bytes at the bottleneck, groups with signal, quality in time.

What a single run can say is said; what it cannot (faster or better than what?) is named, since that takes a second run.
"""

from __future__ import annotations

from dataclasses import dataclass

from qerl.report import text
from qerl.report.collect import Evaluation, RunData
from qerl.units import bytes_text

FORMAT_BITS = {"nvfp4": 4.5, "mxfp4": 4.25, "nf4": 4.5}
"""Bits a weight, scales included."""
NOT_A_STEP = ("evaluate", "save")
"""Stages that are no part of learning."""
TREND = 5
"""A trend compares the first and the last of so many parts of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One card: the question, a short answer, the numbers behind it, and what one run leaves open."""

    id: str
    """The section of the page that shows more."""
    title: str
    answer: str
    lines: tuple[str, ...]
    unknown: str


def three_questions(run: RunData, target: float | None) -> list[Question]:
    """The cards of a run, in their fixed order.

    Args:
        run: the run.
        target: accuracy set beforehand, as a fraction; None for none.
    """
    return [_bytes(run), _signal(run), _quality(run, target)]


def generation_share(run: RunData) -> float | None:
    """Share of generation in the time of the steps, evaluation and saving left out."""
    stated = run.summary.get("stage_seconds") or {}
    names = {key.removeprefix("time/") for row in run.metrics for key in row if key.startswith("time/")}
    seconds = {
        name: float(stated[name]) if name in stated else sum(run.series(f"time/{name}")[1])
        for name in {*stated, *names} - {"step", "elapsed", "compile", *NOT_A_STEP}
    }
    total = sum(seconds.values())
    return seconds.get("rollout", 0.0) / total if total > 0 else None


def _bytes(run: RunData) -> Question:
    measured = run.memory.get("measured") or {}
    name = str(run.setting("quant.format") or "bf16")
    weights, copies = measured.get("base_weights"), measured.get("dense_cache")
    bits = FORMAT_BITS.get(name)
    lines = []
    if weights:
        plain = f", {bytes_text(weights * 16 / bits)} in BF16 ({16 / bits:.2f}×)" if bits else ""
        lines.append(f"Linear layers are held in {bytes_text(weights)} as {name.upper()}{plain}.")
    if copies:
        lines.append(f"Products read dequantized copies of {bytes_text(copies)}, not the packed weights.")
    reference = run.kernels.get("fp4_linear") == "reference" and not copies
    if reference and bits is not None:
        lines.append("The reference kernel dequantizes the weights for every product.")
    share = generation_share(run)
    if share is not None:
        lines.append(
            f"Generation takes {share:.0%} of a step: made twice as fast, the step would be {1 / (1 - share / 2):.2f}× as fast, "
            f"and at most {_most(share)} however fast."
        )
    if bits is None:
        answer = "Not quantized: the baseline for others."
    elif copies:
        answer = "No: dense copies are read here."
    elif reference:
        answer = "No: weights are dequantized for every product."
    elif weights:
        answer = f"{16 / bits:.2f}× fewer bytes of weights."
    else:
        answer = "Not recorded yet."
    return Question(
        id="bytes",
        title="Are fewer bytes moved at the real bottleneck?",
        answer=answer,
        lines=tuple(lines),
        unknown="Whether that made it faster takes a run in another format on the same machine.",
    )


def _most(share: float) -> str:
    return f"{1 / (1 - share):.2f}×" if share < 0.999 else "without bound"


def _signal(run: RunData) -> Question:
    mixed = run.series("groups/mixed")[1]
    lines = []
    answer = "Not recorded yet."
    if mixed:
        mean = sum(mixed) / len(mixed)
        answer = f"{mean:.0%} of groups were mixed."
        begin, end = _ends(mixed)
        if len(mixed) >= 2 * TREND:
            lines.append(f"{begin:.0%} in the first fifth of the run, {end:.0%} in the last.")
        others = [
            f"{_ends(values)[1]:.0%} all {name}"
            for key, name in (("all_correct", "right"), ("all_wrong", "wrong"), ("all_truncated", "truncated"))
            if (values := run.series(f"groups/{key}")[1]) and _ends(values)[1] >= 0.005
        ]
        if others:
            lines.append(f"At the end the others are {', '.join(others)}.")
    entropy = run.series("entropy")[1]
    if len(entropy) >= 2 * TREND:
        begin, end = _ends(entropy)
        lines.append(f"Entropy of the sampler went from {begin:.3g} to {end:.3g} nats a token.")
    information = run.series("probe/information/by_token")[1]
    if any(information):
        lines.append(f"Noise draws change the next token by up to {max(information):.2g} nats of information.")
    return Question(
        id="signal",
        title="Do more groups carry a learning signal?",
        answer=answer,
        lines=tuple(lines),
        unknown="Whether noise or rounding made it more takes a run without them, from the same seed and data order.",
    )


def _ends(values: list[float]) -> tuple[float, float]:
    """Means of the first and of the last part."""
    size = max(1, len(values) // TREND)
    return sum(values[:size]) / size, sum(values[-size:]) / size


def _quality(run: RunData, target: float | None) -> Question:
    points = run.evaluations
    trained = [point for point in points if point.step > 0]
    lines = []
    if trained:
        best = max(trained, key=lambda point: point.accuracy)
        lines.append(f"Best {text.percent(best.accuracy)} {_when(best)}; last {text.percent(points[-1].accuracy)}.")
    if target is None:
        answer = f"{text.percent(points[-1].accuracy)} at the last evaluation." if points else "Not evaluated yet."
        unknown = "No target was set beforehand; with --target 0.45 the report says when 45 % was reached."
    else:
        reached = next((point for point in points if point.accuracy >= target), None)
        if reached is not None:
            answer = f"{text.percent(target)} reached {_when(reached)}."
        else:
            answer = f"{text.percent(target)} not reached {_when(points[-1]) if points else 'yet'}: censored there."
        unknown = "Sooner than what? That takes other runs with the same target (qerl matrix)."
    if points and points[-1].low is not None:
        lines.append(f"Interval of the last: {text.interval(points[-1].low, points[-1].high)}, over questions.")
    return Question(
        id="quality", title="Is a preset quality reached sooner?", answer=answer, lines=tuple(lines), unknown=unknown
    )


def _when(point: Evaluation) -> str:
    spent = [f"at step {point.step}"]
    if point.seconds:
        spent.append(f"after {text.seconds(point.seconds)} of training")
    if point.tokens:
        spent.append(f"{text.count(point.tokens)} tokens")
    return ", ".join(spent)
