import math
from itertools import pairwise

import pytest
import torch

from qerl.config.schema import OptimConfig
from qerl.train.optimizer import apply_update, learning_rate, make_optimizer


def rates(planned, **settings):
    config = OptimConfig(lr=1.0, **settings)
    return [learning_rate(u, planned, config) for u in range(planned)]


def test_warm_up_is_linear_and_spends_no_update_at_zero():
    assert rates(100, warmup_ratio=0.05)[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_cosine_by_hand():
    values = rates(14, warmup_ratio=2 / 14)
    assert values[2] == 1.0
    assert values[8] == pytest.approx(0.5)
    assert values[-1] == pytest.approx(0.5 * (1 + math.cos(math.pi * 11 / 12)))
    assert all(a >= b for a, b in pairwise(values[2:]))


def test_constant_stays_at_the_peak_after_warm_up():
    assert rates(10, warmup_ratio=0.2, schedule="constant") == pytest.approx([0.5] + [1.0] * 9)


def parameters():
    matrix = torch.nn.Parameter(torch.ones(2, 2))
    scale = torch.nn.Parameter(torch.ones(3))
    return {"matrix": matrix, "scale": scale}


def test_norm_scales_are_not_decayed():
    params = parameters()
    optimizer = make_optimizer(params, OptimConfig(lr=0.1, weight_decay=0.5))
    for parameter in params.values():
        parameter.grad = torch.zeros_like(parameter)
    apply_update(optimizer, 0.1, 1.0)
    assert params["matrix"].eq(0.95).all()
    assert params["scale"].eq(1.0).all()


def test_first_update_moves_by_the_rate_it_is_given():
    params = parameters()
    optimizer = make_optimizer(params, OptimConfig(lr=1.0, weight_decay=0.0))
    for parameter in params.values():
        parameter.grad = torch.full_like(parameter, 3.0)
    norm = apply_update(optimizer, 0.01, 1e9)
    assert norm == pytest.approx(math.sqrt(9 * 7))
    assert params["scale"].tolist() == pytest.approx([0.99] * 3, abs=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_gradient_that_is_not_finite_changes_no_parameter(value):
    """1e30 is finite, and its square is not."""
    params = parameters()
    optimizer = make_optimizer(params, OptimConfig())
    params["matrix"].grad = torch.full((2, 2), value)
    params["scale"].grad = torch.ones(3)
    assert not math.isfinite(apply_update(optimizer, 0.1, 1.0))
    assert not list(optimizer.state_tensors())
    assert params["matrix"].eq(1).all() and params["scale"].eq(1).all()
