"""Estimators under noise against exact gradients, on the enumerable policy of ``benchmarks/toy_estimators.py``."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from qerl.kernels import philox

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.func's own
CPU = torch.device("cpu")
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "toy_estimators.py"


def load_script():
    spec = importlib.util.spec_from_file_location("toy_estimators", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy_estimators"] = module
    spec.loader.exec_module(module)
    return module


script = load_script()
BY_NAME = {estimator.name: estimator for estimator in script.ESTIMATORS}
SEQUENCE, TOKEN, REPLAYED = "absent, sequence weight, no bound", "absent, token weight, no bound", "replayed"
FILTER = "absent over behavior"


@pytest.fixture(scope="module")
def toy():
    return script.make_toy(0.3, 3)


def joint(toy):
    """Probability of every noise state with every answer, and the log of the clean over the noisy probability by token."""
    noisy = script.token_logprobs(toy, toy.head_VD, toy.noise_ZD)
    clean = script.token_logprobs(toy, toy.head_VD, torch.zeros(1, 3).double())
    return toy.weight_Z[:, None] * noisy.sum(-1).exp(), clean - noisy


def mean_by_noise(toy, name):
    given = script.token_logprobs(toy, toy.head_VD, toy.noise_ZD).sum(-1).exp()
    return (given[..., None] * script.estimate(toy, BY_NAME[name])).sum(1)


def mean_of(toy, name):
    return (toy.weight_Z[:, None] * mean_by_noise(toy, name)).sum(0)


def test_the_noise_rule_has_the_moments_of_a_normal_draw(toy):
    weight, z = toy.weight_Z[:, None], toy.noise_ZD / 0.3
    assert (weight * z).sum(0).abs().max() < 1e-15
    torch.testing.assert_close((weight * z**2).sum(0), torch.ones(3).double())
    torch.testing.assert_close((weight * z**4).sum(0), torch.full((3,), 3.0).double())


def test_the_exact_gradient_is_that_of_the_marginal(toy):
    """Central differences of sum_o E_z[prod_t pi(o_t | z)] R(o)."""
    exact = script.targets_of(toy)["noisy"]

    def value(head):
        probability = (toy.weight_Z[:, None] * script.token_logprobs(toy, head, toy.noise_ZD).sum(-1).exp()).sum(0)
        return (probability * toy.reward_O).sum()

    for index in range(9):
        step = torch.zeros(9).double()
        step[index] = 1e-5
        slope = (value(toy.head_VD + step.view(3, 3)) - value(toy.head_VD - step.view(3, 3))) / 2e-5
        assert slope.item() == pytest.approx(exact[index].item(), abs=1e-9)


def test_replayed_noise_gives_the_gradient_of_the_noisy_objective(toy):
    targets = script.targets_of(toy)
    torch.testing.assert_close(mean_of(toy, REPLAYED), targets["noisy"])
    assert (targets["noisy"] - targets["clean"]).norm() > 0.02 * targets["clean"].norm(), "two objectives, not one"


def test_sequence_weights_give_the_clean_gradient_under_every_single_draw(toy):
    clean = script.targets_of(toy)["clean"]
    torch.testing.assert_close(mean_by_noise(toy, SEQUENCE), clean.expand(len(toy.noise_ZD), -1))


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in (REPLAYED, SEQUENCE)])
def test_every_other_estimator_of_the_clean_gradient_is_biased(toy, name):
    clean = script.targets_of(toy)["clean"]
    assert (mean_of(toy, name) - clean).norm() > 1e-3 * clean.norm()


def test_without_noise_all_estimators_that_do_not_shrink_are_exact():
    toy = script.make_toy(0.0, 3)
    for name in BY_NAME:
        torch.testing.assert_close(mean_of(toy, name), script.targets_of(toy)["clean"], msg=name)


def test_sequence_weights_average_to_one_exactly_and_token_weights_after_every_prefix(toy):
    probability, log_ratio = joint(toy)
    assert (probability * log_ratio.sum(-1).exp()).sum().item() == pytest.approx(1.0, abs=1e-12)
    noisy = script.token_logprobs(toy, toy.head_VD, toy.noise_ZD)
    for place in range(toy.length):
        # Answers come in lexicographic order: those that share all but the tokens from ``place`` on lie together.
        expected = (noisy[..., place].exp() * log_ratio[..., place].exp())[:, :: 3 ** (toy.length - 1 - place)]
        torch.testing.assert_close(expected.reshape(27, -1, 3).sum(-1), torch.ones(27, 3**place).double())


@pytest.mark.parametrize("sigma", [0.1, 0.3])
def test_weights_average_to_one_over_many_samples(sigma):
    """Drawn samples of the noisy policy, as a run has them; token weights are those of the last token."""
    toy, count = script.make_toy(sigma, 3), 40_000
    probability, log_ratio = joint(toy)
    uniform = philox.uniform(0, "toy_samples", count, device=CPU).double()
    drawn = torch.searchsorted(probability.flatten().cumsum(0), uniform).clamp(max=probability.numel() - 1)
    for weights in (log_ratio.sum(-1).exp(), log_ratio[..., -1].exp()):
        sample = weights.flatten()[drawn]
        error = sample.std() / count**0.5
        assert abs(sample.mean() - 1) < 4 * error < 0.05
        assert sample.clamp(max=1.2).mean() < 1, "a cap takes weight away"


def test_bounds_trade_bias_for_variance_and_the_noise_filter_is_the_worst():
    toy = script.make_toy(0.5, 4)
    cells = {name: script.relative([script.measure(toy, BY_NAME[name])], BY_NAME[name]) for name in BY_NAME}
    capped = "absent, sequence weight, cap 2"
    assert cells[SEQUENCE]["bias_clean"] < 1e-9 < cells[capped]["bias_clean"]
    assert cells[capped]["spread"] < cells[SEQUENCE]["spread"]
    assert cells["absent, token weight, cap 2"]["spread"] < cells[TOKEN]["spread"]
    assert cells[FILTER]["bias_clean"] > max(cells[name]["bias_clean"] for name in (capped, TOKEN, "absent, no weight"))
    assert cells[SEQUENCE]["between"] < 1e-9 < 0.1 * cells[REPLAYED]["between"]


def test_the_table_names_every_estimator():
    text = script.table(script.study(0.2, 2, 1))
    assert all(f"| {name} |" in text for name in BY_NAME) and "mean weight 1.000000" in text
