import math

import pytest
import torch

from qerl.metrics.catalogue import lookup
from qerl.train.diagnostics.mismatch import CAUSES, drawn_differently, kept_mass, mismatch


def test_equal_log_probs_give_no_mismatch_and_a_whole_sample():
    logprobs = torch.tensor([-0.5, -1.5, -3.0])
    found = mismatch("kernel", logprobs, logprobs)
    assert found == {
        "mismatch/kernel/kl": 0.0,
        "mismatch/kernel/max_abs_logp_difference": 0.0,
        "mismatch/kernel/mean_abs_prob_difference": 0.0,
        "mismatch/kernel/effective_sample_size": 1.0,
    }


def test_figures_of_two_tokens_by_hand():
    first, second = torch.tensor([0.5, 0.25]).double().log(), torch.tensor([0.25, 0.5]).double().log()
    found = mismatch("noise", first, second)
    # The two ratios are one half and two.
    assert found["mismatch/noise/kl"] == pytest.approx(((0.5 - 1 + math.log(2)) + (2 - 1 - math.log(2))) / 2)
    assert found["mismatch/noise/max_abs_logp_difference"] == pytest.approx(math.log(2))
    assert found["mismatch/noise/mean_abs_prob_difference"] == pytest.approx(0.25)
    assert found["mismatch/noise/effective_sample_size"] == pytest.approx(2.5**2 / (2 * 4.25))


def samples_in_proportion(p, q, count=1000):
    """Log-probs under p and q of tokens that occur as often as p says."""
    tokens = [i for i, share in enumerate(p) for _ in range(round(share * count))]
    return torch.tensor([math.log(p[i]) for i in tokens]), torch.tensor([math.log(q[i]) for i in tokens])


def test_kl_is_that_of_the_policy_the_tokens_come_from():
    p, q = (0.5, 0.3, 0.2), (0.3, 0.3, 0.4)
    exact = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert mismatch("staleness", *samples_in_proportion(p, q))["mismatch/staleness/kl"] == pytest.approx(
        exact, rel=1e-5
    )


def test_truncation_is_the_logarithm_of_the_kept_mass():
    """Top-k 2 of (.5, .3, .2) keeps .8: the sampler draws (.625, .375), and KL(sampler || full) = -log .8."""
    sampler, full = samples_in_proportion((0.625, 0.375), (0.5, 0.3))
    found = mismatch("truncation", sampler, full)
    assert found["mismatch/truncation/kl"] == pytest.approx(-math.log(0.8), rel=1e-6)
    assert kept_mass(full, sampler) == pytest.approx(0.8, rel=1e-6)


@pytest.mark.parametrize("cause", CAUSES)
def test_every_figure_is_in_the_catalogue(cause):
    for key in mismatch(cause, torch.tensor([-1.0]), torch.tensor([-1.1])):
        assert lookup(key).section == "Mismatch by cause"


def test_tokens_drawn_at_one_number_differ_as_often_as_the_distributions_are_apart():
    """p = (.5, .5), q = (.4, .6): a tenth of the numbers fall between the edges."""
    u = (torch.arange(1000) + 0.5) / 1000
    assert drawn_differently((u > 0.5).long(), (u > 0.4).long()) == pytest.approx(0.1)
    assert drawn_differently(torch.arange(3), torch.arange(3)) == 0.0
