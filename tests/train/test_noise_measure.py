"""KL, entropy change and sensitivity on the calibration batch, and the levels found by bisection."""

import math
from dataclasses import replace

import pytest
import torch
from noise_builders import PROMPTS, make_config, make_session
from rollout_builders import write_checkpoint

from qerl.errors import TrainingError
from qerl.model.aqn import NoiseState
from qerl.train.noise.measure import CalibrationBatch, calibrate, draws_for, kl_at, site_scales, solve_level


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module")
def session(folder):
    return make_session(folder, make_config())


@pytest.fixture(scope="module")
def batch(session):
    return CalibrationBatch(session.config, session, PROMPTS, None)


def state(**changes):
    settings = {"seed": 0, "rollout": 3, "stage": 1, "sigma": 0.1, "sites": ("attn_norm", "mlp_norm"), "group_size": 4}
    return NoiseState(**{**settings, **changes})


@torch.no_grad()
def distributions(session, batch, noise):
    """float64 log-softmax of every answer position, one sequence at a time."""
    for packed in batch.batches:
        context = packed.context()
        for row, start in enumerate(packed.cu_pieces_P1[:-1].tolist()):
            stop = int(packed.cu_pieces_P1[row + 1])
            one = type(context)(
                torch.tensor([0, stop - start]),
                sample_keys_S=packed.sample_keys_S[row : row + 1],
                prompt_lengths_S=packed.prompt_lengths_S[row : row + 1],
            )
            hidden = session.model(packed.tokens_T[start:stop], one, noise=noise)
            logits = session.model.logits(hidden[int(packed.prompt_lengths_S[row]) - 1 : -1]).double()
            yield (logits / session.config.rollout.temperature).log_softmax(-1)


# What is measured


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_kl_and_entropies_by_definition(folder, temperature):
    config = make_config(f"rollout.temperature={temperature}")
    session = make_session(folder, config)
    batch = CalibrationBatch(config, session, PROMPTS, None)
    noise = draws_for(state()).materialize(session.model)
    clean, noisy = (torch.cat(list(distributions(session, batch, n))) for n in (None, noise))
    found = batch.effect(noise)
    assert found.kl == pytest.approx(float((clean.exp() * (clean - noisy)).sum(-1).mean()), rel=1e-3)
    assert found.entropy_clean == pytest.approx(float(-(clean.exp() * clean).sum(-1).mean()), rel=1e-5)
    assert found.entropy_noisy == pytest.approx(float(-(noisy.exp() * noisy).sum(-1).mean()), rel=1e-5)
    assert len(clean) == batch.tokens == sum(map(len, batch.answers))


def test_the_batch_is_made_of_the_policys_own_answers_to_the_first_prompts(session, batch):
    again = CalibrationBatch(session.config, session, PROMPTS, None)
    assert again.answers == batch.answers
    assert len(batch.answers) == 4 and all(1 <= len(answer) <= 12 for answer in batch.answers)
    stored = CalibrationBatch(session.config, session, PROMPTS, batch.answers)
    noise = draws_for(state()).materialize(session.model)
    assert stored.effect(noise) == batch.effect(noise)


def test_every_answer_has_a_draw_of_its_own_that_lasts_as_the_scope_says():
    assert draws_for(state()).scope == draws_for(state(scope="group")).scope == "response"
    assert draws_for(state(scope="token")).scope == "token"
    assert draws_for(state(rollout=9)) == draws_for(state(rollout=3)), "the same draws at every measurement"
    assert draws_for(state()).stream != state().stream
    walk = state(mode="accumulate", history=((0, 0.1),))
    assert draws_for(walk).sigma == pytest.approx(0.1 * 2), "four draws of 0.1"


def test_no_noise_has_no_effect(batch):
    found = batch.effect(draws_for(state(sigma=0.0)).materialize(batch.model))
    assert (found.kl, found.entropy_clean) == (0.0, found.entropy_noisy)


def test_sensitivity_of_the_final_norm_is_its_exact_linear_response(session, batch):
    """Logits are linear in the final norm's scale: u * (0.1 n |w|) times the head, centered."""
    final = state(sites=("final_norm",))
    noise = draws_for(final, magnitude="relative", sigma=0.1).materialize(session.model)
    total, tokens = 0.0, 0
    with torch.no_grad():
        for packed in batch.batches:
            hidden = session.model(packed.tokens_T, packed.context())
            z = noise.for_pass(packed.context()).z(session.model.spec.num_layers, "final_norm")
            moved = (hidden / session.model.final_norm * z)[packed.predictor_N].double()
            change = moved @ session.model.head_weight.double().T
            total += float((change - change.mean(-1, keepdim=True)).square().mean(-1).sum())
            tokens += len(change)
    assert batch.logit_change(noise) == pytest.approx(math.sqrt(total / tokens), rel=1e-4)


@pytest.mark.parametrize("sharing", ["shared", "independent"])
def test_site_scales_undo_the_logit_change_of_their_places(batch, sharing):
    asked = state(sites=("attn_norm", "mlp_norm", "final_norm"), sharing=sharing)
    scales = site_scales(batch, asked, cap=1e9)
    noise = draws_for(asked, magnitude="relative", sigma=0.1).materialize(batch.model)
    assert len(scales) == len(noise.places()) == (11 if sharing == "independent" else 5)
    assert sum(scales) / len(scales) == pytest.approx(1.0)
    products = [
        scale * batch.logit_change(noise.only(place)) for scale, place in zip(scales, noise.places(), strict=True)
    ]
    assert products == pytest.approx([products[0]] * len(products))
    capped = site_scales(batch, asked, cap=1.1)
    assert capped == tuple(min(scale, 1.1) for scale in scales)
    assert max(scales) > 1.1


def test_sites_without_effect_are_an_error(folder):
    config = make_config()
    session = make_session(folder, config)
    batch = CalibrationBatch(config, session, PROMPTS, None)
    with torch.no_grad():
        session.model.final_norm.zero_()
    with pytest.raises(TrainingError, match="changes no logit"):
        site_scales(batch, state(sites=("final_norm",)), cap=4.0)


# Bisection


@pytest.mark.parametrize("power", [1.0, 2.0, 3.5])
@pytest.mark.parametrize("target", [1e-6, 0.02, 5.0])
def test_the_level_of_a_rising_curve_is_found(power, target):
    calls = []

    def kl_of(level):
        calls.append(level)
        return 3.0 * level**power

    root = solve_level(kl_of, target, start=0.05, tolerance=0.01)
    assert root.reached
    assert 3.0 * root.level**power == pytest.approx(target, rel=0.01)
    assert len(calls) <= 25


def test_a_quadratic_curve_takes_two_calls():
    calls = []
    solve_level(lambda level: calls.append(level) or 7 * level**2, 0.02, start=0.05, tolerance=1e-6)
    assert len(calls) == 2


def test_a_jump_over_the_target_ends_at_the_nearer_side_and_says_so():
    root = solve_level(lambda level: 0.0 if level < 0.3 else 0.1, 0.08, start=0.05, tolerance=0.01)
    assert not root.reached
    assert root.kl == 0.1
    assert 0.3 <= root.level < 0.4


def test_a_target_beyond_every_noise_ends():
    root = solve_level(lambda level: 1.0 - math.exp(-level), 2.0, start=0.05, tolerance=0.01)
    assert not root.reached and root.beyond


# Calibration of a stage


def calibrated(folder, sigma, *settings, **changes):
    config = make_config(*settings)
    session = make_session(folder, config)
    batch = CalibrationBatch(config, session, PROMPTS, None)
    asked = state(sigma=sigma, magnitude=config.aqn.magnitude, sharing=config.aqn.sharing, **changes)
    found, warnings = calibrate(config, batch, asked, lambda complete: complete)
    final = replace(
        asked, sigma=found.sigma, factor=found.factor, site_scales=found.site_scales, kl_target=found.kl_target
    )
    return found, warnings, batch, final


@pytest.mark.parametrize("target", [0.02, 1e-4])
@pytest.mark.parametrize("scope", ["rollout", "token"])
@pytest.mark.parametrize("sharing", ["shared", "independent"])
def test_kl_magnitude_hits_the_schedules_target(folder, target, scope, sharing):
    found, warnings, batch, final = calibrated(
        folder, target, "aqn.magnitude=kl", f"aqn.sharing={sharing}", scope=scope
    )
    assert warnings == []
    assert found.kl_target == target
    assert batch.effect(draws_for(final).materialize(batch.model)).kl == pytest.approx(target, rel=0.02)
    assert found.kl == pytest.approx(target, rel=0.02)


@pytest.mark.parametrize("magnitude", ["absolute", "relative", "sensitivity"])
def test_a_matched_budget_gives_independent_draws_the_kl_of_shared_ones(folder, magnitude):
    settings = (f"aqn.magnitude={magnitude}", "aqn.sharing=independent", "aqn.match_budget=true")
    found, warnings, batch, final = calibrated(folder, 0.1, *settings)
    scales = site_scales(batch, replace(final, sharing="shared"), 4.0) if magnitude == "sensitivity" else ()
    shared = replace(final, sharing="shared", factor=1.0, site_scales=scales)
    target = batch.effect(draws_for(shared).materialize(batch.model)).kl
    assert warnings == []
    assert found.kl == pytest.approx(target, rel=0.02)
    assert found.sigma == 0.1 and found.factor != 1.0
    assert kl_at(batch, final)(0.1) != pytest.approx(target, rel=0.02), "the same sigma alone does not match"


def test_an_absolute_stage_is_only_measured(folder):
    found, warnings, batch, final = calibrated(folder, 0.1)
    assert (found.sigma, found.factor, found.site_scales, found.kl_target, warnings) == (0.1, 1.0, (), None, [])
    assert found.metrics()["aqn/kl"] == batch.effect(draws_for(final).materialize(batch.model)).kl > 0


def test_a_target_out_of_reach_is_an_error(folder):
    with pytest.raises(TrainingError, match="no noise reaches the KL that stage 1 asks for"):
        calibrated(folder, 500.0, "aqn.magnitude=kl")


def test_a_target_below_rounding_is_warned_of(folder, monkeypatch):
    from qerl.train.noise import measure

    monkeypatch.setattr(measure, "kl_at", lambda batch, asked: lambda level: 0.0 if level < 0.01 else 1e-3)
    _, warnings, _, _ = calibrated(folder, 1e-4, "aqn.magnitude=kl")
    assert len(warnings) == 1
    assert "stage 1 asks for a KL of 0.0001" in warnings[0]
