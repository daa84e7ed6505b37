"""The controller on toy response curves: where it settles, what holds it back, and that it resumes exactly."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl.config.aqn import AqnControllerConfig
from qerl.config.load import load_config
from qerl.errors import ConfigError
from qerl.train.noise.controller import Controller, Guard, Signals

CONFIG = AqnControllerConfig(enabled=True)


def signals(informative=0.5, entropy=1.0, invalid=0.0):
    return Signals(informative=informative, entropy=entropy, invalid=invalid)


def run(controller, respond, steps, scheduled=0.01, first_stage=1):
    """Sigma of each rollout; ``respond`` gives the signals at a sigma."""
    found = []
    for _ in range(steps):
        sigma = controller.sigma(scheduled, first_stage)
        found.append(sigma)
        controller.observe(respond(sigma), sigma=sigma, stage=first_stage)
    return found


def rising(sigma):
    """More noise, more mixed groups: half of them at sigma 0.03."""
    return signals(informative=1 / (1 + (0.03 / sigma)))


@pytest.mark.parametrize("start", [0.001, 0.01, 0.09])
def test_sigma_settles_where_the_groups_are_inside_the_band(start):
    found = run(Controller(CONFIG), rising, 100, scheduled=start)
    assert found[0] == start
    assert abs(rising(found[-1]).informative - 0.5) <= 0.1 + 0.02
    assert found[-1] == pytest.approx(found[-10], rel=0.02)


def test_a_band_of_no_width_is_met_exactly():
    config = CONFIG.model_copy(update={"informative_band": 0.0, "smoothing": 1.0})
    assert run(Controller(config), rising, 200)[-1] == pytest.approx(0.03, rel=1e-3)


def test_inside_the_band_sigma_rests():
    assert set(run(Controller(CONFIG), lambda sigma: signals(0.55), 10)) == {0.01}


def test_one_step_by_hand():
    controller = Controller(CONFIG)
    controller.observe(signals(informative=0.2), sigma=0.01, stage=1)
    # 0.2 lies 0.2 below the band's edge 0.4; the first rollout has no error before it: only Ki acts.
    assert controller.sigma(0.5, 1) == pytest.approx(0.01 * math.exp(0.3 * 0.2))
    controller.observe(signals(informative=0.6), sigma=0.01, stage=1)
    # Smoothed (0.2 + 0.6) / 2 = 0.4: the error falls from 0.2 to 0.
    assert controller.sigma(0.5, 1) == pytest.approx(0.01 * math.exp(0.5 * -0.2))


def test_nothing_winds_up_at_a_limit():
    config = CONFIG.model_copy(update={"smoothing": 1.0})
    controller = Controller(config)
    found = run(controller, lambda sigma: signals(informative=0.0), 300)
    assert found[-1] == found[-100] == config.sigma_max
    assert run(controller, lambda sigma: signals(informative=1.0), 2)[-1] < config.sigma_max, (
        "it leaves the limit at once"
    )
    found = run(controller, lambda sigma: signals(informative=1.0), 300)
    assert found[-1] == config.sigma_min
    assert run(controller, lambda sigma: signals(informative=0.0), 2)[-1] > config.sigma_min


@pytest.mark.parametrize(
    ("seen", "guard", "falls"),
    [
        (signals(informative=0.0, invalid=0.5), Guard.INVALID, True),
        (signals(informative=0.0, entropy=3.0), Guard.ENTROPY_HIGH, True),
        (signals(informative=1.0, entropy=0.1), Guard.ENTROPY_LOW, False),
        (signals(informative=0.0, entropy=0.1, invalid=0.9), Guard.INVALID, True),
    ],
)
def test_guards_stand_above_the_informative_groups(seen, guard, falls):
    controller = Controller(CONFIG)
    controller.observe(signals(entropy=1.0), sigma=0.0, stage=0)
    sigma = run(controller, lambda _: seen, 3)[-1]
    assert (sigma < 0.01) == falls
    assert controller.metrics()["aqn/controller/guard"] == guard


def test_invalid_answers_are_held_below_their_limit():
    """Noise makes answers invalid before half of the groups are mixed: the limit decides."""

    def respond(sigma):
        return signals(informative=min(sigma * 4, 1.0), invalid=min(sigma * 10, 1.0))

    found = run(Controller(CONFIG), respond, 200)
    assert respond(found[-1]).invalid == pytest.approx(CONFIG.invalid_max, abs=0.08)


def test_the_entropy_reference_is_the_mean_of_stage_zero_which_stays_silent():
    controller = Controller(CONFIG)
    for entropy in (0.5, 1.5, 1.0):
        assert controller.sigma(0.0, 0) == 0.0
        controller.observe(signals(entropy=entropy), sigma=0.0, stage=0)
    assert controller.metrics() == {"aqn/controller/active": 0.0}
    controller.observe(signals(entropy=1.7), sigma=0.01, stage=1)
    assert controller.metrics()["aqn/controller/entropy_ratio"] == pytest.approx(1.7)


@given(st.lists(st.tuples(*[st.floats(0, 1)] * 3), min_size=1, max_size=30), st.floats(1.05, 3.0))
def test_sigma_never_leaves_its_limits_or_jumps(seen, max_change):
    config = CONFIG.model_copy(update={"max_change": max_change, "gain_proportional": 5.0, "gain_integral": 5.0})
    controller, before = Controller(config), 0.01
    for informative, entropy, invalid in seen:
        controller.observe(signals(informative, entropy, invalid), sigma=before, stage=1)
        sigma = controller.sigma(0.01, 1)
        assert config.sigma_min <= sigma <= config.sigma_max
        assert before / max_change * (1 - 1e-9) <= sigma <= before * max_change * (1 + 1e-9)
        before = sigma


def test_resuming_from_saved_values_changes_nothing():
    def respond(sigma):
        return signals(informative=rising(sigma).informative, entropy=1 + sigma, invalid=sigma)

    whole = run(Controller(CONFIG), respond, 24)
    first = Controller(CONFIG)
    parts = run(first, respond, 12)
    second = Controller(CONFIG, json.loads(json.dumps(first.state_dict())))
    assert parts + run(second, respond, 12) == whole
    assert second.state_dict() != first.state_dict()


def test_without_signals_the_schedule_takes_over_until_there_are_some_again():
    controller = Controller(CONFIG)
    moved = run(controller, lambda sigma: signals(informative=0.0), 5)[-1]
    assert moved != 0.01
    controller.observe(None, sigma=moved, stage=1)
    assert not controller.active
    assert controller.sigma(0.004, 1) == 0.004
    controller.observe(signals(informative=0.0), sigma=0.004, stage=1)
    assert 0.004 < controller.sigma(0.004, 1) < 0.005


METRICS = {
    "groups/mixed": 0.25,
    "groups/unscorable": 0.0,
    "entropy": 0.7,
    "outcomes/unparsable": 0.1,
    "outcomes/truncated": 0.05,
}


def test_signals_are_read_from_the_metrics_of_a_step():
    found, missing = Signals.from_metrics(METRICS)
    assert missing == []
    assert (found.informative, found.entropy, found.invalid) == (0.25, 0.7, pytest.approx(0.15))


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"entropy": math.nan}, ["entropy"]),
        ({"entropy": None, "outcomes/truncated": None}, ["entropy", "outcomes/truncated"]),
        ({"groups/unscorable": 1.0}, ["groups/mixed"]),
    ],
)
def test_missing_signals_are_named(change, missing):
    metrics = {key: value for key, value in {**METRICS, **change}.items() if value is not None}
    assert Signals.from_metrics(metrics) == (None, missing)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["aqn.controller.enabled=true", "aqn.magnitude=kl"], "so does aqn.magnitude=kl"),
        (["aqn.controller.enabled=true", "aqn.mode=accumulate"], "cannot lower a sum"),
        (["aqn.controller.enabled=true", "aqn.sigma_start=0.5"], "lies outside"),
        (["aqn.controller.sigma_min=0.2"], "must rise"),
        (["aqn.controller.entropy_band=[2.0, 1.0]"], "must rise"),
        (
            ["aqn.controller.enabled=true", "aqn.controller.gain_integral=0", "aqn.controller.gain_proportional=0"],
            "never",
        ),
        (["aqn.mode=accumulate", "aqn.scope=response"], "no draw outlives its rollout"),
        (["aqn.mode=accumulate", "aqn.magnitude=relative"], "could not reproduce it"),
        (["aqn.match_budget=true"], "needs aqn.sharing=independent"),
        (["aqn.match_budget=true", "aqn.sharing=independent", "aqn.magnitude=kl"], "same KL already"),
        (["aqn.sharing=independent", "aqn.sites=[final_norm]"], "has no effect"),
        (["aqn.sensitivity_cap=2.0"], "has no effect with aqn.magnitude=absolute"),
        (["aqn.sites=[attn_norm, attn_norm]"], "twice"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, settings)
