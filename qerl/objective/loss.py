"""One clipped surrogate; ``grpo``, ``dapo`` and ``dr_grpo`` are settings of it.

Legend: N answer tokens of a micro-batch, S sequences.

Per token, with the ratio rho = exp(log pi_theta - log pi_den), both tempered, untruncated, float32::

    loss = -v * min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A) + kl_coef * k3

``v`` is the stop-gradient importance weight min(pi_old / pi_behavior, c), which exists only when the denominator is the
trainer's own pass (``recomputed``). ``k3 = exp(d) - d - 1`` with d = log pi_ref - log pi_theta (Schulman's estimator).
The loss of an update is the weighted sum over its tokens; the settings differ in the weight alone:

========  =================================================================================================
grpo      1 / (B * tokens of the sequence): mean over sequences of token means (arXiv 2402.03300, eq. 3)
dapo      1 / (tokens in the loss of the whole rollout / updates per rollout) (DAPO, arXiv 2503.14476, eq. 8)
dr_grpo   1 / (B * max_new_tokens): no length enters (Dr. GRPO, arXiv 2503.20783)
========  =================================================================================================

B counts every sequence of the update, masked ones included; tokens of masked sequences count nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qerl.objective.batch import Sample
from qerl.records import TrainBatch

ObjectiveType = Literal["grpo", "dapo", "dr_grpo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divisors:
    """Counts that turn a sum over tokens into the loss of one update; the same for each of its micro-batches."""

    sequences: int
    """B: sequences of the mini-batch, masked ones included."""
    tokens_per_update: float
    """Answer tokens in the loss of the whole rollout, divided by updates per rollout."""
    max_new_tokens: int


def divisors(
    minibatch: Sequence[Sample], rollout: Sequence[Sequence[Sample]], updates_per_rollout: int, max_new_tokens: int
) -> Divisors:
    """Divisors of one mini-batch of a rollout (``rollout`` is by group)."""
    tokens = sum(len(sample.completion.token_ids) for group in rollout for sample in group if sample.in_loss)
    return Divisors(
        sequences=len(minibatch),
        tokens_per_update=max(tokens, 1) / updates_per_rollout,
        max_new_tokens=max_new_tokens,
    )


def token_weights(batch: TrainBatch, kind: ObjectiveType, counts: Divisors) -> Tensor:
    """Weight of each answer token in the loss of its update.

    Returns:
        float32 [N]; 0 for tokens of sequences that left the loss.
    """
    if kind == "grpo":
        lengths_S = torch.bincount(batch.sequence_N, minlength=batch.num_sequences).clamp(min=1)
        weight_S = 1.0 / (counts.sequences * lengths_S.float())
    elif kind == "dapo":
        weight_S = torch.full_like(batch.advantages_S, 1.0 / counts.tokens_per_update)
    else:
        weight_S = torch.full_like(batch.advantages_S, 1.0 / (counts.sequences * counts.max_new_tokens))
    return (weight_S * batch.loss_mask_S)[batch.sequence_N]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """Loss of one micro-batch and the per-token quantities that the metrics are made of (all detached but ``loss``)."""

    loss: Tensor
    """float32 scalar: this micro-batch's share of the update's loss."""
    ratio_N: Tensor
    low_clipped_N: Tensor
    """bool [N]: the lower clip is active (rho < 1 - clip_low and A < 0)."""
    high_clipped_N: Tensor
    """bool [N]: the upper clip is active (rho > 1 + clip_high and A > 0)."""
    kl_N: Tensor | None
    """float32 [N]: k3 estimate; None without a reference."""


def surrogate(
    logprobs_N: Tensor,
    denominator_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    importance_N: Tensor | None = None,
    reference_N: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Surrogate:
    """The clipped surrogate over N answer tokens.

    Args:
        logprobs_N: log pi_theta of the tokens, float32 [N], carries the gradient.
        denominator_N: log-probs of the denominator policy, float32 [N], no gradient.
        advantages_N: advantage of each token's sequence, float32 [N].
        weights_N: from :func:`token_weights`, float32 [N].
        clip_low: lower clip width; clip_high: upper clip width.
        importance_N: importance weight v, float32 [N], no gradient; None is 1.
        reference_N: log pi_ref, float32 [N], needed when ``kl_coef`` > 0.
        kl_coef: weight of the k3 estimate.

    Returns:
        The loss and its parts.
    """
    assert kl_coef == 0.0 or reference_N is not None, "a KL term needs reference log-probs"
    ratio_N = torch.exp(logprobs_N - denominator_N)
    clipped_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    policy_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    if importance_N is not None:
        policy_N = policy_N * importance_N
    loss_N, kl_N = policy_N, None
    if reference_N is not None:
        kl_N = k3(logprobs_N, reference_N)
        loss_N = policy_N + kl_coef * kl_N
    ratio = ratio_N.detach()
    return Surrogate(
        loss=(loss_N * weights_N).sum(),
        ratio_N=ratio,
        low_clipped_N=(ratio < 1.0 - clip_low) & (advantages_N < 0),
        high_clipped_N=(ratio > 1.0 + clip_high) & (advantages_N > 0),
        kl_N=None if kl_N is None else kl_N.detach(),
    )


def k3(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Unbiased, non-negative estimate of KL(pi_theta || pi_ref) at tokens drawn from pi_theta; float32 [N], nats."""
    difference_N = reference_N - logprobs_N
    return torch.exp(difference_N) - difference_N - 1.0


def importance_weights(old_N: Tensor, behavior_N: Tensor, cap: float | None) -> Tensor | None:
    """Truncated importance weight min(pi_old / pi_behavior, cap), float32 [N]; None when ``cap`` is None."""
    if cap is None:
        return None
    return torch.exp(old_N - behavior_N).clamp(max=cap)
