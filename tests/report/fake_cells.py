"""Plausible summaries of a matrix's cells, made without training: what the report of several runs and its tests read."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from qerl.experiments.cells import expand, load_matrix
from qerl.metrics.files import write_json

QUESTIONS = 400
MATRIX = """
name: example
base: base.yaml
protocol: mechanism
arms:
  - {name: bf16, label: BF16 LoRA, set: {quant.format: bf16, aqn.enabled: false}}
  - {name: nvfp4, label: NVFP4 LoRA, set: {aqn.enabled: false}, seeds: [0, 1, 2, 3, 4]}
  - {name: nvfp4_aqn, label: "NVFP4 + AQN, absolute 5e-2 to 5e-4", seeds: [0, 1, 2, 3, 4]}
  - {name: nvfp4_t, label: "NVFP4, temperature matched to NVFP4 + AQN", set: {aqn.enabled: false}, match_temperature: {arm: nvfp4_aqn}}
  - {name: nf4, label: NF4 LoRA, set: {quant.format: nf4, aqn.enabled: false}}
seeds: [0, 1, 2]
target: {accuracy: 0.45, device_seconds: 900}
detect: {sd: 0.01, source: assumed}
compare: [[nvfp4, nvfp4_aqn], [nvfp4_t, nvfp4_aqn], [bf16, nvfp4]]
"""
ENDS = {"bf16": 0.46, "nvfp4": 0.47, "nvfp4_aqn": 0.48, "nvfp4_t": 0.455, "nf4": 0.43}
SPEEDS = {"bf16": 2.9, "nvfp4": 2.2, "nvfp4_aqn": 2.3, "nvfp4_t": 2.25, "nf4": 4.1}


def write_fake_matrix(folder: Path, *, hostile: str = "") -> Path:
    """``results/example`` under ``folder``: one failed cell, one that never began, one from a portable checkpoint.

    Args:
        folder: a scratch folder.
        hostile: put into every name and message that comes from a file.
    """
    (folder / "base.yaml").write_text("model: {path: demo}\ndata: {train: gsm8k, eval: gsm8k}\ntrain: {steps: 60}\n")
    path = folder / "example.yaml"
    path.write_text(MATRIX)
    matrix = load_matrix(path)
    results = folder / "results" / "example"
    states: dict[str, Any] = {}
    for cell in expand(matrix, path, [], folder / "out", temperatures={"nvfp4_t": 1.21}):
        state = {"nf4-s1": "failed", "nf4-s2": "waiting"}.get(cell.name, "finished")
        states[cell.name] = {"state": state, "arm": cell.arm.name, "seed": cell.seed, "phase": "run", "axes": {}}
        if state == "failed":
            states[cell.name]["error"] = f"TrainingError: the gradient of update 31 is not finite{hostile}"
        if state != "waiting":
            summary = fake_cell(cell.arm.name, cell.seed, failed=state == "failed")
            facts = {
                "matrix": "example",
                "protocol": "mechanism",
                "phase": "run",
                "axes": {},
                "error": states[cell.name].get("error"),
            }
            facts |= {
                "run": cell.name,
                "label": f"{cell.arm.label}{hostile}",
                "config": cell.config.model_dump(mode="json"),
            }
            matched = {"temperature": 1.21} if cell.arm.name == "nvfp4_t" else None
            write_json(results / cell.name / "summary.json", summary | facts | {"matched": matched})
    plan = {"schema": 1, "matrix": "example", "plan": matrix.model_dump(mode="json"), "matched": {}, "choices": {}}
    pairs = [{"first": a, "second": b, "seeds": [5, 5], "difference": 0.02} for a, b in matrix.compare]
    write_json(results / "matrix.json", plan | {"detectable": pairs, "cells": states})
    return results


def fake_cell(arm: str, seed: int, *, failed: bool = False) -> dict[str, Any]:
    """The summary of one run."""
    rng = random.Random(f"{arm} {seed}")
    end = ENDS[arm] + rng.gauss(0, 0.008)
    last = 30 if failed else 60
    speed = SPEEDS[arm] * (1 + 0.02 * rng.random())
    steps = list(range(1, last + 1))
    points = [
        fake_point(step, 0.27 + (end - 0.27) * (1 - math.exp(-step / 18)), speed)
        for step in range(0, last + 1, 20)
        if step <= last
    ]
    after = points[-1]["accuracy"]
    noisy = arm == "nvfp4_aqn"
    curves = {
        "reward": [0.2 + 0.25 * (1 - math.exp(-s / 20)) + rng.gauss(0, 0.02) for s in steps],
        "entropy": [0.36 - 0.002 * s + (0.03 if noisy else 0) + rng.gauss(0, 0.01) for s in steps],
        "groups/mixed": [0.48 + 0.002 * s + (0.03 if noisy else 0) + rng.gauss(0, 0.04) for s in steps],
        "completions/mean_length": [290 - s + rng.gauss(0, 6) for s in steps],
        "time/step": [speed * (1 + 0.05 * rng.random()) for _ in steps],
        "aqn/sigma": [0.05 * 0.01 ** (s / 60) if noisy and s > 6 else 0.0 for s in steps],
    }
    return {
        "schema": 1,
        "run": f"{arm}-s{seed}",
        "arm": arm,
        "label": arm,
        "state": "failed" if failed else "finished",
        "collapse": failed,
        "seed": seed,
        "model": "Example-0.5B",
        "steps": last,
        "planned_steps": 60,
        "evaluations": points,
        "final": {},
        "questions": {}
        if failed
        else {"after": {"ids": "0123456789abcdef", "samples": 1, "right": fake_digits(after, rng)}},
        "curves": {key: [list(map(float, steps)), values] for key, values in curves.items()},
        "devices": 1,
        "train_seconds": last * speed,
        "wall_seconds": last * speed + 90,
        "stage_seconds": {"rollout": last * speed * 0.6, "backward": last * speed * 0.3, "evaluate": 45.0, "save": 4.0},
        "peak_memory": {"of": "GPU, allocated", "bytes": (9e9 if arm == "bf16" else 7.6e9)},
        "bit_exact": not (arm == "nvfp4" and seed == 2),
        "portable_resumes": [20] if arm == "nvfp4" and seed == 2 else [],
        "machine": {"gpus": ["Example GPU"], "cpu": "Example CPU", "commit": "0" * 40, "versions": {}},
        "warnings": [],
    }


def fake_point(step: int, accuracy: float, speed: float) -> dict[str, Any]:
    return {
        "step": step,
        "accuracy": accuracy,
        "low": accuracy - 0.03,
        "high": accuracy + 0.03,
        "count": QUESTIONS,
        "train_seconds": step * speed,
        "device_seconds": step * speed,
        "wall_seconds": step * speed + 40,
        "tokens": step * 100_000,
        "samples": step * 256,
    }


def fake_digits(accuracy: float, rng: random.Random) -> str:
    """Questions that are easy for one run are easy for another: difficulty is shared."""
    difficulty = random.Random(7)
    return "".join(str(int(difficulty.random() + rng.gauss(0, 0.08) < accuracy)) for _ in range(QUESTIONS))


def settings_of(results: Path, name: str) -> dict[str, Any]:
    """The stored summary of a cell."""
    return dict(json.loads((results / name / "summary.json").read_text()))
