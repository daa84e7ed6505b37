"""Cells as they were after a step that all of them have been evaluated at: a look at a matrix before its end. Free of torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qerl.errors import ConfigError
from qerl.experiments.folders import Collection


def as_of_step(collection: Collection, step: int) -> Collection:
    """The cells that were evaluated after ``step``, as if they had ended there; others keep no result.

    What came later is left out: later evaluations and those of the trained model, later points of the curves. Schedules of learning
    rate and noise stay those of the whole run, which the summary says (``as_of``).

    Raises:
        ConfigError: no cell was evaluated after that step.
    """
    cells = tuple(_as_of(cell, step) for cell in collection.cells)
    if not any(cell["state"] == "finished" for cell in cells):
        known = sorted({point["step"] for cell in collection.cells for point in cell["evaluations"]} - {0})
        raise ConfigError(
            "no cell was evaluated after that step",
            got=f"--step {step}",
            expected=f"one of {', '.join(map(str, known))}" if known else "cells with evaluations",
            remedy="Give one of these steps" if known else "Wait until cells have been evaluated",
        )
    return replace(collection, cells=cells)


def common_steps(collection: Collection) -> dict[int, int]:
    """Step -> how many cells without a result were evaluated after it; nothing where a cell has ended."""
    if any(cell["state"] in ("finished", "trained") for cell in collection.cells):
        return {}
    steps = [point["step"] for cell in collection.cells for point in cell["evaluations"] if point["step"] > 0]
    return {step: steps.count(step) for step in sorted(set(steps))}


def _as_of(cell: dict[str, Any], step: int) -> dict[str, Any]:
    """One cell; one without an evaluation there is open, with nothing after its start."""
    points = [point for point in cell["evaluations"] if point["step"] <= step]
    reached = bool(points) and points[-1]["step"] == step
    questions = {name: cell["questions"][name] for name in ("before", f"step {step}") if name in cell["questions"]}
    if cell["evaluations"] and cell["evaluations"][-1]["step"] == step and "after" in cell["questions"]:
        questions[f"step {step}"] = cell["questions"]["after"]
    return {
        **cell,
        "state": "finished" if reached else "waiting" if cell["state"] in ("finished", "trained") else cell["state"],
        "as_of": step if reached else None,
        "steps": min(cell["steps"], step),
        "evaluations": points if reached else points[:1],
        "final": {},
        "paired": None,
        "questions": {"after" if name != "before" else name: value for name, value in questions.items()},
        "curves": {key: cut for key, curve in cell["curves"].items() if (cut := _cut(curve, step))[0]},
        "train_seconds": points[-1].get("train_seconds") if reached else None,
        "stage_seconds": None,
    }


def _cut(curve: list[list[float]], step: int) -> list[list[float]]:
    """[steps, values] up to a step."""
    kept = [(at, value) for at, value in zip(*curve, strict=True) if at <= step]
    return [[at for at, _ in kept], [value for _, value in kept]]
