"""A run in small: configuration, evaluations with their costs, right or wrong by question, curves; no weights, no texts.

``cell.json`` of a run folder and ``results/<matrix>/<cell>/summary.json`` are one thing, and all that tables, comparisons
and the report of several runs read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.experiments.cells import Cell
from qerl.experiments.stored import check_summary
from qerl.metrics.files import damaged_file, write_json
from qerl.metrics.run_dir import RunDir
from qerl.report.collect import RunData, read_run
from qerl.units import GB

if TYPE_CHECKING:
    from qerl.experiments.plan import Plan

SCHEMA = 1
SUMMARY_FILE = "summary.json"
CURVES = (
    "reward",
    "accuracy",
    "entropy",
    "groups/mixed",
    "groups/all_correct",
    "groups/all_wrong",
    "completions/mean_length",
    "completions/clipped_ratio",
    "grad_norm",
    "aqn/sigma",
    "mean_abs_prob_difference",
    "probe/entropy_tempered/by_token",
    "probe/entropy_conditional/by_token",
    "time/step",
    "num_tokens",
)
"""Metrics whose course over the steps is kept, to four significant digits."""
PATHS = ("model.path", "data.train", "data.eval", "run.dir", "diagnostics.probe")
"""Settings that may hold a path of somebody's machine; its last part is kept."""
UNKNOWN = "-"
MOST_SAMPLES = 9
"""Right answers a question are kept as one digit; for more samples the shares are left out."""


def write_cell_summary(plan: Plan, cell: Cell) -> None:
    """Write ``cell.json`` into the cell's run folder, whatever became of the cell."""
    entry = plan.manifest.cell(cell.name)
    matrix = plan.matrix
    facts = {
        "matrix": matrix.name,
        "protocol": matrix.protocol,
        "arm": cell.arm.name,
        "label": cell.arm.label or cell.arm.name,
        "phase": cell.phase,
        "axes": cell.axes,
        "state": entry["state"],
        "error": entry.get("error") or entry.get("problem"),
        "collapse": entry.get("collapse", False),
        "crowded": entry.get("crowded", False),
        "own_process": entry.get("own_process"),
        "shared_device": entry.get("shared_device", False),
        "target": matrix.target.model_dump(),
        "collapsed_below": matrix.collapsed_below,
        "matched": plan.manifest.read()["matched"].get(cell.group),
    }
    run = plan.run(cell)
    write_json(run.cell_path, run_summary(run, facts) if run.holds_a_run() else _bare(cell, facts))


def load_summary(path: Path) -> dict[str, Any]:
    """The summary of a run folder, finished or not, or of a folder of ``results/``.

    Raises:
        RunFolderError: the folder holds neither, or a damaged one.
    """
    run = RunDir(path)
    summary = run.read_json(run.cell_path)
    if summary is not None:
        check_summary(run.cell_path, summary)
        return dict(summary)
    stored = stored_summary(path)
    return run_summary(RunDir.open(path), {}) if stored is None else stored


def stored_summary(path: Path) -> dict[str, Any] | None:
    """The summary of a folder that holds it in place of the run, as those of ``results/`` do; None for any other folder.

    Raises:
        RunFolderError: it is damaged.
    """
    run = RunDir(path)
    if run.holds_a_run() or run.cell_path.exists():
        return None
    stored = run.read_json(SUMMARY_FILE)
    if stored is None or "arm" not in stored:
        return None
    check_summary(path / SUMMARY_FILE, stored)
    return dict(stored)


def run_summary(run: RunDir, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a run folder.

    Args:
        run: read only; the run may be unfinished.
        facts: what the matrix knows of the cell; for a run of its own it is its own arm.
    """
    data = read_run(run.path, samples=False)
    config = _without_paths(data.config)
    summary = data.summary
    devices = _devices(data)
    return {
        "schema": SCHEMA,
        "run": data.name,
        "matrix": None,
        "protocol": None,
        "arm": data.name,
        "label": data.name,
        "phase": "run",
        "axes": {},
        "state": data.status if data.status != "unfinished" else "running",
        "error": None,
        "seed": data.setting("train.seed"),
        "model": Path(str(data.setting("model.path") or "")).name,
        "steps": data.last_step,
        "planned_steps": data.planned_steps,
        "updates": summary.get("updates"),
        "config": config,
        "evaluations": _evaluations(data, devices),
        "final": _finals(run),
        "questions": _questions(run, data),
        "paired": summary.get("paired"),
        "curves": _curves(data),
        "devices": devices,
        "train_seconds": _train_seconds(data)[-1][1] if data.metrics else 0.0,
        "wall_seconds": summary.get("wall_seconds"),
        "stage_seconds": summary.get("stage_seconds"),
        "tokens": summary.get("tokens"),
        "peak_memory": _peak(data),
        "bit_exact": summary.get("bit_exact"),
        "portable_resumes": summary.get("portable_resumes"),
        "on_policy": summary.get("on_policy"),
        "machine": _machine(data),
        "warnings": list(summary.get("warnings", ())),
    } | dict(facts)


def _bare(cell: Cell, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a cell that never began."""
    config = None if cell.config is None else _without_paths(cell.config.model_dump(mode="json"))
    empty = {"evaluations": [], "final": {}, "questions": {}, "curves": {}, "steps": 0, "warnings": []}
    identity = {"schema": SCHEMA, "run": cell.name, "seed": cell.seed, "config": config}
    return identity | empty | dict(facts)


def _train_seconds(data: RunData) -> list[tuple[int, float]]:
    """Seconds of all steps up to each: sampling, scoring, learning, measuring; no set-up, evaluation or saving."""
    total, found = 0.0, []
    for row in data.metrics:
        total += float(row.get("time/step") or 0.0)
        found.append((int(row["step"]), total))
    return found


def _evaluations(data: RunData, devices: int | None) -> list[dict[str, Any]]:
    """Every evaluation with what had been spent on training when it was made."""
    seconds = {0: 0.0, **dict(_train_seconds(data))}
    rows = {int(row["step"]): row for row in data.metrics}
    answers = int(data.setting("rollout.prompts_per_step") or 0) * int(data.setting("rollout.group_size") or 0)
    spent, samples = {0: 0}, 0
    for step, row in rows.items():
        samples += answers * (1 + int(row.get("sampling/refill_rounds") or 0))
        spent[step] = samples
    return [
        {
            "step": point.step,
            "accuracy": point.accuracy,
            "low": point.low,
            "high": point.high,
            "count": point.count,
            "truncated": point.truncated,
            "unparsable": point.unparsable,
            "mean_length": point.mean_length,
            "train_seconds": seconds.get(point.step),
            "device_seconds": None if devices is None else seconds.get(point.step, math.nan) * devices,
            "wall_seconds": rows[point.step].get("time/elapsed") if point.step in rows else None,
            "tokens": 0 if point.step == 0 else rows.get(point.step, {}).get("num_tokens"),
            "samples": spent.get(point.step),
        }
        for point in data.evaluations
    ]


def _finals(run: RunDir) -> dict[str, Any]:
    stored: dict[str, Any] = run.read_json(run.final_path) or {}
    keep = ("accuracy", "low", "high", "confidence", "interval", "count", "truncated", "unparsable", "mean_length")
    more = ("pass_at_k", "maj_at_k", "policy", "seconds")
    return {name: {key: value.get(key) for key in (*keep, *more)} for name, value in stored.items()}


def _questions(run: RunDir, data: RunData) -> dict[str, Any]:
    """Right answers by question of the evaluations before, after and between (``step N``), and of the final ones whose rows are there."""
    samples = int(data.setting("eval.samples") or 1)
    between = (point.step for point in data.evaluations if point.step > 0)
    sources = {f"step {step}": (run.evaluations_dir / f"step-{step:06d}.jsonl", samples) for step in between}
    for name in ("before", "after"):
        found = (data.summary.get("evaluation") or {}).get(name)
        if found is not None and "step" in found:
            sources[name] = (run.evaluations_dir / f"step-{int(found['step']):06d}.jsonl", samples)
            sources.pop(f"step {int(found['step'])}", None)
    for name, value in (run.read_json(run.final_path) or {}).items():
        sources[name] = (run.evaluations_dir / f"final-{name}.jsonl", int(value["policy"]["samples"]))
    found = {}
    for name, (path, count) in sources.items():
        if path.exists() and count <= MOST_SAMPLES:
            rows = (
                run.read_final_evaluation(name)
                if path.name.startswith("final")
                else run.read_evaluation(int(path.stem[5:]))
            )
            with damaged_file(path, "an id and an accuracy of each question", KeyError, TypeError):
                found[name] = {"ids": ids_hash(rows), "samples": count, "right": right_digits(rows, count)}
    return found


def ids_hash(rows: Sequence[Mapping[str, Any]]) -> str:
    """Short hash of the questions' ids in their order."""
    return hashlib.sha256("\n".join(str(row["id"]) for row in rows).encode()).hexdigest()[:16]


def right_digits(rows: Sequence[Mapping[str, Any]], samples: int) -> str:
    """One character a question: how many of its answers were right, ``-`` where none could be scored.

    Where some answers could not be scored the share of the others is rounded to a whole number of ``samples``.
    """
    shares = [row["accuracy"] for row in rows]
    return "".join(UNKNOWN if share is None else str(round(share * samples)) for share in shares)


def asked(questions: Mapping[str, Any]) -> tuple[str, int]:
    """Which questions they are, by the hash of their ids, and how many: equal where they can be held against each other one by one."""
    return str(questions["ids"]), len(questions["right"])


def shares_of(questions: Mapping[str, Any]) -> list[float | None]:
    """Share of right answers of each question, from what :func:`right_digits` kept."""
    count = int(questions["samples"])
    return [None if digit == UNKNOWN else int(digit) / count for digit in questions["right"]]


def _curves(data: RunData) -> dict[str, list[list[float]]]:
    """Metric -> [steps, values]."""
    found = {}
    for key in CURVES:
        steps, values = data.series(key)
        if steps:
            found[key] = [list(map(float, steps)), [float(f"{value:.4g}") for value in values]]
    return found


def _devices(data: RunData) -> int | None:
    """GPUs of the run: one if it reports a GPU's memory, none (None) on a CPU."""
    return 1 if data.series("memory/reserved_gb")[1] else None


def _peak(data: RunData) -> dict[str, Any] | None:
    """The largest peak of the run in bytes, and what it is of."""
    for key, name in (("memory/allocated_gb", "GPU, allocated"), ("memory/rss_gb", "process, resident")):
        values = data.series(key)[1]
        if values:
            return {"of": name, "bytes": max(values) * GB}
    return None


def _machine(data: RunData) -> dict[str, Any]:
    env = data.env
    gpus = [gpu.get("name") for gpu in env.get("gpus") or []]
    versions = {name: env.get("versions", {}).get(name) for name in ("qerl", "python", "torch", "triton")}
    return {"gpus": gpus, "cpu": (env.get("cpu") or {}).get("model"), "commit": env.get("commit"), "versions": versions}


def _without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with absolute paths cut to their last part."""
    copy = {name: dict(part) if isinstance(part, Mapping) else part for name, part in config.items()}
    for key in PATHS:
        section, _, leaf = key.partition(".")
        value = copy.get(section, {}).get(leaf)
        if isinstance(value, str) and Path(value).is_absolute():
            copy[section][leaf] = Path(value).name
    return copy
