"""Intervals for accuracies and for paired differences. They speak about the questions, not about training seeds.

Several samples of one question are not independent: whatever is resampled is a question with all of its samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import torch

from qerl.kernels.philox import uniform

BOOTSTRAP_STREAM = "bootstrap"
_CHUNK = 2**20


def wilson(successes: float, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a proportion (E. B. Wilson, JASA 22, 1927).

    Args:
        successes: between 0 and ``count``.
        count: independent trials; 0 gives (0, 1).
        confidence: two-sided level, in (0, 1).
    """
    if count == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / count
    center = share + z * z / (2 * count)
    width = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    # At 0 and count the end is exactly 0 or 1; rounding must not move it.
    low = 0.0 if successes == 0 else (center - width) / scale
    high = 1.0 if successes == count else (center + width) / scale
    return low, high


def bootstrap(
    values: Sequence[float],
    confidence: float = 0.95,
    *,
    anchors: Sequence[float] = (),
    seed: int = 0,
    resamples: int = 2000,
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean (B. Efron, Annals of Statistics 7, 1979), by keyed draws.

    Args:
        values: one a question (its share of right answers, say); resampled with replacement. At least one.
        confidence: two-sided level, in (0, 1).
        anchors: values of imagined questions that are resampled with the others: the least and the greatest value there
            can be. They keep the interval of a few equal values from closing, as Agresti's and Coull's added successes
            and failures do for a proportion, and hardly move that of many.
        seed: with the stream ``bootstrap``, the whole source of chance.
        resamples: bootstrap samples.
    """
    data_N = torch.tensor([*values, *anchors], dtype=torch.float64)
    count = data_N.numel()
    rows = max(1, _CHUNK // count)
    means: list[torch.Tensor] = []
    for chunk, start in enumerate(range(0, resamples, rows)):
        size = min(rows, resamples - start)
        # In float64: count * uniform would round up to count in float32.
        picks = (uniform(seed, BOOTSTRAP_STREAM, size * count, c1=chunk).double() * count).long()
        means.append(data_N[picks].view(size, count).mean(dim=1))
    tail = (1 - confidence) / 2
    low, high = torch.cat(means).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Two-sided p-value of the exact McNemar test: a fair coin for every question that only one of two got right."""
    discordant = only_first + only_second
    tail = sum(math.comb(discordant, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**discordant)


def paired_difference(
    first: Sequence[float], second: Sequence[float], confidence: float = 0.95, *, seed: int = 0, resamples: int = 2000
) -> tuple[float, float, float]:
    """Mean of ``second - first`` over the same questions, with the bootstrap interval of the paired differences.

    One imagined question won and one lost are resampled with the others (``anchors`` of ``bootstrap``), so that equal
    answers to a few questions are not taken for certainty.

    Returns:
        (difference, low, high).
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    low, high = bootstrap(differences, confidence, anchors=(-1.0, 1.0), seed=seed, resamples=resamples)
    return math.fsum(differences) / len(differences), low, high
