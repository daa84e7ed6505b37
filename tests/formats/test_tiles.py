"""The order of NVFP4's bytes for CUDA kernels: it holds the same weight, and a reader of fragments finds each code and scale."""

import pytest
import torch

from qerl.formats import PackedWeight, dequantize, get_format, tiles

FORMAT = get_format("nvfp4")
SHAPES = [(16, 64), (1, 1), (17, 16), (40, 100), (33, 130), (100, 896), (48, 576)]
# (rows, inputs) of q k v, o, gate up, down of Qwen2.5 0.5B to 32B, Qwen3 0.6B and 8B, Llama-3 8B, Mistral 7B, cut to few rows.
INPUTS = (896, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 4864, 5120, 8960, 11008, 12288, 13824, 14336, 18944, 27648)


def weight_of(d_out: int, d_in: int, segments=None) -> PackedWeight:
    generator = torch.Generator().manual_seed(d_out * 1000 + d_in)
    return FORMAT.quantize(torch.randn(d_out, d_in, generator=generator), segments=segments)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("shape", [*SHAPES, *((20, d_in) for d_in in INPUTS)])
def test_the_way_back_restores_every_byte(shape):
    weight = weight_of(*shape)
    tiled = FORMAT.tiled(weight)
    back = FORMAT.natural(tiled)
    assert tiled.tensors["tiles"].shape == tiles.tile_shape(*shape)
    assert all(same_bytes(back.tensors[key], weight.tensors[key]) for key in weight.tensors)
    assert (back.order, back.shape, back.segments) == ("natural", weight.shape, weight.segments)


def test_real_shapes_are_stored_without_a_byte_more():
    weight = weight_of(48, 3584)
    assert FORMAT.tiled(weight).nbytes() == weight.nbytes()


def test_either_order_gives_the_same_values_rows_and_parts():
    weight = weight_of(50, 100, segments=(20, 7, 23))
    tiled = FORMAT.tiled(weight)
    assert torch.equal(dequantize(tiled), dequantize(weight))
    for ours, theirs in zip(
        FORMAT.factored(tiled, torch.bfloat16), FORMAT.factored(weight, torch.bfloat16), strict=True
    ):
        assert torch.equal(ours, theirs)
    for start, stop in ((0, 50), (3, 4), (15, 33), (16, 32), (49, 50)):
        rows = FORMAT.rows(tiled, start, stop)
        assert rows.segments == FORMAT.rows(weight, start, stop).segments
        assert torch.equal(dequantize(rows), dequantize(weight)[start:stop])
    joined = FORMAT.join(FORMAT.split(tiled))
    assert all(same_bytes(joined.tensors[key], weight.tensors[key]) for key in weight.tensors)


def test_slices_of_a_large_weight_meet(monkeypatch):
    monkeypatch.setattr(tiles, "_SLICE_ELEMENTS", 1)
    weight = weight_of(70, 130)
    assert torch.equal(dequantize(FORMAT.tiled(weight)), dequantize(weight))
    assert torch.equal(dequantize(FORMAT.rows(FORMAT.tiled(weight), 5, 61)), dequantize(weight)[5:61])


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


def read_as_the_kernel_does(tiled: torch.Tensor) -> torch.Tensor:
    """q * s of every element as `cuda/tile.cuh` forms it, by lanes and registers: float64 [rows, inputs]."""
    row_tiles, units, _ = tiled.shape
    out = torch.zeros(row_tiles * 16, units * 64, dtype=torch.float64)
    fields = 0x81C081C0
    for tile in range(row_tiles):
        for unit in range(units):
            data = tiled[tile, unit]
            words = data[:512].view(torch.int32).view(32, 4).tolist()
            scales = data[512:].view(8, 2, 4).tolist()
            for lane in range(32):
                g, t = lane >> 2, lane & 3
                for j in range(4):
                    word = words[lane][j] & 0xFFFFFFFF
                    last = ((word >> 6) & 0x01800180) | ((word >> 4) & 0x00400040) | ((word << 4) & 0x80008000)
                    registers = (word & fields, (word << 3) & fields, (word << 6) & fields, last)
                    for index, register in enumerate(registers):
                        row = 16 * tile + g + 8 * (index & 1)
                        column = 64 * unit + 16 * j + 8 * (index >> 1) + 2 * t
                        scale = bf16(0x7000 | scales[g][index & 1][j] << 4)
                        for u in (0, 1):
                            out[row, column + u] = 128 * bf16(register >> 16 * u & 0xFFFF) * scale
    return out


def bf16(bits: int) -> float:
    return torch.tensor([bits], dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double().item()


def test_the_bits_are_where_the_kernel_looks():
    weight = weight_of(20, 96)
    values, _ = FORMAT.factored(weight, torch.float64)
    read = read_as_the_kernel_does(FORMAT.tiled(weight).tensors["tiles"])
    assert torch.equal(read[:20, :96], values)
    assert read[20:].abs().max() == 0
    assert read[:, 96:].abs().max() == 0
