"""NF4: by hand, and to the byte against bitsandbytes' CPU build, with and without double quantization."""

import pytest
import torch
from hard_tensors import CASES, assert_same_bytes, random

from qerl.errors import FormatError
from qerl.formats import dequantize, get_format
from qerl.formats.nf4 import QUANTILES

NF4 = get_format("nf4")
NF4_DQ = get_format("nf4_dq")

# What flattening and 256-block groups add to the usual cases: partial blocks, odd counts, straddled rows, several groups.
SHAPES = {
    "one element": lambda: random(1, 1),
    "odd count": lambda: random(3, 5),
    "zero tail": lambda: torch.cat([random(1, 64), torch.zeros(1, 64)], dim=1)[:, :100],
    "rows straddle blocks": lambda: random(37, 70),
    "several groups": lambda: random(300, 160, seed=1),
    "groups of zeros": lambda: torch.cat([torch.zeros(256, 64), random(30, 64)]),
    "float16": lambda: random(40, 96).half(),
}
BNB_CASES = {**CASES, **SHAPES}


def theirs(weight, *, double_quant):
    """(codes, quantization state, dequantized weight) of bitsandbytes.

    The weight is flattened first: its CPU dequantization of a matrix whose rows are no multiple of a block takes other scales than
    its own quantization made (version 0.50.2, AVX-512).
    """
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(
        weight.reshape(-1), blocksize=64, quant_type="nf4", compress_statistics=double_quant
    )
    return codes, state, functional.dequantize_4bit(codes, state).view_as(weight)


@pytest.mark.parametrize("case", BNB_CASES)
def test_bytes_equal_bitsandbytes(case):
    weight = BNB_CASES[case]()
    codes, state, values = theirs(weight, double_quant=False)
    packed = NF4.quantize(weight)
    assert_same_bytes(packed.tensors["packed"], codes)
    assert_same_bytes(packed.tensors["absmax"], state.absmax)
    assert torch.equal(dequantize(packed, weight.dtype), values)


@pytest.mark.parametrize("case", [case for case in BNB_CASES if case != "1e37 tensor"])
def test_doubly_quantized_bytes_equal_bitsandbytes(case):
    weight = BNB_CASES[case]()
    codes, state, values = theirs(weight, double_quant=True)
    packed = NF4_DQ.quantize(weight)
    assert_same_bytes(packed.tensors["packed"], codes)
    assert_same_bytes(packed.tensors["absmax_codes"], state.absmax)
    assert_same_bytes(packed.tensors["absmax_scales"], state.state2.absmax)
    assert torch.equal(packed.tensors["absmax_offset"], state.offset.reshape(1))
    assert torch.equal(dequantize(packed, weight.dtype), values)


def test_scales_over_four_decades_are_doubly_quantized_as_bitsandbytes_does():
    scales = 10.0 ** (4 * torch.rand(2000, generator=torch.Generator().manual_seed(0)) - 4)
    weight = random(2000, 64) * scales[:, None]
    _, state, _ = theirs(weight, double_quant=True)
    codes = NF4_DQ.quantize(weight).tensors["absmax_codes"]
    assert_same_bytes(codes, state.absmax)
    assert len(codes.unique()) > 150


def test_scales_whose_sum_overflows_stay_finite():
    weight = CASES["1e37 tensor"]()
    values = dequantize(NF4_DQ.quantize(weight))
    assert (values.double() - weight.double()).norm() < 0.11 * weight.double().norm()


@pytest.mark.parametrize("name", ["nf4", "nf4_dq"])
@pytest.mark.parametrize("d_in", [64, 70, 5])
def test_a_fused_group_is_its_projections_one_after_the_other(name, d_in):
    fmt = get_format(name)
    parts = [scale * random(rows, d_in, seed=rows) for rows, scale in ((7, 1.0), (3, 9.0), (4, 0.1))]
    fused = fmt.quantize(torch.cat(parts), segments=(7, 3, 4))
    alone = fmt.join([fmt.quantize(part) for part in parts])
    assert fused.tensors.keys() == alone.tensors.keys()
    for key in fused.tensors:
        assert torch.equal(fused.tensors[key], alone.tensors[key]), key
    for part, own in zip(fmt.split(fused), parts, strict=True):
        assert torch.equal(dequantize(part), dequantize(fmt.quantize(own)))


def test_quantiles_have_their_codes_even_element_high():
    packed = NF4.quantize(torch.tensor([QUANTILES]) * 3.0)
    assert packed.tensors["packed"].tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]
    assert packed.tensors["absmax"].tolist() == [3.0]
    assert torch.equal(dequantize(packed), torch.tensor([QUANTILES]) * 3.0)


def test_the_middle_between_two_quantiles_goes_down_and_one_float_above_it_up():
    middles = [(a + b) / 2 for a, b in zip(torch.tensor(QUANTILES)[:-1], torch.tensor(QUANTILES)[1:], strict=True)]
    below = torch.stack([*middles, torch.tensor(1.0)])[None]
    above = torch.nextafter(below, torch.tensor(2.0)).clamp(max=1.0)
    expected = torch.tensor(QUANTILES)
    assert torch.equal(dequantize(NF4.quantize(below))[0, :15], expected[:15])
    assert torch.equal(dequantize(NF4.quantize(above))[0, :15], expected[1:])


@pytest.mark.parametrize(("name", "bits"), [("nf4", 4.5), ("nf4_dq", 4 + 8 / 64 + 32 / (64 * 256))])
def test_bits_a_weight(name, bits):
    assert get_format(name).nbytes((4096, 4096)) == int(4096 * 4096 * bits / 8) + (4 if name == "nf4_dq" else 0)


def test_bytes_of_parts_that_end_inside_a_block_are_predicted():
    for fmt in (NF4, NF4_DQ):
        segments = (7, 3, 4)
        packed = fmt.quantize(random(14, 33), segments=segments)
        assert packed.nbytes() == fmt.nbytes((14, 33), segments)


def test_rows_can_be_taken_where_they_begin_a_block():
    packed = NF4.quantize(random(9, 96), segments=(5, 4))
    for start, stop in ((0, 2), (2, 9), (5, 7), (4, 5)):
        assert torch.equal(dequantize(NF4.rows(packed, start, stop)), dequantize(packed)[start:stop])
    with pytest.raises(FormatError, match="row 1 of a part with 96 inputs"):
        NF4.rows(packed, 1, 5)
    doubly = NF4_DQ.quantize(random(514, 64), segments=(512, 2))
    assert torch.equal(dequantize(NF4_DQ.rows(doubly, 256, 514)), dequantize(doubly)[256:])
    with pytest.raises(FormatError, match="straddles"):
        NF4_DQ.rows(doubly, 2, 512)


def test_quantizing_again_changes_nothing():
    packed = NF4.quantize(torch.cat([CASES["all binades"](), CASES["zero rows"]()]))
    again = NF4.quantize(dequantize(packed))
    assert torch.equal(again.tensors["packed"], packed.tensors["packed"])
    assert torch.equal(again.tensors["absmax"], packed.tensors["absmax"])


def test_slices_of_a_large_tensor_do_not_show():
    weight = random(80, 4100)
    packed = NF4.quantize(weight)
    flat = weight.view(-1)
    for first in (0, 4095, 4096, 5124):
        part = NF4.quantize(flat[64 * first : 64 * first + 64][None])
        assert torch.equal(part.tensors["packed"], packed.tensors["packed"][32 * first : 32 * first + 32])
        assert torch.equal(dequantize(part)[0], dequantize(packed).view(-1)[64 * first : 64 * first + 64])
