import pytest
import torch

from qerl.config.load import load_config
from qerl.objective.importance import WeightRule, importance_weights

BEHAVIOR = torch.tensor([0.2, 0.5, 0.4, 0.4, 0.1]).log()
OLD = torch.tensor([0.6, 0.25, 0.4, 0.6, 0.05]).log()
"""Token weights 3, .5, 1, 1.5, .5; sequences of 2, 1 and 2 tokens have 1.5, 1 and .75."""
SEQUENCE, LENGTHS = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([2, 1, 2])


def weigh(**rule):
    return importance_weights(OLD, BEHAVIOR, SEQUENCE, LENGTHS, WeightRule(**rule))


@pytest.mark.parametrize(
    ("level", "mode", "floor", "cap", "weights", "affected"),
    [
        ("token", "truncate", None, 2.0, [2, 0.5, 1, 1.5, 0.5], [1, 0, 0, 0, 0]),
        ("token", "truncate", 0.8, 2.0, [2, 0.8, 1, 1.5, 0.8], [1, 1, 0, 0, 1]),
        ("token", "mask", 0.8, 2.0, [0, 0, 1, 1.5, 0], [1, 1, 0, 0, 1]),
        ("token", "truncate", None, None, [3, 0.5, 1, 1.5, 0.5], [0, 0, 0, 0, 0]),
        ("sequence", "truncate", None, 1.2, [1.2, 1.2, 1, 0.75, 0.75], [1, 0, 0]),
        ("sequence", "truncate", 0.9, None, [1.5, 1.5, 1, 0.9, 0.9], [0, 0, 1]),
        ("sequence", "mask", 0.9, 1.2, [0, 0, 1, 0, 0], [1, 0, 1]),
    ],
)
def test_weights_by_hand(level, mode, floor, cap, weights, affected):
    result = weigh(level=level, mode=mode, floor=floor, cap=cap)
    assert result.weight_N.tolist() == pytest.approx(weights)
    assert result.affected_U.tolist() == [bool(flag) for flag in affected]


def test_weights_carry_no_gradient():
    old = OLD.clone().requires_grad_()
    rule = WeightRule(level="sequence", mode="truncate", floor=None, cap=None)
    assert not importance_weights(old, BEHAVIOR, SEQUENCE, LENGTHS, rule).weight_N.requires_grad


def test_a_sequence_weight_beyond_float32_is_still_truncated():
    """A product over a long answer overflows exp; the cap must hold all the same."""
    rule = WeightRule(level="sequence", mode="truncate", floor=None, cap=2.0)
    lengths = torch.tensor([200])
    result = importance_weights(
        torch.zeros(200), torch.full((200,), -1.0), torch.zeros(200, dtype=torch.long), lengths, rule
    )
    assert result.weight_N.unique().tolist() == [2.0] and result.affected_U.all()


def test_rule_of_a_configuration():
    assert WeightRule.from_config(load_config().objective) is None
    settings = ["denominator=recomputed", "is_cap=unbounded", "is_floor=0.5", "is_level=sequence", "is_mode=mask"]
    rule = WeightRule.from_config(load_config(None, [f"objective.{text}" for text in settings]).objective)
    assert rule == WeightRule(cap=None, floor=0.5, level="sequence", mode="mask")
