"""The diagnostics of a run, called twice a step: before the updates, where the parameters are those that sampled, and
after them. What is left for the learning pass to begin is ``own_answer``. ``qerl.metrics.catalogue`` states what each metric means.

Shape legend: N answer tokens, S answers, M noise draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qerl.config.schema import Config
from qerl.metrics.run_dir import RunDir
from qerl.model.aqn import Noise
from qerl.records import Completion, Group, Prompt, Rollout, SamplingSpec, TrainBatch
from qerl.train.diagnostics.answers import answer_metrics
from qerl.train.diagnostics.canary import AGAIN_EVERY, check_agreement, check_canary, read_canary
from qerl.train.diagnostics.entropy import distribution_entropies, information_bounds, noise_entropies
from qerl.train.diagnostics.mismatch import drawn_differently, kept_mass, mismatch
from qerl.train.diagnostics.own_answer import OwnAnswer
from qerl.train.diagnostics.passes import (
    answer_choices,
    answer_hidden,
    answer_logprobs,
    logit_chunks,
    pack_answers,
    sum_by_answer,
)
from qerl.train.diagnostics.perturbation import DRAWS, perturbation_metrics
from qerl.train.diagnostics.probe import cut, open_probe
from qerl.train.policy_version import ActivePolicy
from qerl.train.session import Session

NOISE_STREAM = "probe_noise"
"""Draws for the diagnostics. They are the same at every step, so that a change is the policy's or sigma's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watched:
    """Answers of this step under the parameters that sampled them, to be scored again after the updates."""

    batches: list[TrainBatch]
    noise: Noise | None
    before_N: Tensor


class Diagnostics:
    """Measures a run without changing it.

    Args:
        config: ``diagnostics`` and what it measures.
        run: keeps the probe set.
        session: model and engine.
        prompts: where the probe set's prompts are taken from; not empty.

    Attributes:
        own_answer: the canary on the step's own answer, from ``before_updates`` on; None where it is switched off.
    """

    def __init__(self, config: Config, run: RunDir, session: Session, prompts: Sequence[Prompt]):
        self.config, self.run, self.session, self.prompts = config, run, session, prompts
        self._probe: list[TrainBatch] | None = None
        self._watched: _Watched | None = None
        self.own_answer: OwnAnswer | None = None

    @torch.no_grad()
    def before_updates(self, rollout: Rollout, groups: Sequence[Group], policy: ActivePolicy) -> dict[str, float]:
        """What the answers look like and, when due, entropies, information, mismatch and output perturbations."""
        metrics = answer_metrics(groups)
        if self.config.diagnostics.canary:
            self.own_answer = OwnAnswer(self.config, self.session.model, rollout, policy.noise)
        every = self.config.diagnostics.every
        self._watched = None
        if every == 0 or rollout.index % every:
            return metrics
        count = self.config.diagnostics.noise_draws
        noises = self._draws(policy, max(count, DRAWS))
        metrics |= self._entropies(rollout.sampling, noises[:count])
        if noises:
            metrics |= perturbation_metrics(self.session.model, self._probe_batches()[0], noises[:DRAWS])
        return metrics | self._mismatch(rollout, policy, noises[:count])

    @torch.no_grad()
    def after_updates(self, step: int, difference: float | None) -> dict[str, float]:
        """Staleness of the answers just learned from, when due, and the canary: what the step's own answer has told, and when due
        the answer to a prompt under the policy that the step leaves behind.

        Args:
            step: completed steps, this one included.
            difference: mean |log-prob in the engine - in the trainer| of the step's own answers under the policy that sampled them;
                None where the learning pass did not score them so.

        Raises:
            TrainingError: the canary found a fault.
        """
        metrics: dict[str, float] = {}
        if self._watched is not None:
            watched = self._watched
            metrics |= mismatch("staleness", watched.before_N, self._logprobs(watched.batches, watched.noise))
        if not self.config.diagnostics.canary:
            return metrics
        if self.own_answer is not None:
            metrics |= self.own_answer.metrics
            self.own_answer = None
        dtype, kv_format = self.session.model.dtype, self.config.rollout.kv_format
        if difference is not None and not math.isfinite(difference):
            # What is to become of such numbers is for ``optim.nonfinite`` to say.
            difference = None
        if difference is not None:
            check_agreement(difference, dtype, kv_format)
        again = step == 1 or step % AGAIN_EVERY == 0
        if again or step == self.config.train.steps:
            readings = read_canary(
                self.session.model,
                self.session.engine,
                self._score,
                self.prompts[0],
                temperature=self.config.rollout.temperature,
                seed=self.config.train.seed,
                step=step,
                without=again,
            )
            check_canary(readings, dtype, kv_format)
            metrics |= readings.metrics()
        return metrics

    def _draws(self, policy: ActivePolicy, count: int) -> list[Noise]:
        """Independent draws of the noise now in force; none when it is off."""
        state = policy.state.noise
        if state is None or state.silent:
            return []
        # Accumulated noise is one draw of the size of the whole displacement.
        drawn = replace(state, stream=NOISE_STREAM, mode="replace", sigma=state.displacement / state.factor, history=())
        return [replace(drawn, rollout=draw).materialize(self.session.model) for draw in range(count)]

    def make_probe(self, run: RunDir) -> None:
        """Put the probe set of this run into ``run``, if that has none; before the first update."""
        open_probe(self.config, run, self.session, self.prompts)

    def _probe_batches(self) -> list[TrainBatch]:
        if self._probe is None:
            probe = open_probe(self.config, self.run, self.session, self.prompts)
            # Keys apart by a group, so that noise of every scope but the rollout's differs between prompts.
            size = self.config.rollout.group_size
            self._probe = self._pack([replace(item, sample_key=size * i) for i, item in enumerate(probe)])
        return self._probe

    def _pack(self, completions: Sequence[Completion]) -> list[TrainBatch]:
        short = [cut(completion, self.config.diagnostics.probe_tokens) for completion in completions]
        return pack_answers(short, self.config.pass_tokens, self.session.device)

    def _entropies(self, sampling: SamplingSpec, noises: Sequence[Noise]) -> dict[str, float]:
        """The entropy family on the probe set, by token and by answer."""
        names = ("raw", "tempered", "sampler", "conditional", "mixture")
        by_token: list[Tensor] = []
        by_answer: list[Tensor] = []
        for batch in self._probe_batches():
            values_KN = self._batch_entropies(batch, sampling, noises)
            lengths_S = torch.bincount(batch.sequence_N, minlength=batch.num_sequences)
            by_token.append(values_KN)
            by_answer.append(torch.stack([sum_by_answer(v_N, batch) / lengths_S for v_N in values_KN]))
        metrics: dict[str, float] = {}
        for average, parts in (("by_token", by_token), ("by_answer", by_answer)):
            means = dict(zip(names, torch.cat(parts, dim=1).mean(1).tolist(), strict=True))
            metrics |= {f"probe/entropy_{name}/{average}": value for name, value in means.items()}
            metrics[f"probe/information/{average}"] = means["mixture"] - means["conditional"]
        return metrics

    def _batch_entropies(self, batch: TrainBatch, sampling: SamplingSpec, noises: Sequence[Noise]) -> Tensor:
        """float64 [5, N]: raw, tempered, sampler, conditional, mixture. Without noise the last two are the second."""
        model = self.session.model
        passes = [answer_hidden(model, batch, noise) for noise in (None, *noises)]
        parts = []
        for clean_CV, *noisy in logit_chunks(model, passes):
            raw_C, tempered_C, sampler_C = distribution_entropies(clean_CV, sampling)
            conditional_C = mixture_C = tempered_C
            if noisy:
                logprobs_MCV = torch.stack(noisy).div_(sampling.temperature).log_softmax(-1)
                conditional_C, mixture_C = noise_entropies(logprobs_MCV)
            parts.append(torch.stack((raw_C, tempered_C, sampler_C, conditional_C, mixture_C)))
        return torch.cat(parts, dim=1)

    def _mismatch(self, rollout: Rollout, policy: ActivePolicy, noises: Sequence[Noise]) -> dict[str, float]:
        """Mismatch by cause, and the bounds of I(O;Z), on one answer of each of the first groups."""
        chosen = rollout.completions[:: rollout.group_size][: self.config.diagnostics.probe_prompts]
        batches = self._pack(chosen)
        engine_N = torch.cat([batch.behavior_logprobs_N for batch in batches])
        same_N, redrawn_N = self._redrawn(batches, rollout.sampling, policy.noise)
        self._watched = _Watched(batches=batches, noise=policy.noise, before_N=same_N)
        metrics = mismatch("kernel", engine_N, same_N)
        if not rollout.sampling.truncated_support:
            drawn_N = torch.cat([batch.targets_N for batch in batches])
            metrics["mismatch/kernel/drawn_differently"] = drawn_differently(drawn_N, redrawn_N)
        if policy.noise is not None:
            clean_N, clean_drawn_N = self._redrawn(batches, rollout.sampling, None)
            metrics |= mismatch("noise", same_N, clean_N)
            metrics["mismatch/noise/drawn_differently"] = drawn_differently(redrawn_N, clean_drawn_N)
        if rollout.sampling.truncated_support:
            width = self.config.diagnostics.probe_tokens
            sampler_N = torch.tensor([p for c in chosen for p in c.sampler_logprobs[:width]], device=engine_N.device)
            metrics |= mismatch("truncation", sampler_N, engine_N)
            metrics["mismatch/truncation/kept_mass"] = kept_mass(engine_N, sampler_N)
        if noises:
            metrics |= self._answer_information(batches, same_N, noises)
        return metrics

    def _answer_information(
        self, batches: Sequence[TrainBatch], own_N: Tensor, noises: Sequence[Noise]
    ) -> dict[str, float]:
        own_S = self._by_answer(own_N, batches)
        draws_MS = torch.stack([self._by_answer(self._logprobs(batches, noise), batches) for noise in noises])
        low, high = information_bounds(own_S, draws_MS)
        return {"answers/information_low": low, "answers/information_high": high}

    def _by_answer(self, values_N: Tensor, batches: Sequence[TrainBatch]) -> Tensor:
        parts = values_N.split([batch.targets_N.numel() for batch in batches])
        return torch.cat([sum_by_answer(part, batch) for part, batch in zip(parts, batches, strict=True)])

    def _logprobs(self, batches: Sequence[TrainBatch], noise: Noise | None) -> Tensor:
        """The trainer's log-probs of all answer tokens, at the sampler's temperature."""
        temperature = self.config.rollout.temperature
        return torch.cat([answer_logprobs(self.session.model, batch, temperature, noise) for batch in batches])

    def _redrawn(
        self, batches: Sequence[TrainBatch], sampling: SamplingSpec, noise: Noise | None
    ) -> tuple[Tensor, Tensor]:
        """The trainer's log-probs of all answer tokens, and the tokens that it draws at the engine's numbers."""
        found = [answer_choices(self.session.model, batch, sampling, noise) for batch in batches]
        drawn = [choices.drawn_N for choices in found if choices.drawn_N is not None]
        return torch.cat([choices.logprobs_N for choices in found]), torch.cat(drawn)

    def _score(self, completion: Completion, adapters: bool) -> Tensor:
        (batch,) = pack_answers([completion], self.config.pass_tokens, self.session.device)
        temperature = self.config.rollout.temperature
        return answer_logprobs(self.session.model, batch, temperature, None, adapters=adapters)
