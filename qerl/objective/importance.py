"""Importance weights v = pi_old / pi_behavior, bounded: what corrects answers that another policy sampled.

Legend: N answer tokens of a micro-batch, S sequences, U units: N at token level, S at sequence level.

They exist only with the ``recomputed`` denominator, where the ratio itself says nothing of how the trainer's policy at
the sampling parameters differs from the policy that sampled (rounding; noise, when it is absent from the trainer's pass).
At token level the weight of a token ignores the tokens before it: biased, and of small variance. At sequence level
the product over the answer is unbiased without bounds, and of a variance that grows with the length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qerl.config.schema import ObjectiveConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """How raw weights become weights."""

    cap: float | None
    floor: float | None
    level: Literal["token", "sequence"]
    mode: Literal["truncate", "mask"]

    @classmethod
    def from_config(cls, objective: ObjectiveConfig) -> WeightRule | None:
        """The rule of a resolved configuration; None when there are no weights."""
        if objective.is_cap == "off":
            return None
        return cls(
            cap=objective.is_cap if isinstance(objective.is_cap, float) else None,
            floor=objective.is_floor if isinstance(objective.is_floor, float) else None,
            level=objective.is_level,
            mode=objective.is_mode,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceWeights:
    """Weights of one micro-batch, without gradient."""

    weight_N: Tensor
    """float32 [N]: what the policy term of each token is multiplied by."""
    unit_U: Tensor
    """float32 [U]: the same, one a unit."""
    affected_U: Tensor
    """bool [U]: the raw weight lay outside its bounds."""
    level: Literal["token", "sequence"]


def importance_weights(
    old_N: Tensor, behavior_N: Tensor, sequence_N: Tensor, lengths_S: Tensor, rule: WeightRule
) -> ImportanceWeights:
    """Bounded weights of pi_old / pi_behavior.

    Args:
        old_N: log pi_old of the answer tokens, float32 [N].
        behavior_N: log-probs of the policy that sampled, float32 [N].
        sequence_N: which sequence each token belongs to, int64 [N].
        lengths_S: answer tokens of each sequence, int64 [S].
        rule: level, bounds and mode.
    """
    log_U = (old_N - behavior_N).detach()
    if rule.level == "sequence":
        log_U = torch.segment_reduce(log_U, "sum", lengths=lengths_S, unsafe=True)
    raw_U = torch.exp(log_U)
    affected_U = torch.zeros_like(raw_U, dtype=torch.bool)
    if rule.cap is not None:
        affected_U |= raw_U > rule.cap
    if rule.floor is not None:
        affected_U |= raw_U < rule.floor
    if rule.mode == "mask":
        unit_U = raw_U.masked_fill(affected_U, 0.0)
    else:
        unit_U = raw_U.clamp(min=0.0 if rule.floor is None else rule.floor, max=rule.cap)
    weight_N = unit_U[sequence_N] if rule.level == "sequence" else unit_U
    return ImportanceWeights(weight_N=weight_N, unit_U=unit_U, affected_U=affected_U, level=rule.level)
