import math

import pytest
import torch
from builders import completion

from qerl.objective.batch import Sample, pack
from qerl.objective.importance import WeightRule, importance_weights
from qerl.objective.loss import FORMS, SurrogateSettings, surrogate
from qerl.train.learn_stats import LearnStats


def stats_of(trainer, behavior, *, on_policy=True, in_loss=True, rule=None, dual_clip=None):
    sample = Sample(completion=completion(2, behavior), advantage=1.0, in_loss=in_loss)
    (batch,) = pack([sample], 100, torch.device("cpu"))
    logprobs = torch.tensor(trainer)
    result = surrogate(
        logprobs,
        batch.behavior_logprobs_N,
        batch.advantages_S[batch.sequence_N],
        torch.ones_like(logprobs),
        SurrogateSettings(form=FORMS["dapo"], clip_low=0.2, clip_high=0.28, dual_clip=dual_clip),
    )
    importance = rule and importance_weights(
        logprobs, batch.behavior_logprobs_N, batch.sequence_N, batch.answer_lengths_S, rule
    )
    stats = LearnStats()
    stats.add_micro_batch(batch, logprobs, torch.tensor([0.5] * len(trainer)), result, importance, on_policy=on_policy)
    return stats


def test_mismatch_figures_by_hand():
    metrics = stats_of([-1.0, -2.0], [-1.1, -1.7]).metrics()
    weights = [math.exp(0.1), math.exp(-0.3)]
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(0.2)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(0.3)
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(sum(weights) / 2)
    assert metrics["mismatch_kl"] == pytest.approx((weights[0] - 1 - 0.1 + weights[1] - 1 + 0.3) / 2)
    assert metrics["mean_abs_prob_difference"] == pytest.approx(
        (abs(math.exp(-1.0) - math.exp(-1.1)) + abs(math.exp(-2.0) - math.exp(-1.7))) / 2
    )
    assert metrics["effective_sample_size"] == pytest.approx(sum(weights) ** 2 / (2 * sum(w * w for w in weights)))
    assert metrics["entropy"] == 0.5


def test_later_minibatches_do_not_enter_the_mismatch():
    metrics = stats_of([-1.0], [-2.0], on_policy=False).metrics()
    assert "mismatch_kl" not in metrics and "entropy" not in metrics
    assert metrics["ratio/mean"] == pytest.approx(math.e)
    assert metrics["clip_ratio/high_mean"] == 1.0


def test_masked_sequences_do_not_enter_the_loss_figures():
    metrics = stats_of([-1.0], [-2.0], in_loss=False).metrics()
    assert "ratio/mean" not in metrics and "clip_ratio/high_mean" not in metrics
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("level", "mode", "mean", "largest", "affected"),
    [
        ("token", "truncate", (2.0 + 1.0) / 2, 2.0, 0.5),
        ("token", "mask", (0.0 + 1.0) / 2, 1.0, 0.5),
        ("sequence", "truncate", 2.0, 2.0, 1.0),
        ("sequence", "mask", 0.0, 0.0, 1.0),
    ],
)
def test_importance_figures_by_hand(level, mode, mean, largest, affected):
    rule = WeightRule(cap=2.0, floor=None, level=level, mode=mode)
    metrics = stats_of([-1.0, -2.0], [-1.0 - math.log(3), -2.0], rule=rule, on_policy=False).metrics()
    assert metrics["importance_weight/mean"] == pytest.approx(mean)
    assert metrics["importance_weight/max"] == pytest.approx(largest)
    assert metrics["importance_weight/affected"] == pytest.approx(affected)


def test_masked_sequences_do_not_enter_the_importance_figures():
    rule = WeightRule(cap=2.0, floor=None, level="token", mode="truncate")
    assert "importance_weight/mean" not in stats_of([-1.0], [-2.0], in_loss=False, rule=rule).metrics()


def test_dual_clip_share_is_there_when_it_is_on():
    assert "clip_ratio/dual_mean" not in stats_of([-1.0], [-2.0]).metrics()
    assert stats_of([-1.0], [-2.0], dual_clip=1.5).metrics()["clip_ratio/dual_mean"] == 0.0
