"""``NoiseState``: the small record that says which noise a rollout saw."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from torch import Tensor

from qerl.config.aqn import AqnConfig
from qerl.model.aqn.noise import Noise
from qerl.model.aqn.schedule import sigma_for_stage, stage_at
from qerl.model.aqn.sites import NormSource, Place, clean_weight, places

KEPT_AS_TUPLES = ("sites", "site_scales")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseState:
    """Which noise one rollout saw. With the clean norm scales at its start, enough to make the same z again."""

    seed: int
    rollout: int
    """Rollout index, part of the key (refill rounds of one rollout share it)."""
    scope: str = "rollout"
    """How long one draw lasts: ``rollout``, ``group``, ``response`` or ``token``."""
    stage: int
    sigma: float
    """Noise level: what the schedule, the controller or the KL bisection chose for this rollout."""
    sites: tuple[str, ...]
    magnitude: str = "absolute"
    """Standard deviation of z: ``absolute`` f * sigma; ``relative`` and ``kl`` f * sigma * |w|; ``sensitivity``
    f * sigma * s * |w|. w is the clean scale when z is made, f ``factor``, s ``site_scales``."""
    stream: str = "noise"
    """Name of the random stream; evaluation and calibration use streams of their own."""
    group_size: int = 1
    """Answers to a prompt occurrence: sample key // group_size is the scope key of ``group``."""
    prompt: str = "noisy"
    """``noisy``, or ``clean``: positions before the prompt's length see no noise."""
    mode: str = "replace"
    """``replace``, or ``accumulate``: z is the sum of this draw and those of all earlier rollouts."""
    sharing: str = "shared"
    """``shared``, or ``independent``: one draw a projection."""
    factor: float = 1.0
    """Multiplier of sigma that matches the KL of independent to that of shared draws."""
    site_scales: tuple[float, ...] = ()
    """One factor a place, in the order of ``model.aqn.sites.places``; empty unless magnitude is ``sensitivity``."""
    kl_target: float | None = None
    """The schedule's KL a token that ``sigma`` was bisected for; None unless magnitude is ``kl``."""
    history: tuple[tuple[int, float], ...] = ()
    """Of ``accumulate``: runs of equal amplitude f * sigma as (first rollout, amplitude); the last reaches to ``rollout``."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = asdict(self)
        return (
            values
            | {name: list(values[name]) for name in KEPT_AS_TUPLES}
            | {"history": [list(run) for run in self.history]}
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NoiseState:
        """The inverse of ``to_dict``; also reads the ``noise`` column of a behavior record, whose ``key`` is derived."""
        known = {field.name for field in fields(cls)}
        kept = {name: value for name, value in values.items() if name in known}
        kept |= {name: tuple(kept[name]) for name in KEPT_AS_TUPLES if name in kept}
        history = tuple((int(first), float(amplitude)) for first, amplitude in kept.get("history", ()))
        return cls(**{**kept, "history": history})

    @property
    def amplitude(self) -> float:
        """f * sigma, the level of this rollout's draw."""
        return self.sigma * self.factor

    @property
    def displacement(self) -> float:
        """Level of the whole displacement z: the amplitude, or the root of the sum of squares of all that add up."""
        if self.mode == "replace":
            return self.amplitude
        return math.sqrt(math.fsum((stop - first) * amplitude**2 for first, stop, amplitude in self._runs()))

    def _runs(self) -> list[tuple[int, int, float]]:
        """(first rollout, one past the last, amplitude) of every run of ``history``."""
        stops = [first for first, _ in self.history[1:]] + [self.rollout + 1]
        return [(first, stop, amplitude) for (first, amplitude), stop in zip(self.history, stops, strict=True)]

    @property
    def silent(self) -> bool:
        """There is no noise to add: the noise-free code runs."""
        return self.displacement == 0.0

    def scope_key(self, sample_key: int) -> int:
        """The scope key (counter word 2) of one sample of the rollout."""
        return {"rollout": 0, "group": sample_key // self.group_size}.get(self.scope, sample_key)

    def materialize(self, model: NormSource, *, earlier: Mapping[Place, Tensor] | None = None) -> Noise:
        """Make the noise for every place of a model, on the device of its norms.

        Scales that depend on the clean weights read them now, detached: call this once, when the rollout begins, and keep
        the result for the training passes on it.

        Args:
            model: gives widths, devices and clean scales.
            earlier: with ``accumulate`` the float32 sum of all earlier draws, where it was kept; made again from
                ``history`` when not given, which gives the same bits.

        Raises:
            ConfigError: a site that the model does not have.
        """
        where = places(self.sites, self.sharing, model.spec)
        if self.silent:
            return Noise(self, {}, {})
        weights = {place: clean_weight(model, place) for place in where}
        spreads = {place: self._spread(index, weights[place]) for index, place in enumerate(where)}
        if self.mode == "accumulate" and earlier is None:
            earlier = self._earlier_sum(model)
        return Noise(self, weights, spreads, added=earlier)

    def _spread(self, index: int, weight_D: Tensor) -> float | Tensor:
        """Standard deviation of one draw at place ``index``: a number, or float32 [D]."""
        if self.magnitude == "absolute":
            return self.amplitude
        scale = self.site_scales[index] if self.magnitude == "sensitivity" else 1.0
        return self.amplitude * scale * weight_D.float().abs()

    def _earlier_sum(self, model: NormSource) -> dict[Place, Tensor]:
        """Sum of the draws of all rollouts before this one, in their order."""
        total: dict[Place, Tensor] = {}
        for first, stop, amplitude in self._runs():
            for rollout in range(first, min(stop, self.rollout)) if amplitude else ():
                draw = replace(self, mode="replace", history=(), rollout=rollout, sigma=amplitude, factor=1.0)
                total = dict(draw.materialize(model, earlier=total).values)
        return total


def noise_state(
    aqn: AqnConfig, *, seed: int, rollout: int, completed: int, planned: int, group_size: int = 1
) -> NoiseState | None:
    """What the schedule alone says of the rollout that begins after ``completed`` of ``planned`` updates.

    None when AQN is disabled. What has to be measured or remembered (``factor``, ``site_scales``, sigma of magnitude ``kl``,
    ``history``, the controller's sigma) is filled in by ``train.noise``.
    """
    if not aqn.enabled:
        return None
    stage = stage_at(completed, planned, aqn.num_stages)
    return NoiseState(
        seed=seed,
        rollout=rollout,
        scope=aqn.scope,
        stage=stage,
        sigma=stage_sigma(aqn, stage),
        sites=tuple(aqn.sites),
        magnitude=aqn.magnitude,
        group_size=group_size,
        prompt=aqn.prompt,
        mode=aqn.mode,
        sharing=aqn.sharing,
    )


def stage_sigma(aqn: AqnConfig, stage: int) -> float:
    """The schedule's value at a stage: sigma, or the KL target of magnitude ``kl``."""
    return sigma_for_stage(
        stage,
        schedule=aqn.schedule,
        sigma_start=aqn.sigma_start,
        sigma_end=aqn.sigma_end,
        num_stages=aqn.num_stages,
    )
