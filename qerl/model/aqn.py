"""Adaptive quantization noise: h = u * (w + z), z ~ N(0, sigma^2) a channel, drawn once a rollout.

Shape legend: D hidden size.

Three parts, in the order in which they are used:

* the schedule: ``stage_at`` and ``sigma_for_stage`` (pure numbers);
* ``NoiseState``: the small record that, with the clean scales, says exactly which noise a rollout saw;
* ``Noise``: the same noise as tensors, made by ``NoiseState.materialize``.

z is a function of (seed, stream, rollout, layer, site, channel) by a counter-based generator, so it costs no storage,
does not depend on who draws it or when, and is replayed in the training pass by making it again. It stays float32 and
apart from w: the clean scales are never written to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from qerl.config.schema import AqnConfig
from qerl.errors import ConfigError
from qerl.kernels import philox
from qerl.model.spec import ModelSpec

SITE_IDS = {"attn_norm": 0, "mlp_norm": 1, "final_norm": 2}
"""Norm -> its number in the Philox counter. Part of the meaning of a recorded noise state: never renumber."""

LAYER_SHIFT = 4
"""Counter word 1 is site | layer << LAYER_SHIFT."""


class NormSource(Protocol):
    """What noise needs of a model."""

    spec: ModelSpec

    def norm_weight(self, layer: int, site: str) -> Tensor:
        """Clean scale of one norm, float32 [D]; the final norm is layer ``spec.num_layers``."""
        ...


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseState:
    """Which noise one rollout saw: with the clean scales at its start, enough to make the same z again."""

    seed: int
    rollout: int
    """Rollout index, part of the key (refill rounds of one rollout share it)."""
    scope: str = "rollout"
    """How long one draw lasts."""
    stage: int
    sigma: float
    sites: tuple[str, ...]
    magnitude: str = "absolute"
    """``absolute``: z = sigma * n. ``relative``: z = sigma * |w| * n with w the clean scale when z is made."""
    stream: str = "noise"
    """Name of the random stream; evaluation uses one of its own."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "sites": list(self.sites)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NoiseState:
        """The inverse of ``to_dict``."""
        return cls(**{**values, "sites": tuple(values["sites"])})

    def materialize(self, model: NormSource) -> Noise:
        """Draw z for every named site of every layer, on the device of its norm.

        With ``relative`` magnitude the clean scales are read now, detached: call this once, when the rollout begins,
        and keep the result for the training passes on it.
        """
        values: dict[tuple[int, str], Tensor] = {}
        if self.sigma != 0.0:
            for layer, site in _places(self.sites, model.spec.num_layers):
                values[layer, site] = self._draw(layer, site, model.norm_weight(layer, site).detach())
        return Noise(self, values)

    def _draw(self, layer: int, site: str, weight_D: Tensor) -> Tensor:
        unit_D = philox.normal(
            self.seed,
            self.stream,
            weight_D.numel(),
            c1=SITE_IDS[site] | layer << LAYER_SHIFT,
            c2=0,
            c3=self.rollout,
            device=weight_D.device,
        )
        scale = self.sigma * weight_D.float().abs() if self.magnitude == "relative" else self.sigma
        return unit_D * scale


class Noise:
    """The z of one rollout as tensors. An argument of the forward pass, never a mode of the model."""

    def __init__(self, state: NoiseState, values: Mapping[tuple[int, str], Tensor]):
        self.state = state
        self._values = dict(values)

    def z(self, layer: int, site: str) -> Tensor | None:
        """z of one norm, float32 [D], or None where there is no noise (any site at sigma 0: bit-identical to off)."""
        return self._values.get((layer, site))

    def places(self) -> tuple[tuple[int, str], ...]:
        """The (layer, site) pairs that carry noise."""
        return tuple(self._values)


def noise_state(aqn: AqnConfig, *, seed: int, rollout: int, completed: int, planned: int) -> NoiseState | None:
    """Noise of the rollout that begins after ``completed`` of ``planned`` updates; None when AQN is disabled."""
    if not aqn.enabled:
        return None
    stage = stage_at(completed, planned, aqn.num_stages)
    sigma = sigma_for_stage(
        stage,
        schedule=aqn.schedule,
        sigma_start=aqn.sigma_start,
        sigma_end=aqn.sigma_end,
        num_stages=aqn.num_stages,
    )
    return NoiseState(
        seed=seed,
        rollout=rollout,
        scope=aqn.scope,
        stage=stage,
        sigma=sigma,
        sites=tuple(aqn.sites),
        magnitude=aqn.magnitude,
    )


def z_over_w(noise: Noise, model: NormSource, threshold: float) -> float:
    """Share of the channels that carry noise with |z / w| > ``threshold`` (a channel with w = 0 and z != 0 counts)."""
    above = total = 0
    for layer, site in noise.places():
        z_D = noise.z(layer, site)
        assert z_D is not None
        above += int(torch.count_nonzero(z_D.abs() > threshold * model.norm_weight(layer, site).detach().abs()))
        total += z_D.numel()
    return above / total if total else 0.0


def _places(sites: tuple[str, ...], num_layers: int) -> list[tuple[int, str]]:
    layered = [(layer, site) for layer in range(num_layers) for site in sites if site != "final_norm"]
    return layered + ([(num_layers, "final_norm")] if "final_norm" in sites else [])
