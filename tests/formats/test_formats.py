"""The interface that all formats share: sizes, padding, fused groups, stacking, and what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.errors import FormatError
from qerl.formats import FORMAT_NAMES, dequantize, get_format
from qerl.formats.nvfp4 import Nvfp4Format

NVFP4 = get_format("nvfp4")
assert isinstance(NVFP4, Nvfp4Format)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_blocks(name: str, weight: torch.Tensor) -> torch.Tensor:
    """[blocks, elements] of the elements that share a scale."""
    if name.startswith("nf4"):
        weight = weight.reshape(1, -1)
    size = get_format(name).block or weight.shape[1]
    return torch.nn.functional.pad(weight, (0, -weight.shape[1] % size)).reshape(-1, size)


# Largest error over the largest magnitude of a block, rounding to nearest.
BLOCK_BOUNDS = {
    "bf16": 0.0,
    # Half the step from 4 to 6 is 1/6, and E4M3 rounds the scale by 1/16 of it.
    "nvfp4": 1 / 6 * 1.07 + 1 / 15,
    # The largest magnitude is 3.5 to 7 scales and saturates at 6; half the step from 4 to 6 is 1 scale.
    "mxfp4": 1 / 3.5,
    # Half the widest gap, from -1 to -0.696; doubly quantized scales move by up to 1/32 of the largest.
    "nf4": 0.152,
    "fp8": 2**-4,
}
HALF_PRECISION = {torch.float32: 2.0**30, torch.bfloat16: 2.0**30, torch.float16: 2.0**3}


@settings(max_examples=100)
@given(
    name=st.sampled_from(sorted(BLOCK_BOUNDS)),
    d_out=st.integers(1, 9),
    d_in=st.integers(1, 150),
    exponent=st.integers(-30, 30),
    power=st.integers(1, 5),
    rounding=st.sampled_from(["ct", "torchao"]),
    dtype=st.sampled_from(sorted(HALF_PRECISION, key=str)),
    seed=st.integers(0, 2**16),
)
def test_the_error_of_a_block_is_bounded_and_no_sign_turns(name, d_out, d_in, exponent, power, rounding, dtype, seed):
    scale = min(2.0**exponent, HALF_PRECISION[dtype])
    weight = (random(d_out, d_in, seed=seed) ** power * scale).clamp(-6e4, 6e4).to(dtype)
    packed = get_format(name).quantize(weight, rounding=rounding)
    values, weight = dequantize(packed), weight.float()
    assert values.shape == weight.shape
    assert (values * weight >= 0).all()
    # A scale that is subnormal in E4M3 (`ct`), or at torchao's floor, is rounded by more, of the tensor's largest magnitude.
    tensor_floor = weight.abs().amax() * 2.0**-6 / 448 if name == "nvfp4" else 0.0
    largest = in_blocks(name, weight).abs().amax(-1)
    errors = in_blocks(name, values - weight).abs().amax(-1)
    assert (errors <= torch.clamp(largest * BLOCK_BOUNDS[name] * 1.001, min=tensor_floor) + 1e-37).all()


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bytes_of_short_floats_are_those_of_their_float32_values(name, dtype):
    weight = random(6, 100).to(dtype)
    fmt = get_format(name)
    ours, wide = fmt.quantize(weight), fmt.quantize(weight.float())
    assert torch.equal(dequantize(ours), dequantize(wide))


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("rounding", ["ct", "torchao"])
def test_quantizing_what_was_quantized_changes_nothing(name, rounding):
    if name == "nf4_dq":
        pytest.skip("its scales are rounded around their mean, which moves when they are rounded")
    fmt = get_format(name)
    once = fmt.quantize(random(32, 192) * torch.linspace(0.1, 3, 192), rounding=rounding)
    again = fmt.quantize(dequantize(once), rounding=rounding)
    torch.testing.assert_close(dequantize(again), dequantize(once), rtol=3e-7, atol=0)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("rounding", ["ct", "torchao"])
def test_zeros_stay_zeros_whatever_stands_beside_them(name, rounding):
    for weight in (torch.zeros(3, 130), torch.cat([torch.zeros(3, 130), random(3, 130) * 1e4], dim=1)):
        values = dequantize(get_format(name).quantize(weight, rounding=rounding))
        assert not values[:, :130].any()
        assert values.isfinite().all()


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_strided_weights_are_stored_as_their_copies(name):
    weight = random(96, 40).T
    assert not weight.is_contiguous()
    fmt = get_format(name)
    assert torch.equal(dequantize(fmt.quantize(weight)), dequantize(fmt.quantize(weight.contiguous())))


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_factored_values_and_divisor_are_the_weight(name):
    fmt = get_format(name)
    packed = fmt.join([fmt.quantize(random(4, 96)), fmt.quantize(9 * random(3, 96))])
    values, divisor = fmt.factored(packed, torch.float64)
    product = values if divisor is None else values / divisor[:, None]
    torch.testing.assert_close(product, dequantize(packed, torch.float64), rtol=3e-7, atol=0)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("shape", [(1, 1), (4, 16), (6, 50), (8, 128)])
def test_predicted_bytes_are_the_stored_bytes(name, shape):
    packed = get_format(name).quantize(random(*shape).bfloat16(), segments=(1,) * shape[0])
    assert packed.nbytes() == get_format(name).nbytes(shape, segments=(1,) * shape[0])


def test_unquantized_bytes_follow_the_item_size():
    assert get_format("bf16").quantize(random(4, 6)).nbytes() == get_format("bf16").nbytes((4, 6), itemsize=4) == 96


def test_nvfp4_takes_four_and_a_half_bits():
    assert NVFP4.nbytes((4096, 4096)) == 4096 * 4096 * 9 // 16 + 4


def test_inputs_that_do_not_fill_a_block_are_padded_and_the_shape_is_kept():
    weight = random(5, 35)
    packed = NVFP4.quantize(weight)
    assert packed.shape == (5, 35)
    assert packed.tensors["packed"].shape == (5, 24)
    assert packed.tensors["block_scales"].shape == (5, 3)
    full = NVFP4.quantize(torch.nn.functional.pad(weight, (0, 13)))
    assert torch.equal(dequantize(packed), dequantize(full)[:, :35])


def test_a_fused_group_shares_the_largest_global_scale():
    parts = [random(4, 32), 7 * random(2, 32, seed=1), random(3, 32, seed=2)]
    fused = NVFP4.quantize(torch.cat(parts), segments=(4, 2, 3))
    largest = parts[1].abs().max()
    assert fused.tensors["global_scale"].tolist() == [float(2688 / largest)] * 3
    # The part that holds the largest magnitude is coded as if it were alone; the others as if they held it too.
    alone = NVFP4.quantize(parts[1])
    assert torch.equal(fused.tensors["packed"][4:6], alone.tensors["packed"])
    with_largest = torch.cat([parts[0], largest.expand(1, 32)])
    assert torch.equal(fused.tensors["packed"][:4], NVFP4.quantize(with_largest).tensors["packed"][:4])


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_join_keeps_every_part_and_split_undoes_it(name):
    fmt = get_format(name)
    parts = [fmt.quantize(scale * random(rows, 40, seed=rows)) for rows, scale in ((3, 1.0), (2, 29.0), (4, 0.1))]
    joined = fmt.join(parts)
    assert joined.segments == (3, 2, 4)
    assert torch.equal(dequantize(joined), torch.cat([dequantize(part) for part in parts]))
    for part, back in zip(parts, fmt.split(joined), strict=True):
        assert back.shape == part.shape
        assert torch.equal(dequantize(back), dequantize(part))


def test_join_refuses_parts_that_read_different_inputs():
    with pytest.raises(FormatError, match=r"\[2, 48\].*nvfp4 with 32 inputs"):
        NVFP4.join([NVFP4.quantize(random(2, 32)), NVFP4.quantize(random(2, 48))])


def test_unquantized_weights_come_back_as_they_are():
    weight = random(3, 7).bfloat16()
    packed = get_format("bf16").quantize(weight)
    assert torch.equal(dequantize(packed, torch.bfloat16), weight)
    values, divisor = get_format("bf16").factored(packed, torch.float32)
    assert divisor is None
    assert torch.equal(values, weight.float())


def test_quantization_in_row_slices_does_not_change_a_byte():
    weight = random(300, 4096)
    weight[0, 0] = 9.0
    whole = NVFP4.quantize(weight)
    for start in (1, 137, 255, 256, 299):
        alone = NVFP4.quantize(weight[[0, start]])
        assert torch.equal(alone.tensors["packed"][1], whole.tensors["packed"][start])
        assert torch.equal(dequantize(alone)[1], dequantize(whole)[start])


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_rows_are_views_of_the_whole(name):
    fmt = get_format(name)
    packed = fmt.quantize(random(1024, 64), segments=(256, 512, 256))
    for start, stop in ((0, 256), (256, 1024), (512, 1024), (256, 512)):
        part = fmt.rows(packed, start, stop)
        assert sum(part.segments) == stop - start
        assert torch.equal(dequantize(part), dequantize(packed)[start:stop])
        for key, tensor in part.tensors.items():
            assert tensor.untyped_storage().data_ptr() == packed.tensors[key].untyped_storage().data_ptr(), key


def test_moving_keeps_every_dtype():
    moved = NVFP4.quantize(random(2, 16)).to("meta")
    assert {key: tensor.dtype for key, tensor in moved.tensors.items()} == {
        "packed": torch.uint8,
        "block_scales": torch.float8_e4m3fn,
        "global_scale": torch.float32,
    }


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize(("value", "word"), [(math.nan, "NaN"), (math.inf, "infinity"), (-math.inf, "infinity")])
def test_values_that_are_not_finite_are_refused_by_tensor_name(name, value, word):
    weight = random(4, 32)
    weight[2, 3] = value
    with pytest.raises(FormatError, match=rf"layers\.0\.q_proj.*{word}"):
        get_format(name).quantize(weight, name="layers.0.q_proj")


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("weight", [torch.zeros(4), torch.zeros(0, 16), torch.zeros(2, 16, dtype=torch.int64)])
def test_what_is_no_weight_is_refused(name, weight):
    with pytest.raises(FormatError, match="non-empty floating point matrix"):
        get_format(name).quantize(weight)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_parts_that_do_not_add_up_are_refused(name):
    with pytest.raises(FormatError, match=r"segments \[3, 2\].*sum 4"):
        get_format(name).quantize(random(4, 16), segments=(3, 2))


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_an_unknown_rounding_names_the_nearest(name):
    with pytest.raises(FormatError, match="Did you mean 'torchao'"):
        get_format(name).quantize(random(4, 16), rounding="torch_ao")


def test_an_unknown_format_names_the_nearest():
    with pytest.raises(FormatError, match="Did you mean 'nvfp4'"):
        get_format("nvfp")


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_stored_parts_are_wrapped_untouched_or_refused(name):
    fmt = get_format(name)
    packed = fmt.quantize(random(4, 96))
    parts = packed.tensors
    assert torch.equal(dequantize(fmt.from_parts(parts, d_in=96)), dequantize(packed))
    assert torch.equal(dequantize(fmt.from_parts(parts)), dequantize(packed))
    for wrong in (
        {"packed": parts["packed"][:, :8]},
        {"packed": parts["packed"].to(torch.int8)},
        {"block_scales": parts["block_scales"].float()},
        {"block_scales": parts["block_scales"][:3]},
    ):
        with pytest.raises(FormatError, match=f"'q_proj' do not fit the {name.upper()} layout"):
            fmt.from_parts({**parts, **wrong}, d_in=96, name="q_proj")
    with pytest.raises(FormatError, match="for 128 inputs"):
        fmt.from_parts(parts, d_in=128)


def test_unusable_stored_scales_are_refused_by_name():
    parts = NVFP4.quantize(random(4, 32)).tensors
    for scale in (torch.zeros(1), torch.tensor([-1.0]), torch.tensor([math.nan])):
        with pytest.raises(FormatError, match="global scale of 'q_proj'"):
            NVFP4.from_parts({**parts, "global_scale": scale}, name="q_proj")
    with pytest.raises(FormatError, match="do not fit"):
        NVFP4.from_parts({**parts, "global_scale": torch.ones(2)})
    mxfp4 = get_format("mxfp4")
    parts = mxfp4.quantize(random(4, 32)).tensors
    for byte, word in ((255, "NaN"), (253, r"2\^126")):
        with pytest.raises(FormatError, match=f"block scale of 'q_proj'.*{word}"):
            mxfp4.from_parts({**parts, "block_scales": torch.full((4, 1), byte, dtype=torch.uint8)}, name="q_proj")
