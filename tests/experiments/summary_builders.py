"""Summaries of cells in the fewest words, for tests of tables."""

from __future__ import annotations

from typing import Any

PLAN = {"plan": {"protocol": "mechanism", "compare": []}}


def axis_cell(
    arm: str, rate: float, seed: int, after: float | None, *, before: float = 0.2, state: str = "finished"
) -> dict[str, Any]:
    """A cell of a matrix whose axis is the learning rate, evaluated before training and, unless None, after it."""
    points = [{"step": 0, "accuracy": before}, *([] if after is None else [{"step": 20, "accuracy": after}])]
    return {
        "run": f"{arm}-lr{rate:g}-s{seed}",
        "matrix": "grid",
        "protocol": "mechanism",
        "arm": arm,
        "label": arm.upper(),
        "phase": "run",
        "axes": {"optim.lr": rate},
        "seed": seed,
        "state": state,
        "steps": 20 if after is not None else 3,
        "planned_steps": 20,
        "evaluations": points,
        "final": {},
        "questions": {},
        "curves": {},
    }
