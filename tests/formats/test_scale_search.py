"""Searched scales: never worse than the rounded ones on any block, as good as trying everything, and blind to slicing."""

import pytest
import torch
from hard_tensors import CASES, random
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.errors import FormatError
from qerl.formats import FORMAT_NAMES, dequantize, get_format

BLOCKS = {"nvfp4": 16, "mxfp4": 32, "nf4": 64}
SEARCHED = [("nvfp4", "mse"), ("nvfp4", "four_over_six"), ("mxfp4", "mse"), ("nf4", "mse")]


def block_errors(name: str, weight: torch.Tensor, method: str, importance=None) -> torch.Tensor:
    """Squared error of every block, in float64."""
    difference = dequantize(get_format(name).quantize(weight, method=method)).double() - weight.double()
    squares = difference.square() * (1.0 if importance is None else importance.double())
    if name == "nf4":
        squares = squares.view(1, -1)
    return (
        torch.nn.functional.pad(squares, (0, -squares.shape[1] % BLOCKS[name])).unflatten(1, (-1, BLOCKS[name])).sum(-1)
    )


def relative_rms(name: str, weight: torch.Tensor, method: str) -> float:
    packed = get_format(name).quantize(weight, method=method)
    return float((dequantize(packed) - weight).norm() / weight.norm())


def assert_never_worse(better: torch.Tensor, worse: torch.Tensor) -> None:
    """Up to the rounding of the float32 sums that the search compares."""
    assert (better <= worse * (1 + 1e-5) + 1e-74).all()


@pytest.mark.parametrize(("name", "method"), SEARCHED)
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("1e37 tensor",)])
def test_no_block_is_worse_than_rounded_to_nearest(name, method, case):
    weight = CASES[case]().float()
    assert_never_worse(block_errors(name, weight, method), block_errors(name, weight, "rtn"))


@settings(max_examples=40)
@given(
    searched=st.sampled_from(SEARCHED),
    d_out=st.integers(1, 6),
    d_in=st.integers(1, 150),
    exponent=st.integers(-20, 20),
    power=st.integers(1, 7),
    seed=st.integers(0, 2**16),
)
def test_no_block_of_any_shape_is_worse(searched, d_out, d_in, exponent, power, seed):
    name, method = searched
    weight = random(d_out, d_in, seed=seed) ** power * 2.0**exponent
    assert_never_worse(block_errors(name, weight, method), block_errors(name, weight, "rtn"))


@pytest.mark.parametrize(
    ("name", "method", "expected"),
    [
        ("nvfp4", "rtn", 0.0951),
        ("nvfp4", "mse", 0.0812),
        ("nvfp4", "four_over_six", 0.0869),
        ("mxfp4", "rtn", 0.1119),
        ("mxfp4", "mse", 0.1116),
        ("nf4", "rtn", 0.0920),
        ("nf4", "mse", 0.0852),
        ("nf4_dq", "rtn", 0.0921),
        ("nf4_dq", "mse", 0.0853),
        ("fp8", "rtn", 0.0265),
    ],
)
def test_relative_error_on_normal_weights(name, method, expected):
    assert relative_rms(name, random(512, 1024), method) == pytest.approx(expected, abs=4e-4)


def test_nvfp4_search_finds_the_best_of_all_scales():
    weight = random(32, 256, seed=3)
    packed = get_format("nvfp4").quantize(weight, method="mse")
    blocks = weight.view(32, 16, 16)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    errors = []
    for scale in torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double():
        step = scale / packed.tensors["global_scale"].double()
        distances = (blocks.double().abs()[..., None] / step - table.double()).abs().amin(-1)
        errors.append((distances * step).square().sum(-1))
    found = block_errors("nvfp4", weight, "mse")
    assert (found <= torch.stack(errors).amin(0) * (1 + 1e-4)).all()


def test_mxfp4_search_finds_the_best_of_all_exponents():
    weight = random(32, 256, seed=4) ** 3
    found = block_errors("mxfp4", weight, "mse")
    best = torch.full_like(found, torch.inf)
    fmt = get_format("mxfp4")
    scales = fmt.block_scales(weight)
    for exponent in range(110, 140):
        scales.tensors["block_scales"].fill_(exponent)
        difference = dequantize(fmt.quantize_with_scales(weight, scales)).double() - weight.double()
        best = torch.minimum(best, difference.square().unflatten(1, (-1, 32)).sum(-1))
    assert (found <= best * (1 + 1e-5)).all()


def test_the_nvfp4_search_covers_four_over_six():
    for weight in (random(64, 256), random(64, 256) ** 3, CASES["outliers"]()):
        assert_never_worse(block_errors("nvfp4", weight, "mse"), block_errors("nvfp4", weight, "four_over_six"))


def test_four_over_six_maps_each_block_to_one_of_the_two():
    weight = torch.tensor([[4.0, 1.0, 0.0, 0.0] * 4 + [6.0, 5.1, 5.0, 5.0] * 4 + [0.0] * 15 + [2688.0]])
    packed = get_format("nvfp4").quantize(weight, method="four_over_six")
    assert packed.tensors["global_scale"].tolist() == [0.5], "halved, so that the largest block has room"
    # 4, 1, 0 are codes at scale 1; 6, 5, 5 are 4, 3.33, 3.33 at scale 1.5, with errors of .5, and .9, 1, 1 at scale 1.
    assert packed.tensors["block_scales"].float().tolist()[0][:2] == [0.5, 0.75]


@pytest.mark.parametrize("fmt", [get_format(name) for name in ("nvfp4", "mxfp4")], ids=lambda fmt: fmt.name)
def test_importance_moves_the_error_to_where_it_weighs_less(fmt):
    weight, importance = random(64, 256), random(256, seed=1).exp()
    weighted = fmt.block_scales(weight, method="mse", importance_I=importance)
    plain = fmt.block_scales(weight, method="mse")
    errors = [(dequantize(fmt.quantize_with_scales(weight, scales)) - weight).square() for scales in (weighted, plain)]
    in_blocks = [(e * importance).unflatten(1, (-1, fmt.block)).sum(-1) for e in errors]
    assert_never_worse(*in_blocks)
    assert in_blocks[0].sum() < 0.995 * in_blocks[1].sum()
    assert errors[0].sum() > errors[1].sum()


@pytest.mark.parametrize("d_in", [128, 70])
def test_importance_of_nf4_follows_the_inputs_through_straddled_rows(d_in):
    fmt = get_format("nf4")
    weight, importance = random(33, d_in), torch.zeros(d_in)
    importance[3] = 1.0
    scales = fmt.block_scales(weight, method="mse", importance_I=importance)
    errors = (dequantize(fmt.quantize_with_scales(weight, scales)) - weight).square().mean(0)
    plain = (dequantize(fmt.quantize(weight, method="mse")) - weight).square().mean(0)
    assert errors[3] < 0.05 * plain[3]


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "nf4"])
def test_slices_of_a_large_tensor_do_not_show(name):
    weight = random(3, 1 << 17)
    weight[0, 0] = 9.0
    whole = get_format(name).quantize(weight, method="mse")
    alone = get_format(name).quantize(weight[[0, 2]], method="mse")
    assert torch.equal(dequantize(alone), dequantize(whole)[[0, 2]])


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "nf4"])
@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_column_slices_with_a_shared_scale_are_the_whole(name, method):
    fmt = get_format(name)
    weight = random(12, 192)
    whole = fmt.block_scales(weight, method=method)
    width = fmt.column_block(192)
    parts = [
        fmt.block_scales(weight[:, start : start + width], method=method, shared=whole)
        for start in range(0, 192, width)
    ]
    joined = fmt.join_columns(parts)
    assert joined.shape == (12, 192)
    for key, tensor in whole.tensors.items():
        assert torch.equal(joined.tensors[key], tensor), key


def test_nf4_columns_stand_apart_only_where_rows_begin_blocks():
    assert get_format("nf4").column_block(192) == 64
    assert get_format("nf4").column_block(70) == 70
    assert get_format("fp8").column_block(70) == 70
    assert get_format("nvfp4").column_block(8) == 8


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_snap_is_quantizing_and_dequantizing(name, method):
    fmt = get_format(name)
    if method not in fmt.methods:
        with pytest.raises(FormatError, match=f"unknown {name} method.*'mse'"):
            fmt.quantize(random(2, 16), method=method)
        return
    weight = random(24, 100)
    scales = fmt.block_scales(weight, method=method, segments=(20, 4))
    moved = weight + 0.3 * random(24, 100, seed=1)
    values = dequantize(fmt.quantize_with_scales(moved, scales))
    steps = fmt.steps(scales)
    assert steps.shape == weight.shape
    tolerance = {"nf4_dq": 0.02, "fp8": 1e-6}.get(name, 0.0)
    torch.testing.assert_close(fmt.snap(moved, steps), values, rtol=tolerance, atol=0)
    part = slice(33, 50)
    assert torch.equal(fmt.steps(scales, part), steps[:, part])
    torch.testing.assert_close(fmt.snap(moved[:, 40], steps[:, 40]), values[:, 40], rtol=tolerance, atol=0)


def test_a_clipped_weight_has_finer_scales_and_saturates():
    fmt = get_format("nvfp4")
    weight = random(8, 64)
    whole = fmt.block_scales(weight)
    limit = 0.5 * weight.unflatten(1, (-1, 16)).abs().amax(-1).repeat_interleave(16, dim=1)
    clipped = fmt.block_scales(weight.clamp(-limit, limit), shared=whole)
    assert torch.equal(clipped.tensors["global_scale"], whole.tensors["global_scale"])
    values = dequantize(fmt.quantize_with_scales(weight, clipped))
    assert torch.equal(values, dequantize(fmt.quantize_with_scales(weight.clamp(-limit, limit), clipped)))
    assert (values.abs() <= 1.07 * limit).all()
