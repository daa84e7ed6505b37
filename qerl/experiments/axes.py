"""A mechanism matrix with an axis: its arms at every value side by side, and the value that one rule takes for all arms. Free of torch.

The rule: among values at which every arm has ended and no seed of any arm has collapsed, the one with the highest accuracy after
training, averaged over the arms (each the mean of its seeds); the first of equals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from qerl.report.comparison import ArmRow
from qerl.report.text import plain


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRow:
    """All arms at one value of the axis, or one combination of several."""

    axes: dict[str, Any]
    arms: dict[str, ArmRow]
    """Label without the axis -> its row."""

    @property
    def name(self) -> str:
        """The values in words."""
        return axis_text(self.axes)

    @property
    def collapsed(self) -> int:
        return sum(arm.collapsed for arm in self.arms.values())

    @property
    def judged(self) -> int:
        """Runs that have ended."""
        return sum(arm.judged for arm in self.arms.values())

    @property
    def runs(self) -> int:
        return sum(len(arm.seeds) for arm in self.arms.values())

    @property
    def mean(self) -> float | None:
        """Mean over arms of the accuracy after training; None while an arm has none."""
        means = [None if arm.after is None else arm.after.mean for arm in self.arms.values()]
        return None if None in means or not means else fmean(value for value in means if value is not None)


def axis_text(axes: dict[str, Any]) -> str:
    """``lr 3e-05``; values of several axes with commas between."""
    return ", ".join(f"{key.rpartition('.')[2]} {plain(value)}" for key, value in axes.items())


def axis_rows(arms: Sequence[ArmRow]) -> list[AxisRow]:
    """One row a value, in the order of the matrix; none where the arms have no axis in common."""
    points: dict[str, dict[str, ArmRow]] = {}
    for arm in arms:
        points.setdefault(axis_text(arm.axes), {})[arm.label.removesuffix(f" ({axis_text(arm.axes)})")] = arm
    if len(points) < 2:
        return []
    return [AxisRow(axes=next(iter(found.values())).axes, arms=found) for found in points.values()]


def common_choice(rows: Sequence[AxisRow]) -> str | None:
    """What the rule takes, in words; None where there is nothing to choose from."""
    if not rows:
        return None
    whole = max(len(row.arms) for row in rows)
    ended = [row for row in rows if row.judged == row.runs and len(row.arms) == whole]
    good = [(row.mean, row) for row in ended if not row.collapsed and row.mean is not None]
    rule = "best mean over arms among values at which all runs have ended and none has collapsed"
    of = f"{len(good)} of {len(rows)} values"
    if not good:
        return f"common to all arms: no value yet ({rule}: {of})"
    mean, best = max(good, key=lambda item: item[0])
    return f"common to all arms: {best.name}, {100 * mean:.1f} % ({rule}: {of})"
