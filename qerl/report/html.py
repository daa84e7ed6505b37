"""The page: one HTML file with everything in it, readable without a network, in light and dark, on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qerl.metrics.catalogue import ALARMS
from qerl.metrics.machine_catalogue import STAGES
from qerl.metrics.run_dir import RunDir
from qerl.report import text
from qerl.report.collect import (
    Evaluation,
    RunData,
    changed_settings,
    difference,
    memory_owners,
    read_run,
    rests_of_phases,
    warnings_of,
)
from qerl.report.page import fill, import_renderers
from qerl.report.plots import panels
from qerl.report.samples import OUTCOMES
from qerl.report.speedup import Comparison, comparison_rows
from qerl.report.three_questions import three_questions
from qerl.units import GB, bytes_text

SECTIONS = (
    ("quality", "Quality"),
    ("signal", "Learning signal"),
    ("bytes", "Bytes and time"),
    ("health", "Can the run be believed?"),
)
"""Sections of figures: id and heading."""


DEMO = "demo"
"""``model.path`` of the packaged model."""
DEMO_NOTE = (
    "The packaged model was pretrained to answer in two ways, with the bare result (mostly wrong) or with worked steps (mostly "
    "right), and greedily gives the bare result: a gain here is a switch to the worked way, and hardly any new arithmetic."
)


def write_report(
    run_path: str | Path,
    out_path: str | Path | None = None,
    *,
    target: float | None = None,
    baseline: Comparison | None = None,
) -> Path:
    """Writes the report of a run, finished or not.

    Args:
        run_path: the run folder.
        out_path: the HTML file; None is ``report.html`` in the run folder.
        target: accuracy that was set beforehand, as a fraction: when it was reached is stated.
        baseline: speed against another run (``speedup.compare_speed``), shown with the times.

    Returns:
        The file written.

    Raises:
        RunFolderError: the folder holds no run, or a damaged file.
        MissingDependencyError: plotly or jinja2 is not installed.
    """
    run = RunDir.open(run_path)
    path = Path(out_path).absolute() if out_path is not None else run.report_path
    return run.write_text(path, render(read_run(run_path), target=target, baseline=baseline))


def render(run: RunData, *, target: float | None = None, baseline: Comparison | None = None) -> str:
    """The text of the page; ``target`` and ``baseline`` as in ``write_report``."""
    import_renderers()
    shown = panels(run)
    return fill(
        "page.html",
        shown,
        run=run,
        sections=[(id, title, [p for p in shown if p.section == id]) for id, title in SECTIONS],
        method=method_line(run),
        headline=headline(run),
        noisy=run.summary.get("noisy"),
        cards=three_questions(run, target),
        tiles=tiles(run),
        warnings=warnings_of(run),
        policy=evaluation_policy(run),
        changed=changed_settings(run.config),
        environment=text.flatten(run.env),
        stage_rows=stage_rows(run),
        token_rows=token_rows(run),
        comparison_rows=[] if baseline is None else comparison_rows(baseline),
        memory_rows=[*memory_owners(run), *rests_of_phases(run)],
        peak_rows=peak_rows(run),
        alarms=ALARMS,
        outcomes=[name for name in OUTCOMES if any(name in part.counts for part in run.samples)],
    )


def method_line(run: RunData) -> list[str]:
    """What ran, in a few short labels."""
    get = run.setting
    labels = [Path(str(run.summary.get("model") or get("model.path") or "")).name]
    if get("quant.format"):
        labels.append(f"{str(get('quant.format')).upper()} base")
    if get("train.mode") == "full":
        labels.append("all weights trained")
    elif get("lora.rank"):
        labels.append(f"LoRA rank {get('lora.rank')}")
    if get("objective.type"):
        labels.append(str(get("objective.type")).upper().replace("DR_GRPO", "Dr. GRPO"))
    if get("rollout.prompts_per_step"):
        labels.append(f"{get('rollout.prompts_per_step')} prompts × {get('rollout.group_size')} answers")
    if get("aqn.enabled") is not None:
        start, end, stages = get("aqn.sigma_start"), get("aqn.sigma_end"), get("aqn.num_stages")
        unit = "KL " if get("aqn.magnitude") == "kl" else ""
        on = f"AQN {get('aqn.schedule')} {unit}{text.plain(start)} → {text.plain(end)}, {stages} stages"
        labels.append(", ".join([on, *noise_kind(run)]) if get("aqn.enabled") else "AQN off")
    if get("train.seed") is not None:
        labels.append(f"seed {get('train.seed')}")
    labels.append(on_policy_label(run))
    return [label for label in labels if label]


def on_policy_label(run: RunData) -> str:
    """Whether the updates were on-policy, by identity (``train.on_policy``); empty when the run does not say."""
    stated = run.summary.get("on_policy")
    if stated is None:
        values = run.series("on_policy")[1]
        stated = {"on_policy": all(values), "on_policy_steps": sum(values), "steps": len(values)}
    if not stated["steps"]:
        return ""
    if stated["on_policy"]:
        return "on-policy"
    reasons = ", ".join(name.replace("_", " ") for name in stated.get("reasons", {}))
    share = f"on-policy in {stated['on_policy_steps']:g} of {stated['steps']} steps"
    return f"{share} (differs: {reasons})" if reasons else share


def noise_kind(run: RunData) -> list[str]:
    """How the noise differs from the plain scheme (one draw a rollout, replaced, shared, absolute, on prompts too)."""
    plain = {"scope": "rollout", "mode": "replace", "sharing": "shared", "magnitude": "absolute", "prompt": "noisy"}
    found = [(key, run.setting(f"aqn.{key}")) for key in plain]
    parts = [f"{key} {value}" for key, value in found if value not in (None, plain[key])]
    return parts + (["sigma by the controller"] if run.setting("aqn.controller.enabled") else [])


def headline(run: RunData) -> dict[str, Any] | None:
    """Accuracy before and after, their difference, and the drawing of their intervals."""
    if not run.evaluations:
        return None
    first, last = run.evaluations[0], run.evaluations[-1]
    before = first if first.step == 0 else None
    after = last if last.step > 0 else None
    after_name = "after" if run.status == "finished" else f"step {last.step}"
    rows = [("before", before)] if before else []
    rows += [(after_name, after)] if after else []
    return {
        "before": before,
        "after": after,
        "after_name": after_name,
        "difference": difference(run, before, after) if before and after else None,
        "confidence": f"{100 * last.confidence:g}%",
        "interval": "Wilson" if (run.setting("eval.samples") or 1) == 1 else "bootstrap",
        "rows": [(name, point, interval_drawing(point)) for name, point in rows],
        "note": DEMO_NOTE if run.setting("model.path") == DEMO and after else None,
    }


def interval_drawing(point: Evaluation) -> dict[str, float]:
    """Where an accuracy and its interval lie on a scale from 0 to 100."""
    low = point.low if point.low is not None else point.accuracy
    high = point.high if point.high is not None else point.accuracy
    return {"low": 100 * low, "width": max(100 * (high - low), 0.4), "at": 100 * point.accuracy}


def tiles(run: RunData) -> list[tuple[str, str, str]]:
    """Small facts under the headline: name, value, remark."""
    planned = run.planned_steps
    found = [("Steps", f"{run.last_step} / {planned}" if planned else str(run.last_step), "")]
    wall = run.summary.get("wall_seconds")
    if wall is not None:
        found.append(("Wall time", text.seconds(wall), "with evaluation"))
    elif run.series("time/step")[1]:
        found.append(("Wall time", text.seconds(sum(run.series("time/step")[1])), "of the steps so far"))
    tokens = run.series("num_tokens")[1]
    if tokens:
        found.append(("Tokens", text.count(tokens[-1]), "prompt + answer"))
    speed = sorted(run.series("tokens_per_second")[1])
    if speed:
        found.append(("Throughput", f"{text.count(speed[len(speed) // 2])}/s", "tokens, median step"))
    mixed = run.series("groups/mixed")[1]
    if mixed:
        found.append(("Mixed groups", text.percent(sum(mixed) / len(mixed)), "mean of all steps"))
    peak = peak_memory(run)
    if peak is not None:
        found.append(("Peak memory", bytes_text(peak[1]), peak[0]))
    return found


def peak_memory(run: RunData) -> tuple[str, float] | None:
    """The largest peak: what it is of, and bytes."""
    for key, name in (("memory/reserved_gb", "GPU, reserved"), ("memory/rss_gb", "resident, process")):
        values = run.series(key)[1]
        if values:
            return name, max(values) * GB
    return None


def evaluation_policy(run: RunData) -> str:
    """The declared evaluation policy, as the end of a sentence."""
    summary = run.summary.get("evaluation") or {}
    stated = (summary.get("after") or summary.get("before") or {}).get("policy") or run.setting("eval") or {}
    if not stated:
        return "not recorded."
    temperature = stated.get("temperature", 0.0)
    how = "greedy decoding (temperature 0)" if temperature == 0 else f"temperature {temperature:g}"
    if temperature != 0 and stated.get("top_p", 1.0) < 1.0:
        how += f", top-p {stated['top_p']:g}"
    samples = int(stated.get("samples", 1))
    answers = "one answer a question" if samples == 1 else f"{samples} answers a question"
    noise = stated.get("noise")
    sigma = f" (sigma {noise['sigma']:g})" if isinstance(noise, dict) and "sigma" in noise else ""
    aqn = f"AQN noise on in evaluation{sigma}" if noise else "AQN noise off in evaluation"
    limit = stated.get("max_new_tokens") or run.setting("rollout.max_new_tokens")
    longest = f", at most {limit} tokens" if limit else ""
    count = run.evaluations[-1].count if run.evaluations else None
    questions = f", {int(count)} held-out questions" if count else ""
    return f"{how}, {answers}{longest}, {aqn}{questions}."


def stage_rows(run: RunData) -> list[tuple[str, float, float]]:
    """Stage, seconds over the run, share of their sum."""
    seconds = run.summary.get("stage_seconds") or {
        name: sum(run.series(f"time/{name}")[1]) for name in STAGES if run.series(f"time/{name}")[1]
    }
    total = sum(seconds.values())
    rows = sorted(seconds.items(), key=lambda item: -item[1])
    return [(name, value, value / total) for name, value in rows if value > 0]


def token_rows(run: RunData) -> list[tuple[str, str]]:
    """Token totals of the run."""
    stated = run.summary.get("tokens")
    if stated:
        rows = [(f"{name} tokens".replace("_", " "), value) for name, value in text.flatten(stated).items()]
    else:
        sums = [(name, sum(run.series(f"tokens/{name}")[1])) for name in ("prompt", "completion")]
        rows = [(f"{name} tokens", value) for name, value in sums if value]
    per_step = run.series("tokens/completion")[1]
    if len(per_step) > 1:
        # Lengths drift, and seconds a step with them.
        rows += [("answer tokens, first step", per_step[0]), ("answer tokens, last step", per_step[-1])]
    return [(name, f"{value:,.0f}") for name, value in rows]


def peak_rows(run: RunData) -> list[tuple[str, float]]:
    """Peaks in bytes: by phase as predicted and measured (memory.json), and for the process and the device."""
    predicted = run.memory.get("predicted_peaks") or run.memory.get("phase_peaks") or {}
    measured = run.summary.get("peak_memory") or run.memory.get("process") or {}
    rows = {f"{name} phase, predicted": value for name, value in predicted.items()}
    for phase, figures in (run.memory.get("measured_peaks") or {}).items():
        rows |= {f"{phase} phase, {kind}": value for kind, value in figures.items()}
    rows |= {name.removesuffix("_peak"): value for name, value in measured.items() if name.endswith("_peak")}
    names = {"rss": "process, resident, measured", "allocated": "GPU, allocated", "reserved": "GPU, reserved"}
    return [(names.get(name, name), value) for name, value in rows.items()]
