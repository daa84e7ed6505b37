"""Entropy and information estimators against a policy so small that every expectation is a finite sum."""

import math
from itertools import product

import pytest
import torch

from qerl.records import SamplingSpec
from qerl.train.diagnostics.entropy import distribution_entropies, information_bounds, noise_entropies

# Four equally likely noise states, three tokens: p(o | z) of the first token ...
FIRST = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.7, 0.1], [0.3, 0.3, 0.4], [0.6, 0.3, 0.1]], dtype=torch.float64)
# ... and of the second, p(o2 | z, o1) = SECOND[z, o1].
SECOND = torch.softmax(
    torch.tensor(
        [
            [[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.5, 0.0, 0.0]],
            [[0.0, 1.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.5, 1.0]],
            [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
            [[2.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 2.0]],
        ],
        dtype=torch.float64,
    ),
    dim=-1,
)
STATES = range(4)


def shannon(p):
    return float(-(p * p.log()).sum())


def answer_probabilities():
    """p(o | z) of whole answers, [4, 9]."""
    return (FIRST[:, :, None] * SECOND).reshape(4, 9)


def expected_over_draws(draws, first=FIRST):
    """Expectation of (conditional, mixture, plain mixture) over all 4^M ways to draw M noise states."""
    found = torch.zeros(3, dtype=torch.float64)
    for chosen in product(STATES, repeat=draws):
        logprobs = first[list(chosen)].log()[:, None].float()
        conditional, mixture = noise_entropies(logprobs)
        found += torch.tensor([float(conditional), float(mixture), shannon(first[list(chosen)].mean(0))])
    return found / 4**draws


def test_conditional_entropy_is_unbiased_and_the_jackknife_takes_most_of_the_mixtures_bias_away():
    conditional = sum(shannon(p) for p in FIRST) / 4
    mixture = shannon(FIRST.mean(0))
    for draws in (2, 3, 5):
        found = expected_over_draws(draws)
        assert found[0] == pytest.approx(conditional, abs=1e-6)
        plain_bias, bias = mixture - float(found[2]), mixture - float(found[1])
        assert plain_bias > 0.02
        assert abs(bias) < 0.3 * plain_bias, draws
    assert abs(mixture - float(expected_over_draws(5)[1])) < 0.06 * (mixture - conditional)


def test_weak_noise_makes_the_plain_estimate_too_small_by_one_over_m_and_the_jackknife_exact():
    weak = torch.softmax(0.02 * FIRST, dim=-1)
    information = shannon(weak.mean(0)) - sum(map(shannon, weak)) / 4
    conditional, mixture, plain = expected_over_draws(4, weak)
    # float32 probabilities leave an error of about 1e-8 in an information of 1e-5.
    assert float(plain - conditional) == pytest.approx(0.75 * information, rel=0.02)
    assert float(mixture - conditional) == pytest.approx(information, rel=0.03)


def test_equal_noise_states_carry_no_information():
    logprobs = FIRST[:1].log().float().expand(4, 1, 3)
    conditional, mixture = noise_entropies(logprobs)
    assert float(mixture - conditional) == pytest.approx(0.0, abs=1e-6)


def test_noise_states_with_disjoint_tokens_carry_their_own_entropy():
    logprobs = torch.eye(3)[:, None].log()
    conditional, mixture = noise_entropies(logprobs)
    assert float(conditional) == 0.0
    # The plain mixture is log 3, each mixture without one draw log 2.
    assert float(mixture) == pytest.approx(3 * math.log(3) - 2 * math.log(2), rel=1e-6)


def expected_bounds(draws):
    """Expectation of both bounds over the noise that sampled, the answer, and all M further draws."""
    p = answer_probabilities()
    low = high = 0.0
    for own in STATES:
        for answer in range(9):
            weight = float(p[own, answer]) / 4
            for chosen in product(STATES, repeat=draws):
                logs = p[list(chosen), answer].log()[:, None]
                a, b = information_bounds(p[own, answer].log()[None], logs)
                low, high = low + weight * a / 4**draws, high + weight * b / 4**draws
    return low, high


def test_bounds_enclose_the_information_of_whole_answers_and_close_in_with_more_draws():
    p = answer_probabilities()
    information = shannon(p.mean(0)) - sum(map(shannon, p)) / 4
    wide, narrow = expected_bounds(1), expected_bounds(3)
    for low, high in (wide, narrow):
        assert low < information < high
    assert wide[0] < narrow[0] and narrow[1] < wide[1]
    assert narrow[0] == pytest.approx(information, rel=0.3) and narrow[1] == pytest.approx(information, rel=0.6)


def test_the_lower_bound_cannot_exceed_the_logarithm_of_the_draws():
    low, high = information_bounds(torch.zeros(2), torch.full((3, 2), -50.0))
    assert low == pytest.approx(math.log(4)) and high == pytest.approx(50.0)


def test_entropies_name_what_they_are_of():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]]))
    raw, tempered, sampler = distribution_entropies(logits, SamplingSpec(temperature=0.5))
    assert float(raw) == pytest.approx(1.75 * math.log(2))
    squared = torch.tensor([16.0, 4.0, 1.0, 1.0], dtype=torch.float64) / 22
    assert float(tempered) == float(sampler) == pytest.approx(shannon(squared))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [({"top_k": 2}, [2 / 3, 1 / 3]), ({"top_p": 0.7}, [2 / 3, 1 / 3]), ({"min_p": 0.9}, [1.0]), ({"top_k": 4}, None)],
)
def test_the_samplers_entropy_is_of_the_tokens_that_it_keeps(settings, kept):
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]]))
    raw, tempered, sampler = distribution_entropies(logits, SamplingSpec(**settings))
    assert float(tempered) == float(raw)
    expected = float(raw) if kept is None else shannon(torch.tensor(kept, dtype=torch.float64))
    assert float(sampler) == pytest.approx(expected, abs=1e-7)


def test_greedy_sampling_has_no_entropy_and_impossible_tokens_count_nothing():
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    raw, _, sampler = distribution_entropies(logits, SamplingSpec(temperature=0.0))
    assert float(raw) == pytest.approx(math.log(2)) and float(sampler) == 0.0
