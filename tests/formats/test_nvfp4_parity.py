"""Bytes of the two named roundings against the installed libraries that they are named after."""

import pytest
import torch
from hard_tensors import CASES, assert_same_bytes, random

from qerl.formats import dequantize, get_format

NVFP4 = get_format("nvfp4")


@pytest.mark.parametrize("case", CASES)
def test_ct_bytes_equal_compressed_tensors(case):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight = CASES[case]()
    wide = weight.float()
    blocks = wide.view(wide.shape[0], -1, 16)
    args = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
    )
    global_scale = generate_gparam(wide.min(), wide.max())
    scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale)
    codes = quantize_and_pack_fp4(wide, scales, global_scale=global_scale)

    packed = NVFP4.quantize(weight, rounding="ct")
    assert torch.equal(packed.tensors["global_scale"], global_scale)
    assert_same_bytes(packed.tensors["block_scales"], scales.to(torch.float8_e4m3fn))
    assert_same_bytes(packed.tensors["packed"], codes)


@pytest.mark.parametrize("case", CASES)
def test_torchao_bytes_equal_torchao(case):
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    weight = CASES[case]()
    wide = weight.float()
    scales, codes = nvfp4_quantize(wide, 16, per_tensor_amax_to_scale(wide.abs().amax()))
    packed = NVFP4.quantize(weight, rounding="torchao")
    assert_same_bytes(packed.tensors["block_scales"], scales)
    assert_same_bytes(packed.tensors["packed"], codes)


def test_where_torchao_multiplies_zeros_by_infinity_they_stay_zero():
    weight = 1e-35 * random(16, 64, seed=13)
    weight[3] = 0.0
    codes = NVFP4.quantize(weight, rounding="torchao").tensors["packed"]
    assert not codes[3].any()
    assert codes[2].any()


def test_the_two_roundings_differ():
    """Parity is per name: if the roundings were one, a test against either library would prove nothing of the other."""
    weight = CASES["all binades"]()
    ct, ao = (NVFP4.quantize(weight, rounding=name) for name in ("ct", "torchao"))
    assert not torch.equal(ct.tensors["packed"], ao.tensors["packed"])


def test_dequantized_values_equal_compressed_tensors_and_torchao():
    """ct: bit-equal in float32. torchao multiplies by a reciprocal scale: two float32 roundings apart."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    pytest.importorskip("torchao", reason="torchao is not installed")
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize as ct_dequantize
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    weight = CASES["outliers"]()
    packed = NVFP4.quantize(weight)
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    theirs = ct_dequantize(
        unpack_fp4_from_uint8(packed.tensors["packed"], 32, 128, dtype=torch.float32),
        packed.tensors["block_scales"].float(),
        args=args,
        global_scale=packed.tensors["global_scale"],
    )
    assert torch.equal(dequantize(packed), theirs)

    packed = NVFP4.quantize(weight, rounding="torchao")
    theirs = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=per_tensor_amax_to_scale(weight.abs().amax()))
    torch.testing.assert_close(dequantize(packed), theirs.dequantize(torch.float32), rtol=3e-7, atol=0)
