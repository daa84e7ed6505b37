import dataclasses

import pytest
from scripted_draws import MIXED, Source

from qerl.config.load import load_config
from qerl.model.aqn import NoiseState
from qerl.records import SamplingSpec
from qerl.train.on_policy import count_step, differences, sampling_facts, training_facts, verdict

NOISE = NoiseState(seed=1, rollout=4, stage=1, sigma=0.05, sites=("attn_norm",))
KERNELS = {"attention": "reference", "fp4_linear": "reference"}


def rollout_of(noise=NOISE, **changed):
    made, _ = Source(MIXED)(1, 0)
    made = dataclasses.replace(made, kernels=KERNELS, policy=dataclasses.replace(made.policy, noise=noise))
    return dataclasses.replace(made, **changed)


def found(rollout, *settings, norm_hash="n", kernels=KERNELS, updates=1):
    trained = training_facts(load_config(None, list(settings)), rollout, norm_hash=norm_hash, kernels=kernels)
    return differences(sampling_facts(rollout), trained, updates=updates)


def test_replayed_noise_and_one_update_are_on_policy():
    assert found(rollout_of()) == {}
    assert found(rollout_of(noise=None)) == {}


def test_a_ratio_of_one_by_construction_does_not_make_absent_noise_on_policy():
    reasons = found(rollout_of(), "objective.noise=absent")
    assert reasons == {"noise_key": "sampled with noise of rollout 4, level 0.05, trained with no noise"}
    silent = dataclasses.replace(NOISE, sigma=0.0)
    assert found(rollout_of(noise=silent), "objective.noise=absent") == {}


@pytest.mark.parametrize(
    ("reason", "rollout", "settings"),
    [
        ("norm_hash", rollout_of(), {"norm_hash": "other"}),
        ("kernels", rollout_of(), {"kernels": {**KERNELS, "attention": "triton"}}),
        ("cache_state", rollout_of(cache_state="prefix of version 3"), {}),
        ("sampler_transform", rollout_of(sampling=SamplingSpec(top_p=0.9)), {}),
        ("sampler_transform", rollout_of(sampling=SamplingSpec(temperature=0.7)), {}),
        ("adapter_version", rollout_of(), {"updates": 4}),
    ],
)
def test_each_reason_is_named(reason, rollout, settings):
    reasons = found(rollout, **settings)
    assert list(reasons) == [reason]
    if reason == "sampler_transform" and rollout.sampling.top_p < 1:
        assert "top_p=0.9" in reasons[reason] and "full support" in reasons[reason]


def test_facts_of_two_policies_differ_where_the_policies_do():
    first, second = sampling_facts(rollout_of()), sampling_facts(rollout_of(dataclasses.replace(NOISE, rollout=5)))
    assert list(differences(first, second)) == ["noise_key"]
    made = rollout_of()
    newer = dataclasses.replace(made, policy=dataclasses.replace(made.policy, policy_version=2, base_hash="x"))
    assert list(differences(first, sampling_facts(newer))) == ["adapter_version", "base_weights"]


def test_a_run_is_on_policy_only_when_every_step_is():
    counted = {}
    for step in (1, 2, 3):
        count_step(counted, {"noise_key": f"detail {step}"} if step > 1 else {}, step)
    assert counted == {"noise_key": {"steps": 2, "first_step": 2, "detail": "detail 2"}}
    assert verdict(counted, 1, 3) == {"on_policy": False, "on_policy_steps": 1, "steps": 3, "reasons": counted}
    assert verdict({}, 3, 3)["on_policy"] and not verdict({}, 0, 0)["on_policy"]
