"""One surrogate; every ``objective.type`` is a setting of it (:data:`FORMS`).

Legend: N answer tokens of a micro-batch, S sequences.

Per token, with the ratio rho = exp(log pi_theta - log pi_den), both tempered, untruncated, float32::

    clipped   loss = -v * min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A) + kl_coef * kl
    log_prob  loss = -v * sg(min(rho, clip_high)) * A * log pi_theta + kl_coef * kl

``sg`` stops the gradient. ``v`` is the importance weight of ``importance.py``, None but with the ``recomputed``
denominator. At ``sequence`` level rho is exp of the mean log ratio over the answer, the same for all of its tokens. With
a dual clip c the product is bounded below by c * A where A < 0 (Ye et al., arXiv 1912.09729).

The loss of an update is the weighted sum over its tokens. Divisors (B counts every sequence of the update, masked ones
included; tokens of masked sequences count nowhere):

===================  ===========================================================================================
sequence_tokens      1 / (B * tokens of the sequence): mean over sequences of token means
rollout_tokens       1 / (tokens in the loss of the whole rollout / updates per rollout)
update_tokens        1 / (tokens in the loss of the update)
max_new_tokens       1 / (B * max_new_tokens): no length enters
===================  ===========================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qerl.config.schema import ObjectiveConfig
from qerl.objective.batch import Sample
from qerl.records import TrainBatch

Divisor = Literal["sequence_tokens", "rollout_tokens", "update_tokens", "max_new_tokens"]
KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What tells one objective from another, apart from its default clips."""

    divisor: Divisor
    ratio: Literal["token", "sequence"] = "token"
    term: Literal["clipped", "log_prob"] = "clipped"


FORMS: dict[str, Form] = {
    "grpo": Form(divisor="sequence_tokens"),  # arXiv 2402.03300, eq. 3
    "dapo": Form(divisor="rollout_tokens"),  # arXiv 2503.14476, eq. 8
    "dr_grpo": Form(divisor="max_new_tokens"),  # arXiv 2503.20783
    "bnpo": Form(divisor="update_tokens"),  # named so by TRL; the released QeRL code's "dapo"
    "gspo": Form(divisor="sequence_tokens", ratio="sequence"),  # arXiv 2507.18071
    "cispo": Form(divisor="rollout_tokens", term="log_prob"),  # arXiv 2506.13585
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SurrogateSettings:
    """Settings of :func:`surrogate`, resolved."""

    form: Form
    clip_low: float | None
    """Lower clip width; None has no lower clip."""
    clip_high: float
    """Upper clip width; with the ``log_prob`` term the bound of the ratio itself."""
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"

    @classmethod
    def from_config(cls, objective: ObjectiveConfig) -> SurrogateSettings:
        """The settings of a resolved configuration."""
        assert isinstance(objective.clip_high, float)
        return cls(
            form=FORMS[objective.type],
            clip_low=objective.clip_low if isinstance(objective.clip_low, float) else None,
            clip_high=objective.clip_high,
            dual_clip=objective.dual_clip if isinstance(objective.dual_clip, float) else None,
            kl_coef=objective.kl_coef,
            kl_estimator=objective.kl_estimator,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Divisors:
    """Counts that turn a sum over tokens into the loss of one update; the same for each of its micro-batches."""

    sequences: int
    """B: sequences of the mini-batch, masked ones included."""
    rollout_tokens_per_update: float
    """Answer tokens in the loss of the whole rollout, divided by updates per rollout."""
    update_tokens: int
    """Answer tokens in the loss of the mini-batch."""
    max_new_tokens: int


def divisors(
    minibatch: Sequence[Sample], rollout: Sequence[Sequence[Sample]], updates_per_rollout: int, max_new_tokens: int
) -> Divisors:
    """Divisors of one mini-batch of a rollout (``rollout`` is by group)."""
    return Divisors(
        sequences=len(minibatch),
        rollout_tokens_per_update=max(sum(map(_loss_tokens, rollout)), 1) / updates_per_rollout,
        update_tokens=max(_loss_tokens(minibatch), 1),
        max_new_tokens=max_new_tokens,
    )


def _loss_tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.completion.token_ids) for sample in samples if sample.in_loss)


def token_weights(batch: TrainBatch, divisor: Divisor, counts: Divisors) -> Tensor:
    """Weight of each answer token in the loss of its update.

    Returns:
        float32 [N]; 0 for tokens of sequences that left the loss.
    """
    if divisor == "sequence_tokens":
        weight_S = 1.0 / (counts.sequences * batch.answer_lengths_S.float())
    else:
        total = {
            "rollout_tokens": counts.rollout_tokens_per_update,
            "update_tokens": counts.update_tokens,
            "max_new_tokens": counts.sequences * counts.max_new_tokens,
        }[divisor]
        weight_S = torch.full_like(batch.advantages_S, 1.0 / total)
    return (weight_S * batch.loss_mask_S)[batch.sequence_N]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """Loss of one micro-batch and the per-token quantities that the metrics are made of (all detached but ``loss``)."""

    loss: Tensor
    """float32 scalar: this micro-batch's share of the update's loss."""
    ratio_N: Tensor
    """float32 [N]: rho; at sequence level the same for all tokens of an answer."""
    low_clipped_N: Tensor
    """bool [N]: the lower clip is active (rho < 1 - clip_low and A < 0)."""
    high_clipped_N: Tensor
    """bool [N]: the upper clip is active (rho > 1 + clip_high and A > 0; with the log_prob term rho > clip_high and A != 0)."""
    dual_clipped_N: Tensor | None
    """bool [N]: the dual clip is active (rho > dual_clip and A < 0); None without one."""
    kl_N: Tensor | None
    """float32 [N]: KL estimate; None without a reference."""


def surrogate(
    logprobs_N: Tensor,
    denominator_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    settings: SurrogateSettings,
    *,
    sequence_N: Tensor | None = None,
    lengths_S: Tensor | None = None,
    importance_N: Tensor | None = None,
    reference_N: Tensor | None = None,
) -> Surrogate:
    """The surrogate over N answer tokens.

    Args:
        logprobs_N: log pi_theta of the tokens, float32 [N], carries the gradient.
        denominator_N: log-probs of the denominator policy, float32 [N], no gradient.
        advantages_N: advantage of each token's sequence, float32 [N].
        weights_N: from :func:`token_weights`, float32 [N].
        settings: form, clips and KL term.
        sequence_N: which sequence each token belongs to, int64 [N], in order; needed at sequence level, as is
            lengths_S: answer tokens of each sequence, int64 [S]. Sequences are whole.
        importance_N: importance weight v, float32 [N], no gradient; None is 1.
        reference_N: log pi_ref, float32 [N], needed when ``kl_coef`` > 0.

    Returns:
        The loss and its parts.
    """
    assert settings.kl_coef == 0.0 or reference_N is not None, "a KL term needs reference log-probs"
    log_ratio_N = logprobs_N - denominator_N
    if settings.form.ratio == "sequence":
        assert sequence_N is not None and lengths_S is not None, "a sequence ratio needs to know the sequences"
        log_ratio_N = torch.segment_reduce(log_ratio_N, "mean", lengths=lengths_S, unsafe=True)[sequence_N]
    ratio_N = torch.exp(log_ratio_N)
    if settings.form.term == "log_prob":
        policy_N = -ratio_N.detach().clamp(max=settings.clip_high) * advantages_N * logprobs_N
    else:
        policy_N = -_clipped_gain(ratio_N, advantages_N, settings)
    if importance_N is not None:
        policy_N = policy_N * importance_N
    loss_N, kl_N = policy_N, None
    if reference_N is not None:
        kl_N = kl_estimate(logprobs_N, reference_N, settings.kl_estimator)
        loss_N = policy_N + settings.kl_coef * kl_N
    low_N, high_N, dual_N = _clip_flags(ratio_N.detach(), advantages_N, settings)
    return Surrogate(
        loss=(loss_N * weights_N).sum(),
        ratio_N=ratio_N.detach(),
        low_clipped_N=low_N,
        high_clipped_N=high_N,
        dual_clipped_N=dual_N,
        kl_N=None if kl_N is None else kl_N.detach(),
    )


def _clipped_gain(ratio_N: Tensor, advantages_N: Tensor, settings: SurrogateSettings) -> Tensor:
    """min(rho A, clip(rho) A), from below by the dual clip where A < 0."""
    low = None if settings.clip_low is None else 1.0 - settings.clip_low
    clipped_N = ratio_N.clamp(low, 1.0 + settings.clip_high)
    gain_N = torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    if settings.dual_clip is None:
        return gain_N
    return torch.where(advantages_N < 0, torch.maximum(gain_N, settings.dual_clip * advantages_N), gain_N)


def _clip_flags(
    ratio_N: Tensor, advantages_N: Tensor, settings: SurrogateSettings
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Where the lower, the upper and the dual clip act."""
    low, dual = settings.clip_low, settings.dual_clip
    low_N, falls_N = torch.zeros_like(ratio_N, dtype=torch.bool), advantages_N < 0
    if low is not None:
        low_N = (ratio_N < 1.0 - low) & falls_N
    if settings.form.term == "log_prob":
        high_N = (ratio_N > settings.clip_high) & (advantages_N != 0)
    else:
        high_N = (ratio_N > 1.0 + settings.clip_high) & (advantages_N > 0)
    return low_N, high_N, None if dual is None else (ratio_N > dual) & falls_N


def kl_estimate(logprobs_N: Tensor, reference_N: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate of KL(pi_theta || pi_ref) at tokens drawn from pi_theta (Schulman, "Approximating KL divergence", 2020).

    With d = log pi_ref - log pi_theta: ``k1`` -d, unbiased, either sign; ``k2`` d^2 / 2, biased, small variance; ``k3``
    exp(d) - d - 1, unbiased, never negative. In a loss their mean gradients are those of, in order: nothing (0),
    KL(pi_theta || pi_ref), and KL(pi_ref || pi_theta).

    Returns:
        float32 [N], nats.
    """
    difference_N = reference_N - logprobs_N
    if estimator == "k1":
        return -difference_N
    if estimator == "k2":
        return 0.5 * difference_N**2
    return torch.exp(difference_N) - difference_N - 1.0
