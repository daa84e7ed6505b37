"""Gives each rollout its noise: the schedule's sigma or the controller's, what the stage's calibration found, and the draws
that accumulate.

All that is remembered between rollouts is plain values (``state_dict``, part of the trainer's state) and, with
``aqn.mode=accumulate``, the float32 sum of the draws (``noise_sum.safetensors`` of a checkpoint).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from qerl.config.aqn import AqnConfig
from qerl.config.schema import Config
from qerl.errors import CheckpointError
from qerl.formats.tensor_file import save_tensors
from qerl.model.aqn import Noise, NoiseState, Place, clean_weight, noise_state, places, stage_sigma, z_over_w
from qerl.records import Prompt
from qerl.train.noise.controller import Controller, Signals
from qerl.train.noise.measure import Calibration, CalibrationBatch, calibrate
from qerl.train.session import Session

EVALUATION_STREAM = "eval_noise"
SUM_FILE = "noise_sum.safetensors"


class NoiseDirector:
    """The noise of a run, rollout by rollout.

    Args:
        config: ``aqn`` and what the calibration batch needs.
        session: model and engine.
        prompts: training prompts in the order of the data set.
        state: ``state_dict`` of a checkpoint; empty for a new run.
        total: sum of the accumulated draws of a checkpoint (``load_sum``).

    Raises:
        ConfigError: ``aqn.sites`` names a norm that the model does not have.
    """

    def __init__(
        self,
        config: Config,
        session: Session,
        prompts: Sequence[Prompt],
        state: Mapping[str, Any] | None = None,
        total: Mapping[Place, Tensor] | None = None,
    ):
        self.config, self.session, self.prompts = config, session, prompts
        if config.aqn.enabled:
            places(config.aqn.sites, config.aqn.sharing, session.model.spec)
        saved = dict(state or {})
        self.controller = Controller(config.aqn.controller, saved.get("controller"))
        self.history: list[tuple[int, float]] = [
            (int(first), float(level)) for first, level in saved.get("history", [])
        ]
        self.total: dict[Place, Tensor] = dict(total or {})
        self._answers: list[list[int]] | None = saved.get("answers")
        found = saved.get("calibration")
        self._calibration = None if found is None else Calibration.from_dict(found)
        self._unreported = bool(saved.get("unreported", False))
        self._batch: CalibrationBatch | None = None
        self._warnings: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        """Everything the next rollout's noise depends on besides the sum, as plain values for JSON."""
        return {
            "controller": self.controller.state_dict(),
            "history": [list(run) for run in self.history],
            "answers": self._answers,
            "calibration": None if self._calibration is None else asdict(self._calibration),
            "unreported": self._unreported,
        }

    def begin(self, *, rollout: int, completed: int) -> tuple[NoiseState | None, Noise | None]:
        """Record and draws of the rollout that begins; called once a rollout.

        Args:
            rollout: rollout index, part of every key.
            completed: optimizer updates made so far; decides the stage.

        Returns:
            (state, noise): None, None when AQN is off; noise is None where there is nothing to add.

        Raises:
            TrainingError: a KL target that no noise reaches.
        """
        state = self._state(rollout, completed)
        if state is None:
            return None, None
        noise = state.materialize(self.session.model, earlier=self.total or None)
        if state.mode == "accumulate":
            self.history = list(state.history)
            self.total = dict(noise.values)
        return state, None if state.silent else noise

    def evaluation(self, *, step: int, completed: int) -> Noise | None:
        """Noise of an evaluation after ``step``: as the next rollout would have it, under a stream of its own; None unless
        ``eval.noise`` is set."""
        return self.deployment(step=step, completed=completed) if self.config.eval.noise else None

    def deployment(
        self, *, step: int, completed: int, draw: int = 0, sigma: float | None = None, group_size: int | None = None
    ) -> Noise | None:
        """Noise that a policy is deployed with after ``step``: as the next rollout would have it, keyed apart from every
        rollout. Accumulated noise is one draw as large as the whole sum.

        Args:
            step: completed steps, part of the key.
            completed: optimizer updates made so far; decides the stage.
            draw: which of several keys.
            sigma: level in place of the schedule's or the sum's, in the unit of ``aqn.magnitude``.
            group_size: answers to a prompt; ``eval.samples`` when not given.

        Returns:
            None where there is nothing to add.
        """
        state = self._scheduled(step, completed)
        if state is None:
            return None
        if state.sigma > 0.0:
            # Only where the noise itself depends on what was measured: a calibration costs passes over training prompts.
            state = self._calibrated(state) if needs_calibration(self.config.aqn) else self._with_history(state)
        level = state.displacement / state.factor if sigma is None else sigma
        stream = EVALUATION_STREAM if draw == 0 else f"{EVALUATION_STREAM}/{draw}"
        state = replace(state, stream=stream, sigma=level, mode="replace", history=())
        if state.silent:
            return None
        return replace(state, group_size=group_size or self.config.eval.samples).materialize(self.session.model)

    def observe(self, state: NoiseState | None, metrics: Mapping[str, float]) -> None:
        """Show the controller what a finished rollout gave."""
        if state is None or not self.config.aqn.controller.enabled:
            return
        signals, missing = Signals.from_metrics(metrics)
        if missing:
            self._warnings.append(
                f"aqn.controller has no {' and no '.join(missing)} of a step to follow; the next rollout takes the schedule's sigma."
            )
        self.controller.observe(signals, sigma=state.sigma, stage=state.stage)

    def metrics(self, state: NoiseState | None, noise: Noise | None) -> dict[str, float]:
        """The ``aqn/`` metrics of a rollout, after ``observe``."""
        if state is None:
            return {"aqn/sigma": 0.0, "aqn/stage": 0, "aqn/z_over_w_above_half": 0.0}
        model, aqn = self.session.model, self.config.aqn
        found: dict[str, float] = {
            "aqn/sigma": state.sigma,
            "aqn/stage": state.stage,
            "aqn/z_over_w_above_half": 0.0 if noise is None else z_over_w(noise, model, 0.5),
        }
        if state.kl_target is not None:
            found["aqn/kl_target"] = state.kl_target
        if state.mode == "accumulate":
            found["aqn/displacement"] = state.displacement
        if aqn.match_budget and noise is not None:
            found["aqn/budget_factor"] = state.factor
        if state.site_scales:
            found["aqn/sensitivity_scale/min"] = min(state.site_scales)
            found["aqn/sensitivity_scale/max"] = max(state.site_scales)
        if aqn.controller.enabled:
            found["aqn/controller/sigma_schedule"] = stage_sigma(aqn, state.stage)
            found |= self.controller.metrics()
        if self._unreported and self._calibration is not None:
            found |= self._calibration.metrics()
            self._unreported = False
        return found

    def take_warnings(self) -> list[str]:
        """Warnings since the last call."""
        taken, self._warnings = self._warnings, []
        return taken

    def _state(self, rollout: int, completed: int) -> NoiseState | None:
        """The state of the rollout that begins (or would begin) now; calibrates at a stage's first noisy rollout."""
        state = self._scheduled(rollout, completed)
        return state if state is None or state.sigma == 0.0 else self._calibrated(state)

    def _scheduled(self, rollout: int, completed: int) -> NoiseState | None:
        """What the schedule or the controller says, before anything is measured."""
        config = self.config
        state = noise_state(
            config.aqn,
            seed=config.train.seed,
            rollout=rollout,
            completed=completed,
            planned=config.planned_updates,
            group_size=config.rollout.group_size,
        )
        if state is None:
            return None
        if config.aqn.controller.enabled:
            state = replace(state, sigma=self.controller.sigma(state.sigma, state.stage))
        return self._with_history(state) if state.sigma == 0.0 else state

    def _calibrated(self, state: NoiseState) -> NoiseState:
        """``state`` with what the calibration of its stage found."""
        config = self.config
        if self._calibration is None or self._calibration.stage != state.stage:
            self._calibration, warnings = calibrate(config, self._calibration_batch(), state, self._with_history)
            self._unreported = True
            self._warnings += warnings
        calibration = self._calibration
        if config.aqn.magnitude == "kl":
            state = replace(state, sigma=calibration.sigma, kl_target=calibration.kl_target)
        return self._with_history(replace(state, factor=calibration.factor, site_scales=calibration.site_scales))

    def _with_history(self, state: NoiseState) -> NoiseState:
        """With ``accumulate``: the runs of amplitudes up to and with this rollout."""
        if state.mode == "replace":
            return state
        runs = [run for run in self.history if run[0] < state.rollout]
        if not runs or runs[-1][1] != state.amplitude:
            runs.append((state.rollout, state.amplitude))
        return replace(state, history=tuple(runs))

    def _calibration_batch(self) -> CalibrationBatch:
        if self._batch is None:
            self._batch = CalibrationBatch(self.config, self.session, self.prompts, self._answers)
            self._answers = self._batch.answers
        return self._batch


def needs_calibration(aqn: AqnConfig) -> bool:
    """Whether draws depend on measurements, beyond sigma and the norm scales."""
    return aqn.magnitude in ("kl", "sensitivity") or aqn.match_budget


def save_sum(folder: Path, total: Mapping[Place, Tensor]) -> None:
    """Write the sum of accumulated draws into a checkpoint folder; nothing when there is none."""
    if total:
        save_tensors({f"{layer}/{name}": z_D.cpu() for (layer, name), z_D in total.items()}, folder / SUM_FILE)


def load_sum(folder: Path, config: Config, session: Session) -> dict[Place, Tensor]:
    """The sum that ``save_sum`` wrote, on the devices of the norms; empty unless noise accumulates and there is a sum.

    Raises:
        CheckpointError: the file cannot be read or is of another model.
    """
    path, model = folder / SUM_FILE, session.model
    if not config.aqn.enabled or config.aqn.mode != "accumulate" or not path.exists():
        return {}
    weights = {place: clean_weight(model, place) for place in places(config.aqn.sites, config.aqn.sharing, model.spec)}
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError("the accumulated noise cannot be read", got=f"{path}: {error}") from None
    expected = {f"{layer}/{name}": weight_D for (layer, name), weight_D in weights.items()}
    if {key: z_D.shape for key, z_D in stored.items()} != {key: weight_D.shape for key, weight_D in expected.items()}:
        raise CheckpointError(
            "the accumulated noise does not fit the model",
            got=f"{path}: {len(stored)} places",
            expected=f"{len(expected)} places with the widths of this model's norms",
        )
    return {place: stored[f"{place[0]}/{place[1]}"].to(weight_D.device) for place, weight_D in weights.items()}
