"""MXFP4: by hand, and to the byte against the two libraries whose EVEN scale rounding it takes."""

import pytest
import torch
from hard_tensors import CASES, assert_same_bytes, random

from qerl.formats import dequantize, get_format

MXFP4 = get_format("mxfp4")

# Where the libraries' results are not finite; see the module.
TOO_LARGE = 1.75 * 2.0**127


def whole_blocks(case: str) -> torch.Tensor:
    weight = CASES[case]()
    return torch.nn.functional.pad(weight, (0, -weight.shape[1] % 32))


@pytest.mark.parametrize("case", CASES)
def test_ct_bytes_equal_compressed_tensors(case):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import MXFP4A16
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = whole_blocks(case).float()
    blocks = weight.view(weight.shape[0], -1, 32)
    scheme = QuantizationScheme(targets=["Linear"], **MXFP4A16)
    scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
    theirs = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scales}, scheme)

    packed = MXFP4.quantize(weight, rounding="ct")
    assert torch.equal(packed.tensors["block_scales"], theirs["weight_scale"])
    assert_same_bytes(packed.tensors["packed"], theirs["weight_packed"])


@pytest.mark.parametrize("case", CASES)
def test_torchao_bytes_equal_torchao_even(case):
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    weight = whole_blocks(case).float().contiguous()
    scales, codes = to_mx(weight, torch.float4_e2m1fn_x2, 32, scaling_mode=ScaleCalculationMode.EVEN)
    packed = MXFP4.quantize(weight, rounding="torchao")
    assert_same_bytes(packed.tensors["block_scales"], scales)
    assert_same_bytes(packed.tensors["packed"], codes)


def test_bytes_of_half_precision_weights_are_those_of_their_float32_values():
    for dtype in (torch.bfloat16, torch.float16):
        weight = random(8, 64).to(dtype)
        assert torch.equal(MXFP4.quantize(weight).tensors["packed"], MXFP4.quantize(weight.float()).tensors["packed"])


@pytest.mark.parametrize(
    ("largest", "exponent"),
    [(4.0, 0), (6.0, 0), (6.99, 0), (7.0, 1), (8.0, 1), (3.5, 0), (3.499, -1), (1.0, -2), (0.0, -127), (1e-40, -127)],
)
def test_the_scale_is_rounded_even(largest, exponent):
    """Up from 1.75 times a power of two on: 7 = 1.75 * 4 takes 2, and so is coded 4 = 3.5 rounded to even."""
    weight = torch.zeros(1, 32)
    weight[0, 5] = -largest
    packed = MXFP4.quantize(weight)
    assert packed.tensors["block_scales"].tolist() == [[127 + exponent]]


def test_values_and_nibbles_by_hand():
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0, 0.25]
    packed = MXFP4.quantize(torch.tensor([values + [0.0] * 16]) * 2.0**-9)
    assert packed.tensors["block_scales"].tolist() == [[127 - 9]]
    assert packed.tensors["packed"][0, :8].tolist() == [0x10, 0x32, 0x54, 0x76, 0xA9, 0xCB, 0xED, 0x0F]
    assert dequantize(packed)[0, :15].tolist() == [v * 2.0**-9 for v in values[:15]]


@pytest.mark.parametrize(("rounding", "code"), [("ct", 0), ("torchao", 8)])
def test_negative_zero_follows_the_named_rounding(rounding, code):
    weight = torch.tensor([[-0.0, 1.0] + [0.0] * 30])
    assert int(MXFP4.quantize(weight, rounding=rounding).tensors["packed"][0, 0]) & 15 == code


@pytest.mark.parametrize("size", [3.4e38, TOO_LARGE])
def test_the_largest_magnitudes_saturate_and_stay_finite(size):
    weight = torch.linspace(-1, 1, 32)[None] * size
    values = dequantize(MXFP4.quantize(weight))
    assert values.isfinite().all()
    assert values.abs().max() == 1.5 * 2.0**127
    assert ((values - weight).abs() <= 0.26 * size).all()


def test_four_and_a_quarter_bits():
    assert MXFP4.nbytes((4096, 4096)) == 4096 * 4096 * 17 // 32


def test_factored_values_are_exact_in_bfloat16_and_need_no_divisor():
    packed = MXFP4.quantize(random(16, 64) * 2.0 ** torch.arange(-60, 68, 8)[:, None])
    values, divisor = MXFP4.factored(packed, torch.bfloat16)
    assert divisor is None
    assert torch.equal(values.float(), dequantize(packed))


def test_quantizing_again_changes_nothing():
    packed = MXFP4.quantize(torch.cat([CASES["all binades"](), CASES["zero rows"]()]))
    again = MXFP4.quantize(dequantize(packed))
    assert torch.equal(dequantize(again), dequantize(packed))
    assert torch.equal(again.tensors["block_scales"], packed.tensors["block_scales"])
