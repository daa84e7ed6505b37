"""What a metric and an alarm line are: the types of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["value", "timing", "throughput", "memory"]
Severity = Literal["warning", "fault"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One row of the table."""

    name: str
    """Key in ``metrics.jsonl``; ``{placeholder}`` matches any non-empty text."""
    unit: str
    """Unit of the value; ``1`` for a pure number, ``fraction`` for one between 0 and 1."""
    meaning: str
    """What it says, with its denominator."""
    kind: Kind = "value"
    """``value`` is reproducible to the bit on one machine; the other kinds depend on the machine and the moment."""
    section: str = ""
    """Heading of the documentation it appears under."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A level of a metric above which a run should be looked at."""

    metric: str
    level: float
    severity: Severity
    meaning: str
    same_noise_only: bool = False
    """Whether the line holds only while the trainer's pass sees the rollout's noise (or there is none)."""


def section(title: str, *rows: tuple[str, str, str], kind: Kind = "value") -> tuple[Metric, ...]:
    """Metrics from rows of (name, unit, meaning) that stand under one heading."""
    return tuple(
        Metric(name=name, unit=unit, meaning=meaning, kind=kind, section=title) for name, unit, meaning in rows
    )
