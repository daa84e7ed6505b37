"""The order of NVFP4's bytes that the CUDA kernels read: tiles of 16 output rows by 64 inputs, 576 bytes each.

One layout serves decode, prefill, training and the backward pass. It is made once, when a weight is loaded on a CUDA device, and
holds the same numbers as the natural order (`qerl.formats.nvfp4`):

    tiles  uint8  [ceil(d_out / 16), ceil(d_in / 64), 576]

A tile is four k16 steps of the A operand of `mma.m16n8k16`. Legend: row = 8 h + g, input = 16 j + 8 e + 2 t + u, with h, e, u in
{0, 1}, g in 0..7 and t, j in 0..3; lane = 4 g + t.

    bytes   0..511   32 lanes x 4 steps j x 2 halves u of 16 bits; a half holds the codes of the four (e, h)
    bytes 512..575   8 rows g x 2 (h) x 4 steps j: the block scales

A half is not four nibbles. The bits of a code (sign s, exponent EE, mantissa M) stand where a left shift by 0, 3 or 6 and one mask
bring them to the places of a bfloat16 (s in bit 15, EEM in bits 8, 7, 6); the fourth code takes what is left:

    bit     15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    code     0  3  3  1  3  3  2  0  0  0  1  1  1  2  2  2        code = h + 2 e
    field    s  E  E  s  s  M  s  E  E  M  E  E  M  E  E  M

A scale is kept in 8 bits without a sign, 5 of exponent and 3 of mantissa, byte = 8 (exponent + 22) + mantissa: every positive E4M3
number has one, the subnormal ones too, and it expands to a bfloat16 by a shift. Zero has none: a block whose scale is zero gets
codes of zero instead. That, and the sign of a negative scale (moved to its codes), is all that the way back does not restore.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

ROWS = 16
COLUMNS = 64
BLOCK = 16
CODE_BYTES = 512
TILE_BYTES = 576

# Bit of each field of each of the four codes of a half: (sign, exponent high, exponent low, mantissa).
_PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (11, 14, 13, 10))
_SLICE_ELEMENTS = 1 << 24
_EXPONENT_SHIFT = 22
_NAN = 0xFF


def tile_shape(d_out: int, d_in: int) -> tuple[int, int, int]:
    """Shape of the tensor `tiles` of a weight."""
    return -(-d_out // ROWS), -(-d_in // COLUMNS), TILE_BYTES


def to_tiles(packed_OP: Tensor, scales_OB: Tensor) -> Tensor:
    """Tiles of natural NVFP4 bytes.

    Args:
        packed_OP: uint8 [d_out, P / 2], even element in the low nibble; P is a multiple of 16.
        scales_OB: float8_e4m3fn [d_out, P / 16].

    Returns:
        uint8, `tile_shape`; rows and inputs beyond the weight are zeros.
    """
    d_out, blocks = scales_OB.shape
    tiles = torch.empty(tile_shape(d_out, blocks * BLOCK), dtype=torch.uint8, device=packed_OP.device)
    step = max(1, _SLICE_ELEMENTS // (tiles.shape[1] * COLUMNS * ROWS))
    for first in range(0, tiles.shape[0], step):
        rows = slice(first * ROWS, min((first + step) * ROWS, d_out))
        _fill(tiles[first : first + step], packed_OP[rows], scales_OB[rows].view(torch.uint8))
    return tiles


def from_tiles(tiles: Tensor, blocks: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """(packed, block scales) of output rows [start, stop) in the natural order, `blocks` blocks a row; see `to_tiles`."""
    packed = torch.empty(stop - start, blocks * BLOCK // 2, dtype=torch.uint8, device=tiles.device)
    scales = torch.empty(stop - start, blocks, dtype=torch.uint8, device=tiles.device)
    step = max(1, _SLICE_ELEMENTS // (tiles.shape[1] * COLUMNS * ROWS))
    for first in range(start // ROWS, -(-stop // ROWS), step):
        codes, bytes_ = _read(tiles[first : min(first + step, -(-stop // ROWS))])
        low, high = max(start, first * ROWS), min(stop, (first + step) * ROWS)
        inside = slice(low - first * ROWS, high - first * ROWS)
        pairs = codes[inside, : blocks * BLOCK].unflatten(1, (-1, 2))
        packed[low - start : high - start] = pairs[..., 0] | (pairs[..., 1] << 4)
        scales[low - start : high - start] = bytes_[inside, :blocks]
    return packed, scales.view(torch.float8_e4m3fn)


def _fill(tiles: Tensor, packed: Tensor, scales: Tensor) -> None:
    """Writes whole tiles from the bytes of their rows; scales as uint8."""
    row_tiles, units, _ = tiles.shape
    rows, columns = row_tiles * ROWS, units * COLUMNS
    codes = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)
    blocks = codes.unflatten(1, (-1, BLOCK))
    blocks ^= ((scales >> 7) << 3)[..., None]
    blocks *= ((scales & 127) != 0)[..., None]
    codes = torch.nn.functional.pad(codes, (0, columns - codes.shape[1], 0, rows - codes.shape[0]))
    scales = torch.nn.functional.pad(scales, (0, columns // BLOCK - scales.shape[1], 0, rows - scales.shape[0]))
    # [T, h, g, U, j, e, t, u] -> [code = 2 e + h, T, U, g, t, j, u]
    fields = codes.view(row_tiles, 2, 8, units, 4, 2, 4, 2).permute(5, 1, 0, 3, 2, 6, 4, 7).reshape(4, -1)
    halves = torch.zeros(fields.shape[1], dtype=torch.int16, device=tiles.device)
    for table, code in zip(_scatter(tiles.device), fields, strict=True):
        halves |= table.index_select(0, code.int())
    tiles[..., :CODE_BYTES] = halves.view(torch.uint8).view(row_tiles, units, CODE_BYTES)
    wide = _scale_tables(tiles.device)[0].index_select(0, scales.reshape(-1).int())
    ordered = wide.view(row_tiles, 2, 8, units, 4).permute(0, 3, 2, 1, 4)
    tiles[..., CODE_BYTES:] = ordered.reshape(row_tiles, units, -1)


def _read(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [rows, inputs], E4M3 bytes [rows, inputs / 16]) of whole tiles, uint8."""
    row_tiles, units, _ = tiles.shape
    halves = tiles[..., :CODE_BYTES].contiguous().view(torch.int16).view(-1)
    parts = []
    for places in _PLACES:
        bits = [((halves >> place) & 1) << (3 - index) for index, place in enumerate(places)]
        parts.append((bits[0] | bits[1] | bits[2] | bits[3]).to(torch.uint8))
    fields = torch.stack(parts).view(2, 2, row_tiles, units, 8, 4, 4, 2)  # [e, h, T, U, g, t, j, u]
    codes = fields.permute(2, 1, 4, 3, 6, 0, 5, 7).reshape(row_tiles * ROWS, units * COLUMNS)
    stored = tiles[..., CODE_BYTES:].reshape(row_tiles, units, 8, 2, 4).permute(0, 3, 2, 1, 4)
    narrow = _scale_tables(tiles.device)[1].index_select(0, stored.reshape(-1).int())
    return codes, narrow.view(row_tiles * ROWS, units * COLUMNS // BLOCK)


@cache
def _scatter(device: torch.device) -> Tensor:
    """int16 [4, 16]: the bits that each code sets in a half."""
    table = [
        [sum(((code >> (3 - index)) & 1) << place for index, place in enumerate(places)) for code in range(16)]
        for places in _PLACES
    ]
    return torch.tensor(table, dtype=torch.int32).to(torch.int16).to(device)


@cache
def _scale_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """uint8 [256] each: from the magnitude of an E4M3 byte to its 5.3 byte, and back."""
    forth, back = [0] * 256, [0] * 256
    for byte in range(1, 127):
        value = torch.tensor(byte, dtype=torch.uint8).view(torch.float8_e4m3fn).double().item()
        mantissa, exponent = torch.frexp(torch.tensor(value, dtype=torch.float64))
        wide = 8 * (int(exponent) - 1 + _EXPONENT_SHIFT) + round((2 * float(mantissa) - 1) * 8)
        forth[byte] = forth[byte | 128] = wide
        back[wide] = byte
    forth[127] = forth[255] = _NAN
    back[_NAN] = 127
    return (
        torch.tensor(forth, dtype=torch.uint8).to(device),
        torch.tensor(back, dtype=torch.uint8).to(device),
    )
