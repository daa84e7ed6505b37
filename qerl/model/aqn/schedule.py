"""Noise level by training progress: K stages, the first one noise-free. Pure numbers."""

from __future__ import annotations

import math

from qerl.errors import ConfigError


def stage_at(completed: int, planned: int, num_stages: int) -> int:
    """Stage in force after ``completed`` of ``planned`` optimizer updates: floor(K * completed / planned), below K."""
    assert planned > 0, planned
    return min(num_stages * completed // planned, num_stages - 1)


def sigma_for_stage(stage: int, *, schedule: str, sigma_start: float, sigma_end: float, num_stages: int) -> float:
    """Noise level of one stage of a K-stage schedule.

    Stage 0 is noise-free. Over stages k = 1 .. K-1, with t = (k-1)/(K-2) and s, e the two ends:

    * ``exponential``: s * (e/s)^t, a constant ratio from stage to stage
    * ``linear``: s + (e - s) * t
    * ``cosine``: e + (s - e) * (1 + cos(pi t)) / 2, slow at both ends
    * ``logarithmic``: s + (e - s) * ln(k) / ln(K-1), fast at first, then slower
    * ``constant``: s

    The first noisy stage returns ``sigma_start`` itself and the last one ``sigma_end`` itself (``constant`` apart).
    K = 2 has one noisy stage, at ``sigma_start``.

    Raises:
        ConfigError: fewer than two stages, an unknown schedule, or an exponential one with one end at 0.
    """
    if num_stages < 2:
        raise ConfigError("aqn.num_stages is too small", got=num_stages, expected="at least 2 (stage 0 is noise-free)")
    if schedule not in _CURVES:
        raise ConfigError("aqn.schedule is unknown", got=schedule, expected=f"one of {', '.join(_CURVES)}")
    if schedule == "exponential" and num_stages > 2 and (sigma_start == 0) != (sigma_end == 0):
        raise ConfigError(
            "an exponential schedule cannot reach 0",
            got=f"aqn.sigma_start={sigma_start}, aqn.sigma_end={sigma_end}",
            expected="two positive ends",
            remedy="Use aqn.schedule=linear, or a small positive end.",
        )
    assert 0 <= stage < num_stages, (stage, num_stages)
    if stage == 0:
        return 0.0
    if stage == 1 or schedule == "constant":
        return sigma_start
    if stage == num_stages - 1:
        return sigma_end
    return _CURVES[schedule](sigma_start, sigma_end, stage, num_stages)


def _fraction(stage: int, num_stages: int) -> float:
    return (stage - 1) / (num_stages - 2)


def _exponential(start: float, end: float, stage: int, num_stages: int) -> float:
    return start * (end / start) ** _fraction(stage, num_stages) if start else 0.0


def _linear(start: float, end: float, stage: int, num_stages: int) -> float:
    return start + (end - start) * _fraction(stage, num_stages)


def _cosine(start: float, end: float, stage: int, num_stages: int) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * _fraction(stage, num_stages))) / 2


def _logarithmic(start: float, end: float, stage: int, num_stages: int) -> float:
    return start + (end - start) * math.log(stage) / math.log(num_stages - 1)


def _constant(start: float, end: float, stage: int, num_stages: int) -> float:
    return start


_CURVES = {
    "exponential": _exponential,
    "linear": _linear,
    "cosine": _cosine,
    "logarithmic": _logarithmic,
    "constant": _constant,
}
