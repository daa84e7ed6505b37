"""Activation-aware searches: the error they minimize is the output's error, and they never lose against not searching."""

from __future__ import annotations

import pytest
import torch

from qerl.formats import awq, get_format

FORMATS = ["nvfp4", "mxfp4", "nf4"]


def problem(rows=48, inputs=128, tokens=400, seed=0):
    """A weight and inputs of which some channels are large and some are correlated."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, inputs, generator=generator) * 0.05
    x = torch.randn(tokens, inputs, generator=generator)
    x[:, ::9] *= 12.0
    x[:, 1::9] += 0.7 * x[:, ::9][:, : x[:, 1::9].shape[1]]
    moments = torch.zeros(inputs, inputs)
    for part in x.split(150):
        awq.second_moments(part, moments)
    return weight, x, moments / tokens


def outputs_error(weight, w_hat, x):
    """Mean over tokens of the squared output error, the long way, in float64."""
    return float((x.double() @ (w_hat.double() - weight.double()).T).square().sum(1).mean())


def rounded(fmt, weight, scales):
    return fmt.dequantize(fmt.quantize_with_scales(weight, scales))


def test_moments_of_batches_give_the_output_error_over_all_tokens():
    weight, x, moments = problem()
    w_hat = weight + 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    assert float(awq.output_error(w_hat - weight, moments)) == pytest.approx(outputs_error(weight, w_hat, x), rel=1e-5)
    relative = outputs_error(weight, w_hat, x) / outputs_error(weight, torch.zeros_like(weight), x)
    assert awq.relative_output_error(weight, w_hat, moments) == pytest.approx(relative, rel=1e-5)


def test_bfloat16_inputs_are_not_rounded_again():
    x = torch.randn(300, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    moments = torch.zeros(16, 16)
    awq.second_moments(x, moments)
    torch.testing.assert_close(moments.double(), x.double().T @ x.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_channel_scales_report_the_error_that_they_leave(name):
    weight, x, moments = problem()
    fmt = get_format(name)
    found = awq.search_channel_scales(weight, moments, x.abs().mean(0), fmt)
    scaled = weight * found.scales_I
    w_hat = rounded(fmt, scaled, fmt.block_scales(scaled)) / found.scales_I
    size = outputs_error(weight, torch.zeros_like(weight), x)
    assert found.error == pytest.approx(outputs_error(weight, w_hat, x) / size, rel=1e-4)
    plain = rounded(fmt, weight, fmt.block_scales(weight))
    assert found.plain_error == pytest.approx(outputs_error(weight, plain, x) / size, rel=1e-4)
    assert found.error < found.plain_error, "large channels call for scaling here"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", range(4))
def test_channel_scales_never_lose_against_none(name, seed):
    generator = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(16, 64, generator=generator), torch.randn(100, 64, generator=generator)
    moments = torch.zeros(64, 64)
    awq.second_moments(x, moments)
    found = awq.search_channel_scales(weight, moments / 100, x.abs().mean(0), get_format(name))
    assert found.error <= found.plain_error


def test_channel_scales_follow_magnitudes_and_keep_ties():
    magnitudes = torch.tensor([0.1, 0.4, 0.4, 1.6, 0.0])
    scales = awq.channel_scales(magnitudes, 0.5)
    assert scales[1] == scales[2]
    assert float(scales[3] / scales[0]) == pytest.approx(4.0)
    assert scales[4] == scales[0], "a channel that is never active counts as the least active one"
    assert float(scales.max() * scales.min()) == pytest.approx(1.0)
    assert torch.equal(awq.channel_scales(magnitudes, 0.0), torch.ones(5))
    assert torch.equal(awq.channel_scales(torch.zeros(3), 0.5), torch.ones(3))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("inputs", [128, 104], ids=["whole blocks", "padded or straddling"])
def test_clips_never_lose_in_any_block(name, inputs):
    weight, _, moments = problem(inputs=inputs)
    fmt = get_format(name)
    scales = fmt.block_scales(weight)
    chosen, ratios = awq.search_clips(weight, moments, scales, fmt)
    width = fmt.column_block(inputs)
    for start in range(0, inputs, width):
        part = slice(start, start + width)
        before, after = ((rounded(fmt, weight, s)[:, part] - weight[:, part]).double() for s in (scales, chosen))
        m = moments[part, part].double()
        error_before, error_after = (((d @ m) * d).sum(1) for d in (before, after))
        assert (error_after <= error_before * (1 + 1e-5)).all()
    assert ratios.shape == (weight.shape[0], -(-inputs // width))
    if width == inputs:
        assert chosen is scales, "blocks of NF4 straddle rows here: nothing is searched"
    else:
        assert awq.relative_output_error(
            weight, rounded(fmt, weight, chosen), moments
        ) < 0.9 * awq.relative_output_error(weight, rounded(fmt, weight, scales), moments)


def test_clips_are_the_scales_of_the_stretched_weight():
    weight, _, moments = problem(rows=16, inputs=64)
    fmt = get_format("nvfp4")
    scales = fmt.block_scales(weight, method="mse", segments=(12, 4))
    chosen, ratios = awq.search_clips(weight, moments, scales, fmt)
    again = fmt.block_scales(weight * ratios.repeat_interleave(16, 1), segments=(12, 4), shared=scales)
    assert chosen.segments == (12, 4)
    for key, tensor in chosen.tensors.items():
        assert torch.equal(tensor.float(), again.tensors[key].float()), key
    assert torch.equal(chosen.tensors["global_scale"], scales.tensors["global_scale"])


def test_parts_of_rows_do_not_change_the_result(monkeypatch):
    weight, x, moments = problem(rows=200)
    for name in FORMATS:
        fmt = get_format(name)
        results = []
        for elements in (1 << 22, 1):
            monkeypatch.setitem(awq.PART_ELEMENTS, "cpu", elements)
            found = awq.search_channel_scales(weight, moments, x.abs().mean(0), fmt)
            _, ratios = awq.search_clips(weight, moments, fmt.block_scales(weight), fmt)
            results.append((found.exponent, ratios))
        assert results[0][0] == results[1][0]
        assert torch.equal(results[0][1], results[1][1])
