"""Sigma that follows what the rollouts show: a PI controller on log sigma with guards. Pure numbers, deterministic.

Error of the informative groups: how far their smoothed share lies outside target +- band, positive when there are too few.
Two guards stand above it. While the smoothed share of invalid answers exceeds its limit, or the entropy its upper bound, the error
is minus the excess; while the entropy is below its lower bound, the shortfall is added to what is left of an error that
raises sigma. Then

    log sigma += clip(Kp (e - e_before) + Ki e, +- log max_change),   clamped to [log sigma_min, log sigma_max].

This is the velocity form: the sum of errors is the level itself, so nothing winds up while sigma rests at a limit, and the
first error of the other sign moves it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from qerl.config.aqn import AqnControllerConfig

LEAST_ENTROPY = 1e-6
"""Nats a token below which a reference entropy is not divided by."""


class Guard(IntEnum):
    """What set the error of a rollout."""

    NONE = 0
    """The share of informative groups."""
    INVALID = 1
    ENTROPY_HIGH = 2
    ENTROPY_LOW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What one rollout showed."""

    informative: float
    """Share of groups with both correct and incorrect answers."""
    entropy: float
    """Nats a token."""
    invalid: float
    """Share of unparsable and truncated answers."""

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float]) -> tuple[Signals | None, list[str]]:
        """The signals of a step's metrics, or None with the names of those that are missing."""
        keys = ("groups/mixed", "entropy", "outcomes/unparsable", "outcomes/truncated")
        missing = [key for key in keys if not math.isfinite(metrics.get(key, math.nan))]
        if metrics.get("groups/unscorable") == 1.0:
            missing.append("groups/mixed")
        if missing:
            return None, sorted(set(missing))
        invalid = metrics["outcomes/unparsable"] + metrics["outcomes/truncated"]
        return cls(informative=metrics["groups/mixed"], entropy=metrics["entropy"], invalid=invalid), []


@dataclass(slots=True, kw_only=True)
class ControllerState:
    """What the controller remembers; saved with every checkpoint."""

    sigma: float | None = None
    """None: the next noisy rollout starts from the schedule's sigma."""
    error: float | None = None
    """Error of the rollout before."""
    informative: float | None = None
    entropy: float | None = None
    invalid: float | None = None
    """Smoothed signals of the noisy rollouts."""
    reference_entropy: float | None = None
    """Mean entropy of stage 0, or that of the first rollout seen."""
    reference_count: int = 0
    guard: int = Guard.NONE


class Controller:
    """Decides sigma before each rollout and looks at its signals after it.

    Args:
        config: set points, gains and limits.
        state: from ``state_dict`` of an earlier controller; None starts afresh.
    """

    def __init__(self, config: AqnControllerConfig, state: Mapping[str, Any] | None = None):
        self.config = config
        self.state = ControllerState(**(state or {}))

    def state_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self.state)

    @property
    def active(self) -> bool:
        """Sigma is the controller's own."""
        return self.state.sigma is not None

    def sigma(self, scheduled: float, stage: int) -> float:
        """Sigma of the rollout that begins now.

        Args:
            scheduled: the schedule's sigma: used in stage 0, which stays noise-free, in the first noisy rollout, and after
                one without signals.
            stage: stage of the schedule.
        """
        return scheduled if stage == 0 or self.state.sigma is None else self.state.sigma

    def observe(self, signals: Signals | None, *, sigma: float, stage: int) -> None:
        """Take in a finished rollout.

        Args:
            signals: what it showed; None falls back to the schedule until there are signals again.
            sigma: the sigma it had.
            stage: its stage; stage 0 gives the reference entropy and moves nothing.
        """
        state, config = self.state, self.config
        if signals is None:
            state.sigma = state.error = None
            return
        if stage == 0 or state.reference_entropy is None:
            total = (state.reference_entropy or 0.0) * state.reference_count + signals.entropy
            state.reference_count += 1
            state.reference_entropy = total / state.reference_count
        if stage == 0:
            return
        state.informative = self._smoothed(state.informative, signals.informative)
        state.entropy = self._smoothed(state.entropy, signals.entropy)
        state.invalid = self._smoothed(state.invalid, signals.invalid)
        error, guard = self._error()
        before = error if state.error is None else state.error
        change = config.gain_proportional * (error - before) + config.gain_integral * error
        limit = math.log(config.max_change)
        moved = max(sigma, config.sigma_min) * math.exp(min(max(change, -limit), limit))
        state.sigma = min(max(moved, config.sigma_min), config.sigma_max)
        state.error, state.guard = error, guard

    def metrics(self) -> dict[str, float]:
        """What the controller saw last and how it took it; nothing before the first noisy rollout."""
        state = self.state
        if not self.active:
            return {"aqn/controller/active": 0.0}
        assert state.error is not None and state.informative is not None and state.invalid is not None
        return {
            "aqn/controller/active": 1.0,
            "aqn/controller/error": state.error,
            "aqn/controller/informative": state.informative,
            "aqn/controller/entropy_ratio": self._entropy_ratio(),
            "aqn/controller/invalid": state.invalid,
            "aqn/controller/guard": float(state.guard),
        }

    def _smoothed(self, mean: float | None, value: float) -> float:
        return value if mean is None else mean + self.config.smoothing * (value - mean)

    def _entropy_ratio(self) -> float:
        """Smoothed entropy over the reference; 1 where the reference is practically 0 and says nothing."""
        state = self.state
        assert state.entropy is not None and state.reference_entropy is not None
        return state.entropy / state.reference_entropy if state.reference_entropy > LEAST_ENTROPY else 1.0

    def _error(self) -> tuple[float, Guard]:
        state, config = self.state, self.config
        assert state.informative is not None and state.invalid is not None
        distance = config.target_informative - state.informative
        error = math.copysign(max(abs(distance) - config.informative_band, 0.0), distance)
        ratio, (low, high) = self._entropy_ratio(), config.entropy_band
        invalid_excess, entropy_excess = max(state.invalid - config.invalid_max, 0.0), max(ratio / high - 1.0, 0.0)
        if invalid_excess or entropy_excess:
            guard = Guard.INVALID if invalid_excess else Guard.ENTROPY_HIGH
            return -(invalid_excess + entropy_excess), guard
        if ratio < low:
            return max(error, 0.0) + 1.0 - ratio / low, Guard.ENTROPY_LOW
        return error, Guard.NONE
