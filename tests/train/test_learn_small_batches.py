"""Rollouts whose batch was cut short: fewer groups than updates, and none at all."""

import pytest
import torch
from builders import completion, score
from tiny_models import load_tiny, write_tiny

from qerl.config.load import load_config
from qerl.objective.advantage import advantages
from qerl.objective.batch import make_samples
from qerl.records import Group, Outcome
from qerl.train import learn as learn_module
from qerl.train.learn import learn
from qerl.train.optimizer import make_optimizer
from qerl.train.timing import StageTimer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path)
    return path


def learn_from(folder, groups, *settings):
    config = load_config(None, ["optim.updates_per_rollout=2", "lora.rank=2", *settings])
    model = load_tiny(folder, lora=config.lora, seed=0, keep_reference_norms=config.objective.kl_coef > 0)
    before = {name: parameter.detach().clone() for name, parameter in model.trainable_parameters().items()}
    values = advantages([[s.reward for s in group.scores] for group in groups])
    samples = make_samples(groups, values, mask_truncated=False)
    optimizer = make_optimizer(model.trainable_parameters(), config.optim)
    stats = learn(config, model, optimizer, samples, noise=None, completed=0, timer=StageTimer())
    moved = any(not torch.equal(before[name], p) for name, p in model.trainable_parameters().items())
    return stats.metrics(), moved


def test_room_is_made_for_the_largest_pass_with_a_gradient_alone(folder):
    """A group without a difference is scored and keeps nothing, however long; a second step of the same sizes finds its room made."""
    config = load_config(None, ["optim.updates_per_rollout=1", "lora.rank=2"])
    model = load_tiny(folder, lora=config.lora, seed=0)
    optimizer, timer = make_optimizer(model.trainable_parameters(), config.optim), StageTimer()
    for step, (groups, largest, larger) in enumerate(
        [
            ([group_of([Outcome.WRONG] * 3)], 0, 0),
            ([group_of([Outcome.CORRECT, Outcome.WRONG])], 4 + 5, 1),
            ([group_of([Outcome.CORRECT, Outcome.WRONG])], 4 + 5, 1),
            ([group_of([Outcome.CORRECT, Outcome.WRONG, Outcome.WRONG])], 4 + 5 + 6, 2),
            ([group_of([Outcome.WRONG, Outcome.CORRECT])], 4 + 5 + 6, 2),
        ]
    ):
        values = advantages([[s.reward for s in group.scores] for group in groups])
        samples = make_samples(groups, values, mask_truncated=False)
        learn(config, model, optimizer, samples, noise=None, completed=step, timer=timer)
        assert (timer.peaks.largest_pass, timer.peaks.larger_passes) == (largest, larger)


def group_of(outcomes):
    """Answers of 1, 2, 3 … tokens, at log-probs near those of a random model with 96 words."""
    completions = tuple(completion(3, [-4.6, -4.2, -4.9][: i + 1], key=i) for i in range(len(outcomes)))
    return Group(prompt=completions[0].prompt, completions=completions, scores=tuple(map(score, outcomes)))


def test_one_group_for_two_updates_makes_one_update_that_is_on_policy(folder):
    metrics, moved = learn_from(folder, [group_of([Outcome.CORRECT, Outcome.WRONG])])
    assert (metrics["updates"], metrics["skipped_updates"]) == (1, 1) and moved
    assert metrics["entropy"] > 0 and "mismatch_kl" in metrics, "the sampling parameters are still in force"


@pytest.mark.parametrize(
    ("settings", "scored"),
    [
        (("objective.denominator=behavior",), []),
        (("objective.denominator=recomputed",), [False]),
        (("objective.denominator=behavior", "objective.kl_coef=0.1"), [True]),
        (("objective.denominator=recomputed", "objective.kl_coef=0.1"), [False, True]),
    ],
)
def test_what_the_engine_recorded_is_not_scored_again_nor_a_reference_without_a_kl_term(
    folder, monkeypatch, settings, scored
):
    """Beside the pass that learns, a micro-batch has one of the sampling policy and one of the reference only where they are asked for."""
    passes, found = [], learn_module.policy_logprobs

    def counted(*arguments, reference=False, **keywords):
        passes.append((torch.is_grad_enabled(), reference))
        return found(*arguments, reference=reference, **keywords)

    monkeypatch.setattr(learn_module, "policy_logprobs", counted)
    learn_from(folder, [group_of([Outcome.CORRECT, Outcome.WRONG])] * 2, *settings)
    assert passes.count((True, False)) == 2 and len(passes) == 2 * (1 + len(scored))
    assert {reference for gradient, reference in passes if not gradient} == set(scored)


@pytest.mark.parametrize("settings", [(), ("objective.denominator=recomputed",), ("objective.type=gspo",)])
def test_no_group_makes_no_update(folder, settings):
    metrics, moved = learn_from(folder, [], *settings)
    assert (metrics["updates"], metrics["skipped_updates"], metrics["loss"]) == (0, 2, 0.0) and not moved


def test_groups_outside_the_loss_make_no_update(folder):
    metrics, moved = learn_from(folder, [group_of([Outcome.UNSCORABLE] * 2)] * 2)
    assert (metrics["updates"], metrics["skipped_updates"]) == (0, 2) and not moved


@pytest.mark.parametrize("kind", ["grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo"])
@pytest.mark.parametrize("weights", [(), ("objective.is_level=sequence", "objective.is_mode=mask")])
def test_every_objective_is_the_same_under_any_packing(folder, kind, weights):
    """Sequences are whole in every micro-batch, so sequence ratios and weights do not depend on the cut either."""
    groups = [group_of([Outcome.CORRECT, Outcome.WRONG, Outcome.WRONG])] * 3
    settings = [f"objective.type={kind}", "objective.denominator=recomputed", *weights]
    settings += ["rollout.max_prompt_tokens=3", "rollout.max_new_tokens=3", "optim.updates_per_rollout=1"]
    small, _ = learn_from(folder, groups, *settings, "train.token_budget=7", "rollout.prompts_per_step=3")
    large, _ = learn_from(folder, groups, *settings, "train.token_budget=99", "rollout.prompts_per_step=3")
    assert small["grad_norm"] > 1e-3
    assert small == pytest.approx(large, rel=1e-5, abs=1e-7)
