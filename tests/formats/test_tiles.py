"""The order of bytes for CUDA kernels: it holds the same weight, and a reader of fragments finds each code and scale."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qerl.formats import PackedWeight, dequantize, get_format, tiles
from qerl.formats.nf4 import CODEBOOK_SCALE, QUANTILES

FORMAT = get_format("nvfp4")
FORMAT_SOURCE = (Path(tiles.__file__).parents[1] / "kernels/fp4_linear/cuda/format.cuh").read_text(encoding="utf-8")
NAMES = ("nvfp4", "mxfp4", "nf4", "nf4_dq", "fp8")
SHAPES = [(16, 64), (17, 64), (1, 1), (17, 16), (40, 100), (33, 130), (100, 896), (48, 576)]
# (rows, inputs) of q k v, o, gate up, down of Qwen2.5 0.5B to 32B, Qwen3 0.6B and 8B, Llama-3 8B, Mistral 7B, cut to few rows.
INPUTS = (896, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 4864, 5120, 8960, 11008, 12288, 13824, 14336, 18944, 27648)


def weight_of(d_out: int, d_in: int, segments=None, name: str = "nvfp4") -> PackedWeight:
    generator = torch.Generator().manual_seed(d_out * 1000 + d_in)
    return get_format(name).quantize(torch.randn(d_out, d_in, generator=generator), segments=segments)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [*SHAPES, *((20, d_in) for d_in in INPUTS)])
def test_the_way_back_restores_every_byte(name, shape):
    weight, fmt = weight_of(*shape, name=name), get_format(name)
    if name.startswith("nf4") and shape[1] % 64:
        assert not fmt.tileable(weight)
        return
    tiled = fmt.tiled(weight)
    back = fmt.natural(tiled)
    assert tiled.tensors["tiles"].shape == fmt.tile_layout.shape(*shape)
    assert all(same_bytes(back.tensors[key], weight.tensors[key]) for key in weight.tensors)
    assert (back.order, back.shape, back.segments) == ("natural", weight.shape, weight.segments)


@pytest.mark.parametrize("name", NAMES)
def test_real_shapes_are_stored_without_a_byte_more(name):
    weight, fmt = weight_of(48, 3584, name=name), get_format(name)
    # Beside doubly quantized scales stand the values of their codes, and an offset for each group.
    beside = 4 * (8 + 256 + 11 - 1 + 2) if name == "nf4_dq" else 0
    assert fmt.tiled(weight).nbytes() - beside == weight.nbytes() == fmt.nbytes(weight.shape)


def test_doubly_quantized_scales_of_many_projections_have_no_tiles():
    fmt = get_format("nf4_dq")
    assert fmt.tileable(fmt.quantize(torch.randn(5, 64), segments=(2, 1, 1, 1)))
    assert not fmt.tileable(fmt.quantize(torch.randn(5, 64), segments=(1, 1, 1, 1, 1)))


@pytest.mark.parametrize("name", NAMES)
def test_either_order_gives_the_same_values_rows_and_parts(name):
    d_in, fmt = 128 if name.startswith("nf4") else 100, get_format(name)
    weight = weight_of(50, d_in, segments=(20, 7, 23), name=name)
    tiled = fmt.tiled(weight)
    assert torch.equal(dequantize(tiled), dequantize(weight))
    ours, theirs = (fmt.factored(either, torch.bfloat16) for either in (tiled, weight))
    assert torch.equal(ours[0], theirs[0])
    divided = name in ("nvfp4", "fp8")
    assert (ours[1] is None) == (theirs[1] is None) == (not divided)
    assert not divided or torch.equal(ours[1], theirs[1])
    # Groups of doubly quantized scales are longer than these projections.
    cuts = ((0, 50), (20, 50), (20, 27)) if name == "nf4_dq" else ((0, 50), (3, 4), (15, 33), (16, 32), (49, 50))
    for start, stop in cuts:
        rows = fmt.rows(tiled, start, stop)
        assert rows.segments == fmt.rows(weight, start, stop).segments
        assert torch.equal(dequantize(rows), dequantize(weight)[start:stop])
    joined = fmt.join(fmt.split(tiled))
    assert all(same_bytes(joined.tensors[key], weight.tensors[key]) for key in weight.tensors)


@pytest.mark.parametrize("name", NAMES)
def test_slices_of_a_large_weight_meet(name, monkeypatch):
    monkeypatch.setattr(tiles, "_SLICE_ELEMENTS", 1)
    weight, fmt = weight_of(70, 192, name=name), get_format(name)
    assert torch.equal(dequantize(fmt.tiled(weight)), dequantize(weight))
    assert name == "nf4_dq" or torch.equal(dequantize(fmt.rows(fmt.tiled(weight), 5, 61)), dequantize(weight)[5:61])


def test_every_scale_survives_the_subnormal_ones_too():
    """All 127 magnitudes of E4M3 with both signs, each on a block that holds every code."""
    scales = torch.tensor([b for b in range(256) if b & 127 != 127], dtype=torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).repeat(len(scales), 1)
    weight = PackedWeight(
        format="nvfp4",
        shape=(len(scales), 16),
        tensors={
            "packed": packed,
            "block_scales": scales[:, None].contiguous().view(torch.float8_e4m3fn),
            "global_scale": torch.tensor([3.0]),
        },
        segments=(len(scales),),
    )
    exact = dequantize(weight, torch.float64)
    assert torch.equal(dequantize(FORMAT.tiled(weight), torch.float64), exact)
    assert exact.abs().unique().numel() > 200


def fragments(tiled: torch.Tensor):
    """(tile, unit, g, t, step j, word, bytes of the scales [8, 2, n]) of every lane and step; of FP8 the two words, and no scales."""
    for tile, row in enumerate(tiled):
        for unit, data in enumerate(row):
            if len(data) == 1024:
                # `load_codes` and `word_of` of cuda/format.cuh: 16 bytes of each run of 512, 8 for each step.
                pairs = data.view(torch.int32).view(2, 32, 2, 2).tolist()
                for lane in range(32):
                    for j in range(4):
                        yield (
                            tile,
                            unit,
                            lane >> 2,
                            lane & 3,
                            j,
                            [w & 0xFFFFFFFF for w in pairs[j // 2][lane][j & 1]],
                            None,
                        )
                continue
            words, scales = data[:512].view(torch.int32).view(32, 4).tolist(), data[512:].view(8, 2, -1)
            for lane in range(32):
                for j in range(4):
                    yield tile, unit, lane >> 2, lane & 3, j, words[lane][j] & 0xFFFFFFFF, scales


def e2m1_registers(word: int) -> tuple[int, ...]:
    """`e2m1_fields` of cuda/format.cuh: its very statements, which Python reads as C++ does."""
    source = FORMAT_SOURCE[FORMAT_SOURCE.index("void e2m1_fields(") :]
    body = source[source.index("{") + 1 : source.index("}")].replace("u)", ")").replace("u;", ";")
    fields = int(re.search(r"FIELDS = (\w+)", body).group(1), 16)
    values = re.findall(r"^  q\[\d\] = (.+);$", body.replace("turn_right<6>(word)", "turned"), re.MULTILINE)
    turned = (word >> 6 | word << 26) & 0xFFFFFFFF
    first, second, third, last = (eval(text, {"word": word, "turned": turned, "FIELDS": fields}) for text in values)
    return first, second & 0xFFFFFFFF, third, last & 0xFFFFFFFF


def nvfp4_scale(scales: torch.Tensor, j: int) -> int:
    """The bits of a scale as `expand_scales` and `step_scale` of cuda/format.cuh find them."""
    word = int.from_bytes(bytes(scales.tolist()), "little")
    pairs = (word >> 8 | word << 24) & 0xFFFFFFFF if j & 1 else word
    return ((pairs & 0x0FF00FF0) | 0x70007000) >> (16 if j & 2 else 0) & 0xFFFF


def e4m3_registers(word: int) -> tuple[int, int]:
    """`e4m3_fields` of cuda/format.cuh: its very statements, which Python reads as C++ does."""
    source = FORMAT_SOURCE[FORMAT_SOURCE.index("void e4m3_fields(") :]
    body = source[source.index("{") + 1 : source.index("}")]
    first, second = re.findall(r"^  \w+ = (.+);$", body.replace("u)", ")").replace("u;", ";"), re.MULTILINE)
    return eval(first, {"word": word}) & 0xFFFFFFFF, eval(second, {"word": word}) & 0xFFFFFFFF


def nf4_registers(word: int) -> tuple[int, ...]:
    """The lookups of cuda/format.cuh: pairs of bfloat16(c * quantile)."""
    codebook = (torch.tensor(QUANTILES, dtype=torch.float64) * CODEBOOK_SCALE).float().bfloat16()
    bits = [value & 0xFFFF for value in codebook.view(torch.int16).tolist()]
    found = []
    for shift in (0, 8, 16, 24):
        pair = word >> shift & 0xFF
        found.append(bits[pair & 15] | bits[pair >> 4] << 16)
    return tuple(found)


def nf4_value(quantile: float, absmax: torch.Tensor) -> float:
    """One weight as the kernels form it: two roundings to bfloat16 at most matter."""
    first = (absmax.view(torch.int32) & -65536).view(torch.float32)
    rest = (quantile * (absmax - first).bfloat16().double()).bfloat16()
    return (quantile * first.double() + rest.double()).bfloat16().double().item()


def absmax_of(groups: torch.Tensor, row: int, units: int, unit: int, code: int) -> torch.Tensor:
    """A doubly quantized scale as cuda/format.cuh finds it: float32 [1]."""
    numbers = groups[:8].view(torch.int32).tolist()
    row = min(row, numbers[3] - 1)
    segment = sum(row >= stop for stop in numbers[:3])
    group = (row * units + unit + numbers[4 + segment]) >> 8
    scale, offset = groups[264:-2].view(-1, 2)[group]
    return (groups[8 + code] * scale + offset).view(1)


def read_as_the_kernel_does(tiled: torch.Tensor, name: str, groups: torch.Tensor | None = None) -> torch.Tensor:
    """V of every element as cuda/format.cuh forms it, by lanes and registers: float64 [rows, inputs]."""
    row_tiles, units, _ = tiled.shape
    out = torch.zeros(row_tiles * 16, units * 64, dtype=torch.float64)
    for tile, unit, g, t, j, word, scales in fragments(tiled):
        if name == "fp8":
            registers = (*e4m3_registers(word[0]), *e4m3_registers(word[1]))
        else:
            registers = nf4_registers(word) if name.startswith("nf4") else e2m1_registers(word)
        for index, register in enumerate(registers):
            row, h = 16 * tile + g + 8 * (index & 1), index & 1
            column = 64 * unit + 16 * j + 8 * (index >> 1) + 2 * t
            for u in (0, 1):
                value = bf16(register >> 16 * u & 0xFFFF)
                if name == "nvfp4":
                    value *= 128 * bf16(nvfp4_scale(scales[g, h], j))
                elif name == "fp8":
                    value *= bf16(0x7B80)
                elif name == "mxfp4":
                    value *= bf16(int(scales[g, h, j // 2]) << 7)
                elif name == "nf4":
                    value = nf4_value(value, scales[g, h].contiguous().view(torch.float32))
                else:
                    value = nf4_value(value, absmax_of(groups, row, units, unit, int(scales[g, h])))
                out[row, column + u] = value
    return out


def bf16(bits: int) -> float:
    return torch.tensor([bits], dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double().item()


@pytest.mark.parametrize("name", NAMES)
def test_the_bits_are_where_the_kernel_looks(name):
    fmt, d_in = get_format(name), 128 if name.startswith("nf4") else 96
    weight = weight_of(20, d_in, segments=(11, 4, 5), name=name)
    tensors = fmt.tiled(weight).tensors
    read = read_as_the_kernel_does(tensors["tiles"], name, tensors.get("groups"))
    if name.startswith("nf4"):
        exact = dequantize(weight, torch.float64)
        off = (read[:20] / CODEBOOK_SCALE - exact).abs()
        # The codebook's roundings, at most .9 of 2^-9, and one of the product.
        assert (off <= exact.abs() * (0.9 * 2.0**-9 + 2.0**-8 + 2.0**-14)).all()
        assert 1.5e-3 < (off.norm() / exact.norm()).item() < 2.1e-3
    else:
        assert torch.equal(read[:20, :d_in], fmt.factored(weight, torch.float64)[0])
    assert name == "nf4_dq" or read[20:].abs().max() == 0
    assert read[:, d_in:].numel() == 0 or read[:, d_in:].abs().max() == 0


def test_every_e4m3_code_becomes_its_value_in_every_place():
    """By the statements of the kernel, and `fma.rn.bf16x2`, which keeps subnormal numbers: times 2^120 they are exact, and nothing of a neighbor is left."""
    assert "multiply_bf16x2(a[i], 0x7B807B80u)" in FORMAT_SOURCE
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    weight = PackedWeight(
        format="fp8",
        shape=(16, 64),
        tensors={"codes": torch.empty(16, 64, dtype=torch.float8_e4m3fn), "divisor": torch.ones(16)},
        segments=(16,),
    )
    fmt, seen = get_format("fp8"), torch.zeros(16 * 64, 256, dtype=torch.bool)
    for step, turn in itertools.product((5, 7, 9), range(254)):
        placed = codes[(torch.arange(16 * 64) * step + turn) % 254].view(16, 64)
        weight.tensors["codes"].view(torch.uint8).copy_(placed)
        tiles = fmt.tiled(weight).tensors["tiles"]
        word = tiles.view(torch.int32).view(-1).long() & 0xFFFFFFFF
        first, second = e4m3_registers(word)
        registers = torch.stack((first, second), dim=1).view(2, 32, 2, 4)  # [pair of steps, lane, step, register]
        halves = torch.stack((registers & 0xFFFF, registers >> 16), dim=-1).to(torch.int32).to(torch.int16)
        values = (halves.view(torch.bfloat16).double() * 2.0**120).view(
            2, 8, 4, 2, 2, 2, 2
        )  # [pair, g, t, step, e, h, u]
        read = values.permute(5, 1, 0, 3, 4, 2, 6).reshape(16, 64)
        assert torch.equal(read, weight.tensors["codes"].double())
        assert torch.equal(read, read.bfloat16().double())
        seen[torch.arange(16 * 64), placed.view(-1).long()] = True
    assert seen.sum(1).min() == 254, "each place has held each code, beside three others"


@pytest.mark.parametrize("segments", [(300,), (129, 171), (128, 128, 44), (1, 2, 3, 294)])
def test_every_block_finds_its_group_of_scales(segments):
    """Groups of 256 blocks begin anew with each projection, and end within rows."""
    fmt, units = get_format("nf4_dq"), 5
    weight = weight_of(300, 64 * units, segments=segments, name="nf4_dq")
    groups, codes = fmt.tiled(weight).tensors["groups"], weight.tensors["absmax_codes"].view(300, units)
    found = [absmax_of(groups, row, units, unit, int(codes[row, unit])) for row in range(300) for unit in range(units)]
    assert torch.equal(torch.cat(found), fmt.absmax(weight))


def test_every_exponent_of_mxfp4_is_exact():
    fmt = get_format("mxfp4")
    weight = fmt.quantize(torch.randn(16, 64))
    codes = torch.arange(16, dtype=torch.uint8)
    weight.tensors["packed"][:] = (codes[0::2] | codes[1::2] << 4).repeat(4)
    for first in range(0, 129, 32):
        scales = torch.arange(first, first + 32).clamp(max=128).to(torch.uint8).view(16, 2)
        weight = replace(weight, tensors={**weight.tensors, "block_scales": scales})
        exact = dequantize(weight, torch.float64)
        assert torch.equal(read_as_the_kernel_does(fmt.tiled(weight).tensors["tiles"], "mxfp4"), exact)
        assert torch.equal(exact.bfloat16().double(), exact)
        assert torch.equal(fmt.natural(fmt.tiled(weight)).tensors["block_scales"], scales)
    weight.tensors["block_scales"][3, 1] = 129
    assert not fmt.tileable(weight)


def test_the_codebook_of_the_kernels_is_the_formats():
    source = FORMAT_SOURCE
    text = source[source.index("CODEBOOK[16] = {") :].split("{")[1].split("}")[0]
    expected = (torch.tensor(QUANTILES, dtype=torch.float64) * CODEBOOK_SCALE).float().bfloat16()
    assert [int(number, 16) for number in text.split(",")] == [v & 0xFFFF for v in expected.view(torch.int16).tolist()]
    assert f"TILE_DIVISOR = {CODEBOOK_SCALE}f" in source
