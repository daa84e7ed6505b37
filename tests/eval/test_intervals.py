import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl.eval.intervals import bootstrap, mcnemar_exact, paired_difference, wilson

Z = 1.959963984540054


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [
        # R. G. Newcombe, Statistics in Medicine 17 (1998) 857-872, Table I, method 3 (score without correction).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_the_published_values(successes, count, low, high):
    assert wilson(successes, count) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 2000), st.data())
def test_wilson_ends_solve_the_score_equation(count, data):
    successes = data.draw(st.integers(0, count))
    low, high = wilson(successes, count)
    share = successes / count
    assert 0.0 <= low <= share <= high <= 1.0
    for end in (low, high):
        # |p_hat - p| = z sqrt(p (1 - p) / n) is what defines the two ends.
        assert (share - end) ** 2 == pytest.approx(Z**2 * end * (1 - end) / count, rel=1e-6, abs=1e-12)


def test_wilson_edges():
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == 1.0
    narrow, wide = wilson(5, 10, 0.5), wilson(5, 10, 0.99)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_bootstrap_agrees_with_all_resamples_of_a_small_sample():
    values = [0.0, 0.0, 1.0, 1.0, 0.5]
    means = sorted(sum(picks) / 5 for picks in itertools.product(values, repeat=5))
    low, high = bootstrap(values, 0.8, seed=1, resamples=20_000)
    assert low == pytest.approx(means[int(0.1 * len(means))], abs=0.051)
    assert high == pytest.approx(means[int(0.9 * len(means))], abs=0.051)


def test_bootstrap_has_the_width_of_the_normal_interval_on_many_values():
    values = [float(i % 4 == 0) for i in range(400)]
    low, high = bootstrap(values, 0.95, seed=0, resamples=4000)
    error = math.sqrt(0.25 * 0.75 / 400)
    # Means are multiples of 1 / 400; one and a half of them are allowed.
    assert low == pytest.approx(0.25 - Z * error, abs=1.5 / 400)
    assert high == pytest.approx(0.25 + Z * error, abs=1.5 / 400)


def test_bootstrap_is_keyed():
    values = [0.0, 0.25, 1.0, 0.5]
    assert bootstrap(values, seed=3) == bootstrap(values, seed=3)
    assert bootstrap([0.5] * 7) == (0.5, 0.5)
    assert bootstrap([1.0]) == (1.0, 1.0)


def test_mcnemar_is_the_exact_binomial_test():
    assert mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(3, 3) == 1.0
    assert mcnemar_exact(0, 5) == 2 * 0.5**5
    # As given by the binomial test of SciPy for 5 of 20.
    assert mcnemar_exact(5, 15) == mcnemar_exact(15, 5) == pytest.approx(0.04138946533203125, rel=1e-12)
    assert 0 < mcnemar_exact(400, 700) < 1e-15


def test_paired_difference_uses_the_pairing():
    first = [float(i % 2) for i in range(1000)]
    second = [min(1.0, value + 0.1) for value in first]
    difference, low, high = paired_difference(first, second)
    assert difference == pytest.approx(0.05)
    # Unpaired, the interval would be about 0.09 wide.
    assert 0.04 < low < difference < high < 0.06
    with pytest.raises(ValueError, match="longer"):
        paired_difference([1.0], [1.0, 0.0])


def test_paired_difference_of_a_few_equal_answers_is_not_certain():
    """Ten questions answered alike by both say little about the next one: about 3 / n may still differ."""
    for first, second in (([1.0] * 10, [1.0] * 10), ([0.0] * 10, [0.0] * 10)):
        difference, low, high = paired_difference(first, second)
        assert difference == 0.0
        assert -0.4 < low < -0.2 < 0.2 < high < 0.4
    difference, low, high = paired_difference([0.0] * 10, [1.0] * 10)
    assert 0.4 < low < 0.8 < difference == high == 1.0
    difference, low, high = paired_difference([0.0], [1.0])
    assert (low, high) == (-1.0, 1.0)


@pytest.mark.parametrize(("gain", "loss", "count"), [(0.1, 0.05, 20), (0.05, 0.05, 40), (0.02, 0.0, 50)])
def test_paired_difference_covers_the_truth_as_often_as_it_says(gain, loss, count):
    """Questions won with chance ``gain`` and lost with ``loss``; the plain percentile bootstrap covers 85, 92 and 68 % of
    such samples."""
    rng, trials, covered = random.Random(0), 150, 0
    for _ in range(trials):
        draws = [rng.random() for _ in range(count)]
        second = [1.0 if draw < gain else -1.0 if draw < gain + loss else 0.0 for draw in draws]
        _, low, high = paired_difference([0.0] * count, second, resamples=400)
        covered += low <= gain - loss <= high
    assert covered / trials > 0.94


def test_anchors_hardly_move_the_interval_of_many_questions():
    values = [float(i % 5 == 0) for i in range(2000)]
    plain, anchored = bootstrap(values), bootstrap(values, anchors=(0.0, 1.0))
    assert anchored == pytest.approx(plain, abs=1e-3)
