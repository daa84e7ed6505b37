"""Statistics against tables, hand-made examples and simulation."""

import math
import random
from statistics import NormalDist

import pytest

from qerl.experiments.statistics import (
    censored_median,
    detectable_difference,
    difference_of_means,
    holm,
    incomplete_beta,
    pareto_front,
    pooled_variance,
    t_cdf,
    t_interval,
    t_quantile,
    t_tails,
)

# Two-sided 95 % and 99 % points of Student's t, as printed in tables.
TABLE = {1: (12.7062, 63.6567), 2: (4.3027, 9.9248), 4: (2.7764, 4.6041), 10: (2.2281, 3.1693), 30: (2.0423, 2.75)}


@pytest.mark.parametrize("freedom", TABLE)
def test_quantiles_are_those_of_the_tables(freedom):
    assert t_quantile(0.975, freedom) == pytest.approx(TABLE[freedom][0], abs=5e-5)
    assert t_quantile(0.995, freedom) == pytest.approx(TABLE[freedom][1], abs=5e-5)
    assert t_quantile(0.025, freedom) == -t_quantile(0.975, freedom)


def test_one_and_two_degrees_of_freedom_have_closed_forms():
    for t in (-3.0, -0.2, 0.0, 0.7, 5.0):
        assert t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-13)
        assert t_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-13)


def test_small_chances_keep_their_digits():
    # Beyond 1 minus a float: 1 - t / sqrt(2 + t^2) = 2 / (s (s + t)) with s = sqrt(2 + t^2), at two degrees of freedom.
    for t in (1e3, -1e6, 1e9):
        s = math.sqrt(2 + t * t)
        assert t_tails(t, 2) == pytest.approx(2 / (s * (s + abs(t))), rel=1e-12)
    far = difference_of_means([0.1], [0.9], 1e-6, 19)
    assert 0 < far.p_value < 1e-30


def test_many_degrees_of_freedom_are_normal():
    assert t_quantile(0.9, 1e7) == pytest.approx(NormalDist().inv_cdf(0.9), abs=1e-6)


def test_the_incomplete_beta_function_is_a_polynomial_at_whole_numbers():
    x = 0.3
    assert incomplete_beta(2, 2, x) == pytest.approx(3 * x**2 - 2 * x**3, abs=1e-14)
    assert incomplete_beta(1, 5, x) == pytest.approx(1 - (1 - x) ** 5, abs=1e-14)
    assert (incomplete_beta(2, 3, 0.0), incomplete_beta(2, 3, 1.0)) == (0.0, 1.0)


def test_an_interval_by_hand():
    found = t_interval([0.40, 0.42, 0.44])
    half = 4.30265 * 0.02 / math.sqrt(3)
    assert (found.mean, found.sd, found.count) == (pytest.approx(0.42), pytest.approx(0.02), 3)
    assert (found.low, found.high) == (pytest.approx(0.42 - half, abs=1e-6), pytest.approx(0.42 + half, abs=1e-6))


def test_differences_that_are_equal_but_for_rounding_have_no_interval():
    counts = ((465, 444), (464, 443), (470, 449))
    values = [more / 1319 - fewer / 1319 for more, fewer in counts]
    assert len(set(values)) > 1, "rounded differently"
    found = t_interval(values)
    assert (found.low, found.high) == (None, None) and found.mean == pytest.approx(21 / 1319)
    assert t_interval([21 / 1319, 22 / 1319]).low is not None and t_interval([0.0, 1e-6]).low is not None


def test_one_seed_has_no_interval():
    found = t_interval([0.4])
    assert (found.mean, found.low, found.high, found.sd) == (0.4, None, None, None)


def test_equal_values_claim_no_certainty():
    found = t_interval([0.4, 0.4])
    assert (found.mean, found.low, found.high, found.sd) == (0.4, None, None, 0.0)


def test_intervals_cover_as_often_as_they_say():
    rng = random.Random(0)
    samples = [t_interval([rng.gauss(1, 2) for _ in range(3)], 0.9) for _ in range(1500)]
    inside = sum(found.low <= 1 <= found.high for found in samples)
    assert inside / 1500 == pytest.approx(0.9, abs=0.025)


def test_detectable_difference_by_hand_and_by_simulation():
    # t.975 = 2.7764 and t.8 = 0.9410 with 4 degrees of freedom.
    difference = detectable_difference(1.0, 3, 3)
    assert difference == pytest.approx((2.7764 + 0.9410) * math.sqrt(2 / 3), abs=1e-3)
    rng = random.Random(1)
    hits = 0
    for _ in range(1500):
        a = [rng.gauss(0, 1) for _ in range(3)]
        b = [rng.gauss(difference, 1) for _ in range(3)]
        mean_a, mean_b = sum(a) / 3, sum(b) / 3
        pooled = math.sqrt((sum((x - mean_a) ** 2 for x in a) + sum((x - mean_b) ** 2 for x in b)) / 4)
        hits += abs(mean_b - mean_a) / (pooled * math.sqrt(2 / 3)) > 2.7764
    assert 0.74 < hits / 1500 < 0.82
    assert detectable_difference(1.0, 5, 5) < difference


@pytest.mark.parametrize(
    ("values", "bounds", "value", "above"),
    [
        ([10.0, 30.0, 20.0], [None] * 3, 20.0, None),
        ([10.0, 20.0], [None] * 2, 15.0, None),
        ([10.0, None, 20.0], [None, 90.0, None], 20.0, None),
        ([10.0, None, None], [None, 90.0, 80.0], None, 80.0),
        ([10.0, None], [None, 90.0], None, 50.0),
        ([None, None], [90.0, 70.0], None, 80.0),
        ([None], [None], None, None),
        ([], [], None, None),
    ],
)
def test_medians_with_censored_values(values, bounds, value, above):
    found = censored_median(values, bounds)
    assert (found.value, found.above) == (value, above)
    assert (found.reached, found.count) == (sum(v is not None for v in values), len(values))


def test_the_front_holds_what_nothing_beats():
    points = [(-0.45, 100.0, 5.0), (-0.40, 50.0, 5.0), (-0.40, 60.0, 6.0), (-0.45, 100.0, 5.0), (-0.50, None, 1.0)]
    assert pareto_front(points) == [True, True, False, True, False]
    assert pareto_front([]) == []


def test_scatter_within_groups_by_hand():
    """Sums of squares 2, 0 and 8 over 2, 1 and 1 degrees of freedom; the group of one value has none."""
    assert pooled_variance([[1, 2, 3], [5, 5], [1, 5], [9]]) == (pytest.approx(10 / 4), 4)
    assert pooled_variance([[1], []]) == (0.0, 0)


def test_a_difference_of_means_by_hand():
    """Means 2 and 4, scatter 1 with 4 degrees of freedom: t = 2 / sqrt(2/3); the tail of 4 degrees has a closed form."""
    first, second = [1.0, 2.0, 3.0], [3.0, 4.0, 5.0]
    found = difference_of_means(first, second, *pooled_variance([first, second]))
    assert (found.mean, found.low) == (2.0, pytest.approx(2.0 - 2.7764 * math.sqrt(2 / 3), abs=1e-3))
    t = 2 / math.sqrt(2 / 3)
    x = t / math.sqrt(4 + t * t)
    assert found.p_value == pytest.approx(1 - x * (3 - x * x) / 2, abs=1e-12)
    assert difference_of_means(first, [3.0], *pooled_variance([first])).high > 1.0 + 4.3027
    assert difference_of_means([1.0], [2.0], *pooled_variance([[1.0], [2.0]])) is None
    assert difference_of_means([1.0, 1.0], [2.0, 2.0], 0.0, 2) is None


def test_intervals_of_pooled_scatter_cover_as_often_as_they_say():
    """Arms of unlike means and counts, of which the first two are compared."""
    rng = random.Random(2)
    inside = 0
    for _ in range(1500):
        arms = [[rng.gauss(mean, 1.3) for _ in range(n)] for mean, n in ((0, 3), (1, 1), (4, 2), (9, 5))]
        found = difference_of_means(arms[0], arms[1], *pooled_variance(arms), 0.9)
        inside += found.low <= 1 <= found.high
    assert inside / 1500 == pytest.approx(0.9, abs=0.025)


def test_several_questions_at_once():
    """Holm, by hand: .01 times 3, .03 times 2, and .04, which may not fall below that."""
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []
