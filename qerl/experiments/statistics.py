"""Statistics of a few seeds: intervals, what can be detected, medians with censored values. Pure, free of torch.

Student's t is computed here from the incomplete beta function, so that nothing beyond Python is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev, variance

_TINY = 1e-300
_ROUNDING = 1e-12
"""Share of the largest value below which a spread is that of rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanInterval:
    """A mean over seeds with its t-interval."""

    mean: float
    low: float | None
    """None where nothing is known of the spread: one value, or values that are all equal."""
    high: float | None
    sd: float | None
    """Sample standard deviation."""
    count: int


def t_interval(values: Sequence[float], confidence: float = 0.95) -> MeanInterval:
    """mean ± t * sd / sqrt(n), t the (1 + confidence)/2 quantile of Student's t with n - 1 degrees of freedom.

    Args:
        values: one a seed, at least one.
        confidence: two-sided level, in (0, 1).
    """
    mean = fmean(values)
    if len(values) < 2:
        return MeanInterval(mean=mean, low=None, high=None, sd=None, count=len(values))
    sd = stdev(values)
    if sd <= _ROUNDING * max(map(abs, values)):
        # Accuracies are counts of questions: equal ones, and equal differences of them but for rounding, say that the spread is too small to
        # be seen, not that it is 0.
        return MeanInterval(mean=mean, low=None, high=None, sd=sd, count=len(values))
    half = t_quantile(0.5 + confidence / 2, len(values) - 1) * sd / math.sqrt(len(values))
    return MeanInterval(mean=mean, low=mean - half, high=mean + half, sd=sd, count=len(values))


def detectable_difference(sd: float, first: int, second: int, *, alpha: float = 0.05, power: float = 0.8) -> float:
    """Smallest difference of two arms' means that a two-sided t-test finds with the given chance.

    (t_{1 - alpha/2, v} + t_{power, v}) * sd * sqrt(1/n1 + 1/n2), v = n1 + n2 - 2: the usual approximation of the
    non-central t, a few per cent too small at three seeds.

    Args:
        sd: standard deviation over seeds, the same in both arms; the result has its unit.
        first, second: seeds of the two arms, together at least three.
    """
    freedom = first + second - 2
    assert first >= 1 and second >= 1 and freedom >= 1, (first, second)
    factor = t_quantile(1 - alpha / 2, freedom) + t_quantile(power, freedom)
    return factor * sd * math.sqrt(1 / first + 1 / second)


def pooled_variance(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Variance within groups and its degrees of freedom, sum of n - 1: ((n1 - 1) s1^2 + (n2 - 1) s2^2 + …) over them.

    Args:
        groups: values of each; those with one value add nothing. Without any degree of freedom the variance is 0.
    """
    known = [values for values in groups if len(values) > 1]
    freedom = sum(len(values) - 1 for values in known)
    total = math.fsum((len(values) - 1) * variance(values) for values in known)
    return (total / freedom if freedom else 0.0), freedom


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanDifference:
    """A difference of two means with its t-interval and p-value, from a scatter that is taken to be the same in all groups."""

    mean: float
    low: float
    high: float
    p_value: float
    """Two-sided."""


def difference_of_means(
    first: Sequence[float], second: Sequence[float], scatter: float, freedom: int, confidence: float = 0.95
) -> MeanDifference | None:
    """Mean of ``second`` minus mean of ``first`` with Student's t: standard error sqrt(scatter (1/n1 + 1/n2)).

    Args:
        first, second: values of the two groups, at least one each; they are not paired.
        scatter, freedom: of :func:`pooled_variance`, over these groups and others.
        confidence: two-sided level, in (0, 1).

    Returns:
        None where nothing is known of the scatter, or it is too small to be seen.
    """
    if freedom < 1 or scatter <= 0:
        return None
    mean = fmean(second) - fmean(first)
    error = math.sqrt(scatter * (1 / len(first) + 1 / len(second)))
    half = t_quantile(0.5 + confidence / 2, freedom) * error
    return MeanDifference(mean=mean, low=mean - half, high=mean + half, p_value=t_tails(mean / error, freedom))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values for several questions asked at once (S. Holm, Scandinavian Journal of Statistics 6, 1979), in their order.

    The smallest of m is multiplied by m, the next by m - 1 and so on; none falls below one before it, none exceeds 1.
    """
    found = [1.0] * len(p_values)
    least = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[index]))
        found[index] = least
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CensoredMedian:
    """The median of times of which some are only known to be longer."""

    value: float | None
    """None where the median lies among the censored: it is above ``above``."""
    above: float | None
    """Lower bound of a median that is not known."""
    reached: int
    count: int


def censored_median(values: Sequence[float | None], bounds: Sequence[float | None]) -> CensoredMedian:
    """Median of times with censored ones counted as longer than all others; nothing is extrapolated.

    Where the middle (for an even count either of the two in the middle) is censored, the median is not known; with every
    censored time replaced by its bound, the median is a lower bound of it.

    Args:
        values: time to target; None where the target was not reached.
        bounds: where each run ended, for the censored ones.
    """
    known = sorted(value for value in values if value is not None)
    count = len(values)
    if count and count // 2 < len(known):
        return CensoredMedian(
            value=(known[(count - 1) // 2] + known[count // 2]) / 2, above=None, reached=len(known), count=count
        )
    least = [bound if value is None else value for value, bound in zip(values, bounds, strict=True)]
    whole = [value for value in least if value is not None]
    above = median(whole) if whole and len(whole) == count else None
    return CensoredMedian(value=None, above=above, reached=len(known), count=count)


def pareto_front(points: Sequence[tuple[float | None, ...]]) -> list[bool]:
    """Whether each point is on the front: no other is at least as good everywhere and better somewhere.

    Args:
        points: all coordinates to be minimized (negate what is to be large). A point with a missing coordinate is not on
            the front and beats nobody.
    """

    def beats(a: tuple[float | None, ...], b: tuple[float | None, ...]) -> bool:
        pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
        return len(pairs) == len(a) and all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)

    whole = [None not in point for point in points]
    return [
        whole[index] and not any(whole[j] and beats(other, point) for j, other in enumerate(points) if j != index)
        for index, point in enumerate(points)
    ]


def t_cdf(t: float, freedom: float) -> float:
    """Distribution function of Student's t: 1 minus half of :func:`t_tails` at t >= 0, which half is at t < 0."""
    tail = 0.5 * t_tails(t, freedom)
    return 1 - tail if t >= 0 else tail


def t_tails(t: float, freedom: float) -> float:
    """Chance of Student's t beyond |t| on either side: I_x(v/2, 1/2) with x = v / (v + t^2). Small ones have all their digits."""
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def t_quantile(share: float, freedom: float) -> float:
    """Inverse of :func:`t_cdf`, by bisection to the last bits."""
    assert 0 < share < 1, share
    if share < 0.5:
        return -t_quantile(1 - share, freedom)
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < share:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_cdf(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularized incomplete beta function I_x(a, b), by Lentz's continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    fraction, c, d = 1.0, 1.0, 0.0
    for index in range(300):
        m = index // 2
        if index == 0:
            term = 1.0
        elif index % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / (1 + term * d if abs(1 + term * d) > _TINY else _TINY)
        c = 1 + term / c if abs(1 + term / c) > _TINY else _TINY
        fraction *= c * d
        if abs(1 - c * d) < 1e-15:
            break
    return front * (fraction - 1) / a
