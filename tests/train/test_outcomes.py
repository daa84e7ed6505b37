"""Correct, wrong, unparsable, truncated and unscorable answers stay apart from the score to the loss and the metrics."""

import dataclasses

import pytest
from builders import group

from qerl.config.schema import OverlongConfig, RewardConfig
from qerl.objective.advantage import advantages
from qerl.objective.batch import make_samples
from qerl.objective.filtering import is_informative
from qerl.records import Outcome
from qerl.reward.compose import Rewarder
from qerl.train.step_metrics import group_metrics, sample_metrics

C, W, T, P, N = Outcome.CORRECT, Outcome.WRONG, Outcome.TRUNCATED, Outcome.UNPARSABLE, Outcome.UNSCORABLE


def values_of(groups):
    return advantages([[score.reward for score in made.scores] for made in groups])


def test_every_outcome_and_group_kind_has_a_share_of_its_own():
    groups = [group([C, W, P, T, N]), group([T, T, N, T, T]), group([N] * 5), group([W, P, W, T, W]), group([C] * 5)]
    metrics = group_metrics(groups)
    counted = {o: metrics[f"outcomes/{o.value}"] * 25 for o in Outcome}
    assert counted == pytest.approx({C: 6, W: 4, P: 2, T: 6, N: 7})
    kinds = ("mixed", "all_truncated", "unscorable", "all_wrong", "all_correct")
    assert [metrics[f"groups/{kind}"] for kind in kinds] == [0.2] * 5
    assert metrics["accuracy"] == pytest.approx(6 / 18), "over scored answers alone"
    assert metrics["frac_reward_zero_std"] == 3 / 4, "the group without a score has no deviation"


def test_a_truncated_group_has_no_advantage_and_still_counts_its_tokens():
    groups = [group([T, T]), group([C, W])]
    values = values_of(groups)
    assert values[0] == [0.0, 0.0] and values[1][0] > 0
    metrics = sample_metrics(make_samples(groups, values, mask_truncated=False))
    assert (metrics["tokens/loss"], metrics["tokens/effective"]) == (8, 4)
    metrics = sample_metrics(make_samples(groups, values, mask_truncated=True))
    assert (metrics["tokens/loss"], metrics["tokens/effective"]) == (4, 4)


def test_masked_truncated_answers_stay_in_the_statistics_of_their_group():
    groups = [group([C, T, W])]
    assert values_of(groups) == values_of([group([C, W, W])])
    (samples,) = make_samples(groups, values_of(groups), mask_truncated=True)
    assert [sample.in_loss for sample in samples] == [True, False, True]


def test_unscorable_answers_leave_statistics_loss_and_token_count():
    groups = [group([C, N, W])]
    (values,) = values_of(groups)
    assert values[1] == 0.0 and values[0] == pytest.approx(-values[2])
    metrics = sample_metrics(make_samples(groups, [values], mask_truncated=False))
    assert metrics["tokens/loss"] == 4


@pytest.mark.parametrize(
    ("outcomes", "plain", "masked"),
    [
        ([C, W], True, True),
        ([C, T], True, True),
        ([C, N], False, False),
        ([T, T], False, False),
        ([N, N], False, False),
        ([W, P], False, False),
        ([C, C], False, False),
    ],
)
def test_which_groups_teach(outcomes, plain, masked):
    made = group(outcomes)
    assert is_informative(made, mask_truncated=False) == plain
    assert is_informative(made, mask_truncated=True) == masked


def test_a_cut_answer_that_is_right_teaches_unless_all_that_is_scored_was_cut():
    made = group([T, T, N])
    cut = dataclasses.replace(made, scores=(dataclasses.replace(made.scores[0], outcome=C), *made.scores[1:]))
    assert is_informative(cut, mask_truncated=False)
    assert not is_informative(cut, mask_truncated=True)


def test_overlong_punishment_moves_the_reward_and_not_the_outcome():
    """Two right answers, one of them long: the shaped rewards differ, the group stays all correct and teaches nothing."""
    made = group([C, C], [2, 9])
    texts = [dataclasses.replace(completion, text="\\boxed{1}") for completion in made.completions]
    shaped = RewardConfig(overlong=OverlongConfig(enabled=True, buffer_tokens=4, penalty=0.5))
    with Rewarder(shaped, 10) as rewarder:
        scores = tuple(rewarder.score(texts))
    assert [score.outcome for score in scores] == [C, C]
    assert [score.reward for score in scores] == pytest.approx([1.0, 1.0 - 0.5 * 3 / 4])
    scored = dataclasses.replace(made, scores=scores)
    assert values_of([scored])[0][0] > 0, "without dynamic sampling the difference is learned from"
    assert not is_informative(scored, mask_truncated=False)
    metrics = group_metrics([scored])
    assert (metrics["accuracy"], metrics["groups/all_correct"]) == (1.0, 1.0)
    assert metrics["rewards/overlong/mean"] < 0
