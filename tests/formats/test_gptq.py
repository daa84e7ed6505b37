"""Error feedback against the algorithm as it is derived: eliminate one column after the other, in float64."""

from __future__ import annotations

import pytest
import torch

from qerl.errors import FormatError
from qerl.formats import awq, get_format, gptq

FORMATS = ["nvfp4", "mxfp4", "nf4"]


def problem(rows=24, inputs=192, tokens=600, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(inputs, inputs, generator=generator) / inputs**0.5
    x = torch.randn(tokens, inputs, generator=generator) @ (mix + 0.3 * torch.eye(inputs))
    weight = 0.05 * torch.randn(rows, inputs, generator=generator)
    return weight, x.T @ x / tokens


def naive(weight, moments, steps, fmt, damping):
    """Optimal brain surgeon, column by column: the inverse is updated by eliminating the column that was rounded."""
    order = torch.argsort(moments.diagonal(), descending=True, stable=True)
    w = weight.double()[:, order].clone()
    h = moments.double()[order][:, order]
    inverse = torch.linalg.inv(h + damping * h.diagonal().mean() * torch.eye(len(order), dtype=torch.float64))
    result = torch.zeros_like(w)
    for j in range(w.shape[1]):
        result[:, j] = fmt.snap(w[:, j].float(), steps[:, order[j]]).double()
        error = (w[:, j] - result[:, j]) / inverse[j, j]
        w -= error[:, None] * inverse[j]
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    back = torch.empty_like(result)
    back[:, order] = result
    return back


@pytest.mark.parametrize("name", FORMATS)
def test_it_is_the_naive_algorithm(name):
    weight, moments = problem()
    fmt = get_format(name)
    scales = fmt.block_scales(weight, method="mse")
    ours = gptq.compensate(weight, gptq.feedback_factor(moments), scales, fmt)
    theirs = naive(weight, moments, fmt.steps(scales), fmt, gptq.DAMPING)
    # A tie that falls the other way in float32 changes the rest of its row.
    same_rows = (ours.double() == theirs).all(1).float().mean()
    assert same_rows >= 0.9
    assert (ours.double() == theirs).float().mean() > 0.97


@pytest.mark.parametrize("name", FORMATS)
def test_it_leaves_less_output_error_than_rounding(name):
    weight, moments = problem()
    fmt = get_format(name)
    scales = fmt.block_scales(weight)
    plain = fmt.snap(weight, fmt.steps(scales))
    ours = gptq.compensate(weight, gptq.feedback_factor(moments), scales, fmt)
    before, after = (awq.relative_output_error(weight, w, moments) for w in (plain, ours))
    assert after < 0.7 * before
    assert (ours - weight).norm() > (plain - weight).norm(), "paid for by a larger error of the weights themselves"


@pytest.mark.parametrize("name", FORMATS)
def test_its_values_are_stored_exactly(name):
    weight, moments = problem(inputs=128)
    fmt = get_format(name)
    scales = fmt.block_scales(weight, segments=(16, 8))
    ours = gptq.compensate(weight, gptq.feedback_factor(moments), scales, fmt)
    assert torch.equal(fmt.dequantize(fmt.quantize_with_scales(ours, scales)), ours)


def test_uncorrelated_inputs_leave_nothing_to_compensate():
    weight, _ = problem(inputs=64)
    fmt = get_format("nvfp4")
    scales = fmt.block_scales(weight)
    ours = gptq.compensate(weight, gptq.feedback_factor(torch.diag(torch.rand(64) + 0.5)), scales, fmt)
    assert torch.equal(ours, fmt.snap(weight, fmt.steps(scales)))


def test_the_order_is_by_falling_moments_and_columns_go_back_to_their_places():
    _, moments = problem(inputs=64)
    upper, order, damping = gptq.feedback_factor(moments)
    assert (moments.diagonal()[order].diff() <= 0).all()
    damped = moments[order][:, order].double() + damping * moments.diagonal().mean() * torch.eye(64)
    torch.testing.assert_close((upper.double().T @ upper.double()) @ damped, torch.eye(64).double(), atol=1e-3, rtol=0)


def test_the_block_of_columns_does_not_matter(monkeypatch):
    weight, moments = problem()
    fmt = get_format("nvfp4")
    scales = fmt.block_scales(weight)
    factor = gptq.feedback_factor(moments)
    one = gptq.compensate(weight, factor, scales, fmt)
    monkeypatch.setattr(gptq, "COLUMNS", 48)
    other = gptq.compensate(weight, factor, scales, fmt)
    assert (one == other).float().mean() > 0.99


def test_fewer_tokens_than_inputs_are_damped_harder_until_it_works():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    upper, _, damping = gptq.feedback_factor(x.T @ x, damping=1e-9)
    assert damping > 1e-9
    assert torch.isfinite(upper).all()


def test_moments_of_nothing_are_refused():
    with pytest.raises(FormatError, match=r"cannot be factorized.*more or other calibration text"):
        gptq.feedback_factor(torch.zeros(8, 8))
