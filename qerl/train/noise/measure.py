"""What noise does to the policy, measured on a fixed batch: KL, entropy change, sensitivity, and sigma by bisection.

Shape legend: N answer tokens, D hidden size, V vocabulary, C answer tokens of a chunk.

The batch is made once: the first training prompts with answers that the policy sampled itself. Every answer sees a draw of
its own, that lasts as long as a rollout's would (scope ``response``; ``token`` keeps its scope), so one pass averages over as
many draws as there are answers. The draws are the same at every measurement: KL is then a smooth function of sigma.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qerl.config.schema import Config
from qerl.errors import TrainingError
from qerl.model.aqn import NoiseSource, NoiseState
from qerl.records import Completion, Prompt, SamplingSpec, TrainBatch
from qerl.train.diagnostics.passes import answer_hidden, logit_chunks, pack_answers
from qerl.train.session import Session

STREAM = "calibration"
"""Random stream of the batch's answers and of its noise."""
UNIT = 0.1
"""Relative noise at one place whose logit change is its sensitivity: small enough to be linear, far above rounding."""
LARGEST_LEVEL = 10.0
"""Beyond it a KL target is called out of reach: noise of ten times the scale leaves nothing of a model."""
MOST_STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Clean against noisy policy, means over the answer tokens, nats, softmax(logits / T) with full support."""

    kl: float
    """KL(clean || noisy)."""
    entropy_clean: float
    entropy_noisy: float


class CalibrationBatch:
    """The fixed batch and the clean policy's hidden states over it.

    Args:
        config: ``aqn.calibration``, the sampling temperature, the seed.
        session: model and engine.
        prompts: training prompts in the order of the data set.
        answers: token ids of the answers, where the batch was made before; sampled now when not given, from the policy as
            it is, without noise.
    """

    def __init__(
        self, config: Config, session: Session, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]] | None
    ):
        chosen = prompts[: config.aqn.calibration.prompts]
        self.model, self.temperature = session.model, config.rollout.temperature
        if answers is None:
            sampling = SamplingSpec(
                temperature=self.temperature,
                max_new_tokens=min(config.aqn.calibration.max_new_tokens, config.rollout.max_new_tokens),
                seed=config.train.seed,
                stream=STREAM,
            )
            answers = [completion.token_ids for completion in session.engine.generate(chosen, sampling)[0]]
        self.answers = [list(tokens) for tokens in answers]
        completions = [_context(prompt, key, answers[key]) for key, prompt in enumerate(chosen)]
        self.batches = pack_answers(completions, config.pass_tokens, session.device)
        self._clean: list[Tensor] | None = None

    def policy_changed(self) -> None:
        """Forget the clean policy's hidden states: parameters have moved."""
        self._clean = None

    @torch.no_grad()
    def effect(self, noise: NoiseSource) -> Effect:
        """KL and entropies of the policy under ``noise``, made from a state of ``draws_for``."""
        sums = torch.zeros(3, dtype=torch.float64)
        for clean_CV, noisy_CV in self._logits(noise):
            clean_CV, noisy_CV = (logits.div_(self.temperature).log_softmax(-1) for logits in (clean_CV, noisy_CV))
            p_CV = clean_CV.exp()
            parts = (
                (p_CV * (clean_CV - noisy_CV)).double().sum(),
                -(p_CV * clean_CV).double().sum(),
                -(noisy_CV.exp() * noisy_CV).double().sum(),
            )
            sums += torch.stack(parts).cpu()
        kl, clean, noisy = (sums / self.tokens).tolist()
        return Effect(kl=kl, entropy_clean=clean, entropy_noisy=noisy)

    @torch.no_grad()
    def logit_change(self, noise: NoiseSource) -> float:
        """Root mean square change of the logits over tokens and vocabulary, each token's mean change taken out."""
        total = 0.0
        for clean_CV, noisy_CV in self._logits(noise):
            change_CV = noisy_CV - clean_CV
            change_CV -= change_CV.mean(-1, keepdim=True)
            total += float(change_CV.square().mean(-1).double().sum())
        return math.sqrt(total / self.tokens)

    @property
    def tokens(self) -> int:
        """Answer tokens."""
        return sum(batch.targets_N.numel() for batch in self.batches)

    def _logits(self, noise: NoiseSource) -> Any:
        if self._clean is None:
            self._clean = [answer_hidden(self.model, batch, None) for batch in self.batches]
        for batch, clean_ND in zip(self.batches, self._clean, strict=True):
            yield from logit_chunks(self.model, [clean_ND, self._noisy_hidden(batch, noise)])

    def _noisy_hidden(self, batch: TrainBatch, noise: NoiseSource) -> Tensor:
        return self.model(batch.tokens_T, batch.context(), noise=noise)[batch.predictor_N]


def _context(prompt: Prompt, key: int, token_ids: Sequence[int]) -> Completion:
    """An answer as a context to measure at; its log-probs are never used."""
    return Completion(
        prompt=prompt,
        sample_key=key,
        token_ids=tuple(token_ids),
        text="",
        behavior_logprobs=(0.0,) * len(token_ids),
        sampler_logprobs=(0.0,) * len(token_ids),
        stop_reason="length",
    )


def draws_for(state: NoiseState, **changes: Any) -> NoiseState:
    """The state whose draws the batch sees: those of ``state``'s kind, one an answer, as large as its whole displacement."""
    measured = replace(
        state,
        stream=STREAM,
        rollout=0,
        scope="token" if state.scope == "token" else "response",
        mode="replace",
        history=(),
        sigma=state.displacement,
        factor=1.0,
    )
    return replace(measured, **changes)


def site_scales(batch: CalibrationBatch, state: NoiseState, cap: float) -> tuple[float, ...]:
    """Factor of each place for magnitude ``sensitivity``: the inverse of its logit change per unit of relative noise.

    With r_p the root mean square logit change that relative noise at place p alone causes, per unit of it:
    s_p = min((1 / r_p) / mean over places (1 / r), cap). A place that changes no logit gets the cap.
    """
    noise = draws_for(state, magnitude="relative", sigma=UNIT).materialize(batch.model)
    changes = [batch.logit_change(noise.only(place)) / UNIT for place in noise.places()]
    inverse = [1.0 / change for change in changes if change > 0.0]
    if not inverse:
        raise TrainingError(
            "noise at the chosen sites changes no logit",
            got=f"aqn.sites={list(state.sites)}",
            expected="sites that the output depends on",
            remedy="Use aqn.magnitude=relative, or other sites",
        )
    mean = math.fsum(inverse) / len(inverse)
    return tuple(min(1.0 / change / mean, cap) if change > 0.0 else cap for change in changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """A solved level."""

    level: float
    kl: float
    reached: bool
    """The KL is within tolerance of the target."""
    beyond: bool = False
    """The target lies above the KL at the largest level that is tried."""


def solve_level(kl_of: Callable[[float], float], target: float, *, start: float, tolerance: float) -> Root:
    """The level at which ``kl_of(level)`` is ``target``: by bisection, helped by KL growing as the square of the level.

    Args:
        kl_of: KL at a level above 0; rises with it.
        target: above 0.
        start: first guess.
        tolerance: relative error of the KL at which the search ends.

    Returns:
        The level whose KL came closest. It may miss the tolerance where rounding makes KL jump (bfloat16 at small
        targets); ``reached`` says so.
    """
    low, high, level = 0.0, math.inf, start
    best = Root(level=start, kl=math.inf, reached=False)
    for _ in range(MOST_STEPS):
        kl = kl_of(level)
        error = abs(kl - target)
        if error <= abs(best.kl - target):
            best = Root(level=level, kl=kl, reached=error <= tolerance * target)
        if best.reached:
            break
        if level >= LARGEST_LEVEL and kl < target:
            return replace(best, beyond=True)
        if kl < target:
            low = level
        else:
            high = level
        guess = level * min(max(math.sqrt(target / kl), 0.1), 10.0) if kl > 0.0 else 10.0 * level
        if not low < guess < high or high < 1.5 * low:
            guess = math.sqrt(low * high) if low > 0.0 else 0.5 * high
        if high <= low * (1.0 + 1e-6) or guess in (low, high):
            break
        level = min(guess, LARGEST_LEVEL)
    return best


def kl_at(batch: CalibrationBatch, state: NoiseState) -> Callable[[float], float]:
    """KL as a function of the level of draws like those of ``state``."""
    return lambda level: batch.effect(draws_for(state, sigma=level).materialize(batch.model)).kl


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured when a stage began; everything that the stage's noise needs beyond its keys."""

    stage: int
    sigma: float
    """Level of the draws: the schedule's or the controller's, or what the KL bisection found."""
    factor: float = 1.0
    site_scales: tuple[float, ...] = ()
    kl_target: float | None = None
    kl: float
    entropy_clean: float
    entropy_noisy: float

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Calibration:
        """From plain values."""
        return cls(**{**values, "site_scales": tuple(values["site_scales"])})

    def metrics(self) -> dict[str, float]:
        """The ``aqn/`` metrics of the step in which it was made."""
        return {
            "aqn/kl": self.kl,
            "aqn/entropy_clean": self.entropy_clean,
            "aqn/entropy_change": self.entropy_noisy - self.entropy_clean,
        }


def calibrate(
    config: Config, batch: CalibrationBatch, state: NoiseState, complete: Callable[[NoiseState], NoiseState]
) -> tuple[Calibration, list[str]]:
    """Measure the noise of a stage, and first what its magnitude and budget ask for.

    Args:
        config: ``aqn``.
        batch: the calibration batch.
        state: noise of the rollout that begins, as the schedule (or controller) has it: for magnitude ``kl`` its sigma is the
            KL target.
        complete: gives the state of the rollout itself, earlier draws that accumulate included.

    Returns:
        The calibration, and warnings in words.

    Raises:
        TrainingError: a KL target that no noise reaches, or sites without effect.
    """
    aqn, warnings = config.aqn, []
    batch.policy_changed()
    mode, scheduled = state.mode, state.sigma
    # Levels are searched for single draws; what has accumulated is added when the effect is measured.
    state = replace(state, mode="replace")
    if aqn.magnitude == "sensitivity":
        state = replace(state, site_scales=site_scales(batch, state, aqn.sensitivity_cap))
    if aqn.magnitude == "kl":
        root = solve_level(kl_at(batch, state), scheduled, start=0.05, tolerance=aqn.calibration.tolerance)
        state = replace(state, sigma=root.level, kl_target=scheduled)
        warnings += _missed(root, scheduled, state.stage, "aqn.magnitude=kl")
    if aqn.match_budget:
        scales = site_scales(batch, replace(state, sharing="shared"), aqn.sensitivity_cap) if state.site_scales else ()
        shared = replace(state, sharing="shared", site_scales=scales)
        target = kl_at(batch, shared)(state.sigma)
        root = solve_level(kl_at(batch, state), target, start=state.sigma, tolerance=aqn.calibration.tolerance)
        state = replace(state, factor=root.level / state.sigma)
        warnings += _missed(root, target, state.stage, "aqn.match_budget")
    effect = batch.effect(draws_for(complete(replace(state, mode=mode))).materialize(batch.model))
    batch.policy_changed()
    calibration = Calibration(
        stage=state.stage,
        sigma=state.sigma,
        factor=state.factor,
        site_scales=state.site_scales,
        kl_target=state.kl_target,
        kl=effect.kl,
        entropy_clean=effect.entropy_clean,
        entropy_noisy=effect.entropy_noisy,
    )
    return calibration, warnings


def _missed(root: Root, target: float, stage: int, setting: str) -> list[str]:
    if root.reached:
        return []
    if root.beyond:
        raise TrainingError(
            f"{setting}: no noise reaches the KL that stage {stage} asks for",
            got=f"at most {root.kl:.3g} nats a token, at sigma {root.level:.3g}",
            expected=f"{target:.3g}",
            remedy="Lower aqn.sigma_start",
        )
    text = (
        f"{setting}: stage {stage} asks for a KL of {target:.3g} nats a token and the nearest found is {root.kl:.3g} (sigma "
        f"{root.level:.3g}). In bfloat16 rounding alone can move more than a small target: raise aqn.sigma_end, or use float32."
    )
    return [text]
