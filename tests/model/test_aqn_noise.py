"""The draws: keyed, replayable, with the right spread, and never in the clean scales."""

import itertools

import pytest
import torch
from tiny_models import decoder_logits, load_tiny, random_tokens, write_tiny

from qerl.config.schema import AqnConfig
from qerl.kernels import philox
from qerl.model.aqn import NoiseState, noise_state, z_over_w
from qerl.model.checkpoint import norm_hash

SITES = ("attn_norm", "mlp_norm")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny(folder, hidden_size=128, num_hidden_layers=4)
    return load_tiny(folder)


def state(**changes):
    return NoiseState(**{"seed": 3, "rollout": 5, "stage": 1, "sigma": 0.1, "sites": SITES, **changes})


def draws(noise):
    return torch.cat([noise.z(*place) for place in noise.places()])


def test_the_same_state_gives_the_same_bits_and_survives_json(model):
    one = state().materialize(model)
    again = NoiseState.from_dict(state().to_dict()).materialize(model)
    assert torch.equal(draws(one), draws(again))
    assert draws(one).dtype == torch.float32


@pytest.mark.parametrize("change", [{"rollout": 6}, {"seed": 4}, {"stream": "evaluation"}])
def test_another_key_gives_other_noise(model, change):
    one, other = draws(state().materialize(model)), draws(state(**change).materialize(model))
    assert abs(torch.corrcoef(torch.stack((one, other)))[0, 1]) < 0.1


def test_sites_and_layers_have_draws_of_their_own(model):
    noise = state(sites=(*SITES, "final_norm")).materialize(model)
    assert len(noise.places()) == 2 * 4 + 1
    assert noise.places()[-1] == (4, "final_norm")
    rows = [noise.z(*place) for place in noise.places()]
    for a, b in itertools.combinations(rows, 2):
        assert not torch.equal(a, b)


def test_a_draw_does_not_depend_on_which_other_sites_are_noisy(model):
    both, one = state().materialize(model), state(sites=("mlp_norm",)).materialize(model)
    assert torch.equal(both.z(2, "mlp_norm"), one.z(2, "mlp_norm"))
    assert one.z(2, "attn_norm") is None


def test_counters_are_the_documented_ones(model):
    noise = state().materialize(model)
    expected = 0.1 * philox.normal(3, "noise", 128, c1=1 | 2 << 4, c2=0, c3=5)
    assert torch.equal(noise.z(2, "mlp_norm"), expected)


def test_spread_and_mean_are_those_of_sigma(model):
    values = torch.cat([draws(state(rollout=rollout).materialize(model)) for rollout in range(40)]) / 0.1
    count = values.numel()
    assert count == 40 * 8 * 128
    assert abs(values.mean()) < 4 / count**0.5
    assert abs(values.var() - 1) < 4 * (2 / count) ** 0.5
    assert abs((values**4).mean() - 3) < 4 * (96 / count) ** 0.5


def test_relative_noise_scales_with_the_clean_weight(model):
    absolute, relative = state().materialize(model), state(magnitude="relative").materialize(model)
    for place in absolute.places():
        torch.testing.assert_close(
            relative.z(*place), absolute.z(*place) * model.norm_weight(*place).detach().abs(), rtol=1e-6, atol=0
        )
        assert not relative.z(*place).requires_grad


def test_relative_noise_keeps_the_weights_of_the_moment_it_was_made(tmp_path):
    write_tiny(tmp_path)
    model = load_tiny(tmp_path)
    noise = state(magnitude="relative").materialize(model)
    before = draws(noise).clone()
    with torch.no_grad():
        model.layers[0].attn_norm.mul_(3)
    assert torch.equal(draws(noise), before)
    assert not torch.equal(draws(state(magnitude="relative").materialize(model)), before)


def test_sigma_zero_is_bit_identical_to_no_noise(model):
    sequences = random_tokens((20, 33))
    quiet = state(sigma=0.0, stage=0, sites=(*SITES, "final_norm")).materialize(model)
    assert torch.equal(decoder_logits(model, sequences, noise=quiet), decoder_logits(model, sequences))


def test_noise_changes_logits_and_leaves_the_clean_scales_alone(model):
    sequences = random_tokens((20, 33))
    clean, before = decoder_logits(model, sequences), norm_hash(model)
    noise = state(sites=(*SITES, "final_norm")).materialize(model)
    noisy = decoder_logits(model, sequences, noise=noise)
    assert (noisy - clean).abs().mean() > 0.01
    assert torch.equal(noisy, decoder_logits(model, sequences, noise=noise))
    assert norm_hash(model) == before
    assert torch.equal(decoder_logits(model, sequences), clean)


@pytest.mark.parametrize("site", [*SITES, "final_norm"])
def test_noise_equals_adding_z_to_the_scale(tmp_path, site):
    write_tiny(tmp_path)
    model, sequences = load_tiny(tmp_path), random_tokens((11, 25))
    noise = state(sites=(site,)).materialize(model)
    noisy = decoder_logits(model, sequences, noise=noise)
    with torch.no_grad():
        for place in noise.places():
            model.norm_weight(*place).add_(noise.z(*place))
    assert torch.equal(decoder_logits(model, sequences), noisy)


def test_noise_state_follows_the_configured_schedule():
    aqn = AqnConfig(sigma_start=0.05, sigma_end=0.0005, num_stages=10)
    first = noise_state(aqn, seed=1, rollout=0, completed=0, planned=200)
    assert (first.stage, first.sigma) == (0, 0.0)
    last = noise_state(aqn, seed=1, rollout=199, completed=199, planned=200)
    assert (last.stage, last.sigma, last.rollout) == (9, 0.0005, 199)
    assert last.sites == SITES
    assert noise_state(AqnConfig(enabled=False), seed=1, rollout=0, completed=0, planned=200) is None


def test_z_over_w_counts_channels_above_the_threshold(model):
    noise = state(sigma=0.3).materialize(model)
    pairs = [(noise.z(*place), model.norm_weight(*place)) for place in noise.places()]
    expected = torch.cat([(z / w).abs() > 0.5 for z, w in pairs]).double().mean()
    assert z_over_w(noise, model, 0.5) == pytest.approx(float(expected))
    assert 0 < float(expected) < 1
    assert z_over_w(state(sigma=0.0).materialize(model), model, 0.5) == 0.0
    # Relative noise at sigma 0.3 exceeds half the weight where |n| > 5/3: 9.6 % of a normal.
    assert z_over_w(state(sigma=0.3, magnitude="relative").materialize(model), model, 0.5) == pytest.approx(
        0.0956, abs=0.03
    )
