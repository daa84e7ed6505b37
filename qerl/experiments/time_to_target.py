"""What it cost to reach a quality set beforehand. A run that never got there is censored, not extrapolated. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COSTS = ("wall_seconds", "device_seconds", "tokens", "samples")
"""``wall_seconds``: since the run began, all included. ``device_seconds``: seconds of steps times GPUs (on a CPU: seconds of
steps). ``tokens``: prompt and answer tokens. ``samples``: answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeToTarget:
    """Costs up to the first evaluation at or above the target."""

    reached: bool
    step: int | None
    """Step of that evaluation; None when censored."""
    spent: dict[str, float | None]
    """Cost -> value at that evaluation; all None when censored."""
    bound: dict[str, float | None]
    """Cost -> value at the last evaluation within the budget: what is known to be too little, when censored."""


def time_to_target(
    evaluations: Sequence[Mapping[str, Any]], accuracy: float, budget: float | None = None
) -> TimeToTarget:
    """The first evaluation at or above ``accuracy``, among those within the budget.

    A target reached and lost again counts as reached; what a run did between two evaluations is not guessed.

    Args:
        evaluations: ``accuracy``, ``step``, ``train_seconds``, and the costs where they are known.
        accuracy: the target, a fraction.
        budget: device-seconds of training; later evaluations do not count. None: all do.
    """
    within = [
        point
        for point in sorted(evaluations, key=lambda point: point["step"])
        if budget is None or (seconds := device_seconds(point)) is None or seconds <= budget
    ]
    first = next((point for point in within if point["accuracy"] >= accuracy), None)
    last = within[-1] if within else None
    return TimeToTarget(
        reached=first is not None,
        step=None if first is None else int(first["step"]),
        spent=_costs(first),
        bound=_costs(last if first is None else None),
    )


def device_seconds(point: Mapping[str, Any]) -> float | None:
    """Seconds of training times GPUs up to an evaluation; on a CPU the seconds of training."""
    found = point.get("device_seconds")
    return found if found is not None else point.get("train_seconds")


def _costs(point: Mapping[str, Any] | None) -> dict[str, float | None]:
    if point is None:
        return dict.fromkeys(COSTS)
    return {cost: device_seconds(point) if cost == "device_seconds" else point.get(cost) for cost in COSTS}
