"""The learning pass of one rollout: log-probs, surrogate, backward, optimizer updates.

Legend: T packed tokens, N answer tokens, S sequences.

Which policy is trained and what it is divided by (``docs/objectives.md`` has the table):

* noise ``replayed``: the trainer's passes see the rollout's own noise; ``absent``: they see none.
* denominator ``behavior``: the engine's recorded log-probs; ``recomputed``: a pass of the trainer's own at the
  parameters that sampled, over the same micro-batches, so that the ratio of the first update is exactly 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qerl.config.schema import Config
from qerl.kernels.token_logprobs import token_logprobs
from qerl.memory import PhasePeaks
from qerl.model.aqn import Noise
from qerl.model.decoder import Decoder
from qerl.model.recompute import Checkpointing
from qerl.objective.batch import Sample, pack, split_minibatches
from qerl.objective.importance import ImportanceWeights, WeightRule, importance_weights
from qerl.objective.loss import Divisors, SurrogateSettings, divisors, surrogate, token_weights
from qerl.records import TrainBatch
from qerl.train.learn_stats import LearnStats
from qerl.train.nonfinite import NonFinite, Report, names_of
from qerl.train.optimizer import MasterOptimizer, apply_update, learning_rate
from qerl.train.timing import StageTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A packed batch with the log-probs of the frozen policies it is compared with."""

    batch: TrainBatch
    old_N: Tensor | None
    """Trainer's log-probs at the sampling parameters; None with the behavior denominator."""
    importance: ImportanceWeights | None
    """Weights of the policy term; None when the configuration has none."""
    reference_N: Tensor | None
    """Log-probs of the reference; None without a KL term."""
    teaches: bool
    """Whether it has a gradient; what has none is scored for the metrics alone."""


class Beside(Protocol):
    """Small passes over the policy that sampled, told to the device while it has the first micro-batch's gradient to make."""

    def launch(self) -> None:
        """Tell the device; wait for nothing."""
        ...

    def read(self) -> None:
        """Take in what it found, before the first update; may raise."""
        ...


def policy_logprobs(
    model: Decoder,
    batch: TrainBatch,
    temperature: float,
    *,
    noise: Noise | None,
    reference: bool = False,
    checkpointing: Checkpointing = "none",
    offload: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob of every answer token under softmax(logits / temperature), and the entropy at its position.

    Args:
        noise: the noise that the pass sees.
        reference: score the reference instead: adapters off, initial norms.
        checkpointing, offload: what a backward pass will compute again or fetch (``qerl.model.recompute``).

    Returns:
        (logprobs_N, entropy_N), float32, nats.
    """
    hidden_TD = model(
        batch.tokens_T,
        batch.context(),
        noise=noise,
        adapters=not reference,
        reference=reference,
        checkpointing=checkpointing,
        offload=offload,
    )
    return token_logprobs(hidden_TD[batch.predictor_N], model.head_weight, batch.targets_N, temperature=temperature)


def learn(
    config: Config,
    model: Decoder,
    optimizer: MasterOptimizer,
    samples: Sequence[Sequence[Sample]],
    *,
    noise: Noise | None,
    completed: int,
    timer: StageTimer,
    report: Report | None = None,
    beside: Beside | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> LearnStats:
    """All optimizer updates of one rollout.

    Args:
        samples: samples by group, from ``objective.batch.make_samples``.
        noise: the rollout's noise (None when it had none).
        completed: updates made before this rollout.
        timer: receives the stages ``logprobs``, ``backward``, ``optimizer`` and ``diagnostics``, the last for reading ``beside``.
        report: told of an update that cannot be made, before ``optim.nonfinite`` decides what becomes of the run.
        beside: passes that are made and read before the first update.
        tell: told before each micro-batch how many there are, in words.

    Returns:
        Sums from which the step's metrics are made.

    Raises:
        TrainingError: a gradient is not finite, and ``optim.nonfinite`` is ``stop``; or what ``beside`` raises.
    """
    replayed = noise if config.objective.noise == "replayed" else None
    updates = config.optim.updates_per_rollout
    minibatches = split_minibatches(samples, updates)
    device = model.device
    prefix_key = _prefix_key(config, device, replayed)
    numbers = itertools.count(1)

    def prepare(batch: TrainBatch, teaches: bool) -> MicroBatch:
        if config.objective.denominator == "recomputed" or config.objective.kl_coef > 0.0:
            tell(f"log-probs of micro-batch {next(numbers)}")
        return _with_frozen_logprobs(config, model, batch, replayed, teaches=teaches)

    with timer.stage("logprobs"), torch.no_grad():
        prepared = [
            [
                prepare(batch, teaches)
                for teaches, chosen in _by_gradient(config, part)
                for batch in pack(chosen, config.pass_tokens, device, prefix_key=prefix_key)
            ]
            for part in minibatches
        ]
    stats = LearnStats()
    for index, (part, micro_batches) in enumerate(zip(minibatches, prepared, strict=True)):
        counts = divisors(part, samples, updates, config.rollout.max_new_tokens)
        with timer.stage("backward"):
            losses = []
            for place, micro in enumerate(micro_batches):
                tell(f"update {index + 1} of {updates}, micro-batch {place + 1} of {len(micro_batches)}")
                loss = _backward(
                    config,
                    model,
                    micro,
                    counts,
                    replayed,
                    stats,
                    timer.peaks,
                    on_policy=not stats.grad_norms,
                    beside=beside if index == place == 0 else None,
                )
                losses.append(loss)
        if beside is not None and index == 0:
            with timer.stage("diagnostics"):
                beside.read()
        lr = learning_rate(completed + index, config.planned_updates, config.optim)
        with timer.stage("optimizer"):
            if not any(sample.in_loss for sample in part):
                optimizer.zero_grad()
                stats.skipped_updates += 1
                continue
            if not any(micro.teaches for micro in micro_batches):
                # The gradient is 0, and not missing: moments and weight decay go on.
                for parameter in optimizer.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            norm = apply_update(optimizer, lr, config.optim.max_grad_norm)
            if math.isfinite(norm):
                stats.add_update(norm, lr)
                continue
            found = NonFinite(
                update=completed + index + 1,
                norm=norm,
                parameters=names_of([(name, parameter.grad) for name, parameter in optimizer.trained.items()]),
                losses=tuple(float(loss) for loss in losses),
                batches=tuple(micro.batch for micro in micro_batches),
            )
            optimizer.zero_grad()
            if report is not None:
                report(found)
            if config.optim.nonfinite == "stop":
                raise found.error(None)
            stats.nonfinite_updates += 1
    return stats


def _prefix_key(config: Config, device: torch.device, noise: Noise | None) -> Callable[[int], int] | None:
    """Which samples may share their prompt: what the only noise that a pass may see makes of it; None where prompts are not shared."""
    if not config.shares_prompts(device.type):
        return None
    return (lambda key: 0) if noise is None else noise.prefix_key


def _by_gradient(config: Config, samples: Sequence[Sample]) -> list[tuple[bool, list[Sample]]]:
    """Samples that have a gradient, and those that have none: out of the loss, or of a group without a difference (advantage exactly 0)
    where no KL term pulls at them either."""

    def teaches(sample: Sample) -> bool:
        return sample.in_loss and (sample.advantage != 0.0 or config.objective.kl_coef > 0.0)

    return [(flag, [sample for sample in samples if teaches(sample) == flag]) for flag in (True, False)]


def _with_frozen_logprobs(
    config: Config, model: Decoder, batch: TrainBatch, noise: Noise | None, *, teaches: bool
) -> MicroBatch:
    temperature = config.rollout.temperature
    old_N = reference_N = importance = None
    if config.objective.denominator == "recomputed":
        old_N, _ = policy_logprobs(model, batch, temperature, noise=noise)
        rule = WeightRule.from_config(config.objective)
        if rule is not None:
            importance = importance_weights(
                old_N, batch.behavior_logprobs_N, batch.sequence_N, batch.answer_lengths_S, rule
            )
    if config.objective.kl_coef > 0.0:
        reference_N, _ = policy_logprobs(model, batch, temperature, noise=None, reference=True)
    return MicroBatch(batch=batch, old_N=old_N, importance=importance, reference_N=reference_N, teaches=teaches)


def _backward(
    config: Config,
    model: Decoder,
    micro: MicroBatch,
    counts: Divisors,
    noise: Noise | None,
    stats: LearnStats,
    peaks: PhasePeaks,
    *,
    on_policy: bool,
    beside: Beside | None,
) -> Tensor:
    """Adds the gradient of one micro-batch, if it has one, and launches ``beside`` behind it; returns its loss, detached."""
    settings, batch = SurrogateSettings.from_config(config.objective), micro.batch
    train = config.train
    if micro.teaches:
        peaks.make_room(batch.tokens_T.numel())
    with torch.set_grad_enabled(micro.teaches):
        logprobs_N, entropy_N = policy_logprobs(
            model,
            batch,
            config.rollout.temperature,
            noise=noise,
            # What a run decides by its plan (train.fit) is open where a mini-batch is learned without one.
            checkpointing="none" if train.checkpointing == "auto" else train.checkpointing,
            offload=train.activation_offloading,
        )
        result = surrogate(
            logprobs_N,
            batch.behavior_logprobs_N if micro.old_N is None else micro.old_N,
            batch.advantages_S[batch.sequence_N],
            token_weights(batch, settings.form.divisor, counts),
            settings,
            sequence_N=batch.sequence_N,
            lengths_S=batch.answer_lengths_S,
            importance_N=None if micro.importance is None else micro.importance.weight_N,
            reference_N=micro.reference_N,
        )
    if micro.teaches:
        result.loss.backward()
    if beside is not None:
        # Before the host waits: the statistics ask the device how many tokens are in the loss.
        beside.launch()
    stats.add_micro_batch(batch, logprobs_N.detach(), entropy_N.detach(), result, micro.importance, on_policy=on_policy)
    return result.loss.detach()
