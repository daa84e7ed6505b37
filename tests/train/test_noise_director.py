"""The noise of a run, rollout by rollout: what is measured once a stage, what is remembered, what a record reproduces."""

import json

import pytest
import torch
from noise_builders import PROMPTS, make_config, make_session
from rollout_builders import write_checkpoint

from qerl.errors import CheckpointError, ConfigError
from qerl.metrics.catalogue import lookup
from qerl.model.aqn import NoiseState
from qerl.model.attention import PackedSequences
from qerl.train.noise import director as director_module
from qerl.train.noise.director import NoiseDirector, load_sum, save_sum

ROLLOUTS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), "qwen2")


def start(folder, *settings):
    config = make_config(*settings)
    session = make_session(folder, config)
    return config, session, NoiseDirector(config, session, PROMPTS)


def step_metrics(rollout):
    """What a step might report: fewer mixed groups at first, more later."""
    return {
        "groups/mixed": 0.1 if rollout < 6 else 0.9,
        "groups/unscorable": 0.0,
        "entropy": 0.5,
        "outcomes/unparsable": 0.0,
        "outcomes/truncated": 0.1,
    }


def play(director, rollouts):
    """States, draws and metrics of some rollouts."""
    found = []
    for rollout in rollouts:
        state, noise = director.begin(rollout=rollout, completed=rollout)
        director.observe(state, step_metrics(rollout))
        values = {} if noise is None else {place: z.clone() for place, z in noise.values.items()}
        found.append((state, values, director.metrics(state, noise)))
    return found


def same(one, other):
    """Equal records, bits and metrics."""
    return all(
        a[0] == b[0]
        and a[2] == b[2]
        and a[1].keys() == b[1].keys()
        and all(torch.equal(a[1][k], b[1][k]) for k in a[1])
        for a, b in zip(one, other, strict=True)
    )


ARMS = {
    "plain": (),
    "kl": ("aqn.magnitude=kl", "aqn.sigma_start=0.02", "aqn.sigma_end=1e-3"),
    "sensitivity": ("aqn.magnitude=sensitivity", "aqn.sites=[attn_norm, final_norm]"),
    "budget": ("aqn.sharing=independent", "aqn.match_budget=true"),
    "accumulate": ("aqn.mode=accumulate",),
    "accumulate_independent": ("aqn.mode=accumulate", "aqn.sharing=independent", "aqn.match_budget=true"),
    "controller": ("aqn.controller.enabled=true",),
    "controller_response": ("aqn.controller.enabled=true", "aqn.scope=response", "aqn.magnitude=relative"),
}


@pytest.mark.parametrize("arm", ARMS)
def test_going_on_from_a_checkpoint_gives_the_same_records_bits_and_metrics(folder, tmp_path, arm):
    whole = play(start(folder, *ARMS[arm])[2], range(ROLLOUTS))
    config, session, first = start(folder, *ARMS[arm])
    parts = play(first, range(5))
    save_sum(tmp_path, first.total)
    saved = json.loads(json.dumps(first.state_dict()))
    session = make_session(folder, config)
    second = NoiseDirector(config, session, PROMPTS, saved, load_sum(tmp_path, config, session))
    assert same(parts + play(second, range(5, ROLLOUTS)), whole)
    assert len({state.sigma for state, _, _ in whole}) > 2


@pytest.mark.parametrize("arm", ARMS)
def test_a_record_alone_reproduces_the_noise(folder, arm):
    _, session, director = start(folder, *ARMS[arm])
    for rollout in range(ROLLOUTS):
        state, noise = director.begin(rollout=rollout, completed=rollout)
        director.observe(state, step_metrics(rollout))
        again = NoiseState.from_dict(json.loads(json.dumps(state.to_dict()))).materialize(session.model)
        if noise is None:
            assert again.places() == ()
            continue
        assert again.places() == noise.places()
        keys = torch.tensor([0, 5])
        for place in noise.places():
            if state.scope == "rollout":
                assert torch.equal(again.values[place], noise.values[place])
            else:
                assert torch.equal(again.draw(place, keys), noise.draw(place, keys))


@pytest.mark.parametrize("arm", ARMS)
def test_metrics_are_in_the_catalogue_and_say_what_was_set(folder, arm):
    config, _, director = start(folder, *ARMS[arm])
    rows = play(director, range(ROLLOUTS))
    for state, _, metrics in rows:
        for key in metrics:
            lookup(key)
        assert metrics["aqn/sigma"] == state.sigma and metrics["aqn/stage"] == state.stage == state.rollout // 2
        # A stage is measured at its first noisy rollout, and only there.
        assert ("aqn/kl" in metrics) == (state.rollout % 2 == 0 and state.stage > 0)
    keys = set().union(*(metrics for *_, metrics in rows))
    assert ("aqn/kl_target" in keys) == (arm == "kl")
    assert ("aqn/displacement" in keys) == arm.startswith("accumulate")
    assert ("aqn/budget_factor" in keys) == config.aqn.match_budget
    assert ("aqn/controller/sigma_schedule" in keys) == config.aqn.controller.enabled
    assert ("aqn/sensitivity_scale/max" in keys) == (arm == "sensitivity")


def test_calibration_happens_once_a_stage_and_not_in_silence(folder, monkeypatch):
    calls = []
    real = director_module.calibrate

    def counting(config, batch, state, complete):
        calls.append(state.stage)
        return real(config, batch, state, complete)

    monkeypatch.setattr(director_module, "calibrate", counting)
    play(start(folder)[2], range(ROLLOUTS))
    assert calls == [1, 2, 3, 4]
    play(start(folder, "aqn.schedule=constant", "aqn.sigma_start=0")[2], range(ROLLOUTS))
    play(start(folder, "aqn.enabled=false")[2], range(ROLLOUTS))
    assert calls == [1, 2, 3, 4]


def test_kl_targets_follow_the_schedule_and_sigma_follows_them(folder):
    rows = play(start(folder, *ARMS["kl"])[2], range(ROLLOUTS))
    targets = [state.kl_target for state, *_ in rows if state.stage]
    assert targets[0] == 0.02 and targets[-1] == 1e-3
    assert targets == sorted(targets, reverse=True)
    measured = [metrics["aqn/kl"] for *_, metrics in rows if "aqn/kl" in metrics]
    assert measured == pytest.approx(targets[::2], rel=0.02)
    assert all(state.sigma != state.kl_target for state, *_ in rows if state.stage)


def test_accumulated_displacement_is_the_root_of_the_sum_of_squares(folder):
    rows = play(start(folder, *ARMS["accumulate"])[2], range(ROLLOUTS))
    total = 0.0
    for state, values, metrics in rows:
        total += state.sigma**2
        assert metrics["aqn/displacement"] == pytest.approx(total**0.5)
        if values:
            drawn = torch.cat(list(values.values()))
            assert drawn.square().mean().sqrt() == pytest.approx(total**0.5, rel=0.3)
    before, after = rows[-2][1], rows[-1][1]
    alone = NoiseState.from_dict({**rows[-1][0].to_dict(), "mode": "replace", "history": []})
    draw = alone.materialize(start(folder)[1].model)
    for place, z in after.items():
        assert torch.equal(z, before[place] + draw.z(*place))


def test_a_sum_of_another_model_or_a_broken_file_is_refused(folder, tmp_path):
    config, session, director = start(folder, *ARMS["accumulate"])
    play(director, range(5))
    save_sum(tmp_path, {place: z[:-1] for place, z in director.total.items()})
    with pytest.raises(CheckpointError, match="does not fit the model"):
        load_sum(tmp_path, config, session)
    (tmp_path / "noise_sum.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"noise_sum\.safetensors"):
        load_sum(tmp_path, config, session)
    assert load_sum(tmp_path, make_config(), session) == {}, "it is not read where noise does not accumulate"


@pytest.mark.parametrize("arm", ["plain", "accumulate", "budget"])
def test_evaluation_noise_is_keyed_apart_and_changes_no_rollout(folder, arm):
    settings = (*ARMS[arm], "eval.noise=true", "eval.temperature=1.0", "eval.samples=2")
    plain = play(start(folder, *settings)[2], range(ROLLOUTS))
    director = start(folder, *settings)[2]
    assert director.evaluation(step=0, completed=0) is None, "stage 0 is silent"
    found = []
    for rollout in range(ROLLOUTS):
        found += play(director, [rollout])
        noise = director.evaluation(step=rollout + 1, completed=rollout + 1)
        if noise is not None:
            assert noise.state.stream == "eval_noise" and noise.state.group_size == 2 and noise.state.mode == "replace"
    assert [row[0] for row in found] == [row[0] for row in plain]
    assert noise.state.amplitude >= found[-1][0].displacement * 0.99
    assert not torch.equal(next(iter(noise.values.values())), next(iter(found[-1][1].values())))


def test_without_signals_the_controller_warns_and_the_schedule_goes_on(folder):
    _, _, director = start(folder, *ARMS["controller"])
    plain = play(start(folder)[2], range(ROLLOUTS))
    play(director, range(5))
    state, noise = director.begin(rollout=5, completed=5)
    assert state.sigma != plain[5][0].sigma
    director.observe(state, {**step_metrics(5), "entropy": float("nan")})
    (warning,) = director.take_warnings()
    assert "no entropy" in warning and director.take_warnings() == []
    assert director.metrics(state, noise)["aqn/controller/active"] == 0.0
    assert director.begin(rollout=6, completed=6)[0].sigma == plain[6][0].sigma
    found = director.metrics(*director.begin(rollout=6, completed=6))
    assert found["aqn/controller/sigma_schedule"] == plain[6][0].sigma


def test_a_site_that_the_model_lacks_is_refused_before_the_first_rollout(folder):
    with pytest.raises(ConfigError, match=r"qk_norm \(qwen2\)"):
        start(folder, "aqn.sites=[attn_norm, qk_norm]")
    start(folder, "aqn.sites=[attn_norm, qk_norm]", "aqn.enabled=false")


@pytest.mark.parametrize("scope", ["rollout", "group", "response", "token"])
def test_norms_that_train_between_mini_batches_do_not_move_the_noise(folder, scope):
    _, session, director = start(folder, "aqn.magnitude=relative", f"aqn.scope={scope}")
    _, noise = director.begin(rollout=2, completed=2)
    context = PackedSequences(
        torch.tensor([0, 3, 7]), sample_keys_S=torch.tensor([0, 4]), prompt_lengths_S=torch.tensor([1, 2])
    )
    before = [noise.for_pass(context).z(*place).clone() for place in noise.places()]
    with torch.no_grad():
        for place in noise.places():
            session.model.norm_weight(*place).mul_(3.0)
    after = [noise.for_pass(context).z(*place) for place in noise.places()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
