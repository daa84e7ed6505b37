"""Group-relative advantages (GRPO, arXiv 2402.03300 eq. 4; Dr. GRPO, arXiv 2503.20783; RLOO, arXiv 2402.14740).

Legend: P prompts (groups) in the batch, G answers a group.

Unscorable answers (reward None) leave the statistics of their group and get advantage 0. A group whose rewards are all
equal gets exactly 0, decided by ``max == min`` and not by subtracting a rounded mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

AdvantageKind = Literal["group", "none", "batch", "leave_one_out"]

STD_EPS = 1e-6
"""Added to the standard deviation; rewards are of order 1."""


def advantages(rewards: Sequence[Sequence[float | None]], kind: AdvantageKind = "group") -> list[list[float]]:
    """Advantage of every answer.

    Args:
        rewards: P lists of G rewards; None marks an unscorable answer.
        kind: ``group`` (R - mean) / (std + eps) with the population deviation of the group; ``none`` R - mean;
            ``batch`` (R - mean) / (std + eps) with the population deviation over all scored answers of the batch;
            ``leave_one_out`` R minus the mean of the group's other scored answers.

    Returns:
        P lists of G advantages (dimensionless).
    """
    scored = [reward for group in rewards for reward in group if reward is not None]
    batch_std = _population_std(scored) if kind == "batch" else 0.0
    return [_group_advantages(group, kind, batch_std) for group in rewards]


def _group_advantages(group: Sequence[float | None], kind: AdvantageKind, batch_std: float) -> list[float]:
    scored = [reward for reward in group if reward is not None]
    if len(scored) < 2 or max(scored) == min(scored):
        return [0.0] * len(group)
    mean = math.fsum(scored) / len(scored)
    if kind == "leave_one_out":
        scale = len(scored) / (len(scored) - 1)
    elif kind == "group":
        scale = 1.0 / (_population_std(scored) + STD_EPS)
    elif kind == "batch":
        scale = 1.0 / (batch_std + STD_EPS)
    else:
        scale = 1.0
    return [0.0 if reward is None else (reward - mean) * scale for reward in group]


def _population_std(values: Sequence[float]) -> float:
    if not values:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
