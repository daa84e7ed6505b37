"""The order of packed weights' bytes that the CUDA kernels read: tiles of 16 output rows by 64 inputs.

One layout serves decode, prefill, training and the backward pass. It is made once, when a weight is loaded on a CUDA device, and
holds the same numbers as the natural order of its format:

    tiles  uint8  [ceil(d_out / 16), ceil(d_in / 64), 128 * bits of a code + 16 * scale bytes]

A tile is four k16 steps of the A operand of `mma.m16n8k16`. Legend: row = 8 h + g, input = 16 j + 8 e + 2 t + u, with h, e, u in
{0, 1}, g in 0..7 and t, j in 0..3; lane = 4 g + t.

    4 bits   bytes   0..511    32 lanes x 4 steps j of 32 bits: the codes of (u, e, h)
    8 bits   bytes   0..1023   2 pairs of steps j x 32 lanes x 2 steps of 64 bits: the codes of (e, u, h)
             then              8 rows g x 2 (h): the scales of a row

**E2M1 codes** (NVFP4, MXFP4). The 32 bits are two halves u of 16 bits, each with the codes of the four (e, h); a half is not four nibbles. The bits of a
code (sign s, exponent EE, mantissa M) stand where one mask brings them to the places of a bfloat16 (s in bit 15, EEM in bits 8, 7, 6) after no shift, a left
shift by 6, or a turn of the whole word to the right by 6, for which the sign s' stands in the other half; the fourth code, in what is left, takes a left and a right shift by 4.
No four patterns of these bits fill a half by turns alone:

    bit     15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    code     0  2  2  2  3  3  1  0  0  0  2  3  3  1  1  1        code = h + 2 e
    field    s  E  E  M  s  M  s  E  E  M  s' E  E  E  E  M

**NF4 codes.** The 32 bits are four bytes h + 2 e, each two codes (u = 0 in the low nibble) that are looked up together.

**E4M3 codes** (FP8). The 64 bits are four halves (e, u) of 16 bits, each with the codes h = 0 and 1 (sign s, exponent EEEE, mantissa MMM). Those of the first stand at their
places in a bfloat16, those of the second where a left shift and a right shift by 4 bring them there:

    bit     15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    code     0  1  1  1  1  0  0  0  0  0  0  0  1  1  1  1        code = h
    field    s  E  E  E  s  E  E  E  E  M  M  M  E  M  M  M

**Scales**, for each row of a tile:

    nvfp4  4 bytes   of blocks of 16: 5 bits of exponent and 3 of mantissa, 8 (exponent + 22) + mantissa, as one word turned to the left by 4 bits:
                     the numbers of blocks 0 and 2 stand at their places in a pair of bfloat16. Every positive E4M3 number has one, the
                     subnormal ones too. Zero has none: a block whose scale is zero gets codes of
                     zero instead. That, and the sign of a negative scale (moved to its codes), is all that the way back does not restore.
    mxfp4  2 bytes   of blocks of 32: e + 126, so that a shift makes the bfloat16 2^(e - 1); 0 beyond the weight
    nf4    4 bytes   of the one block: its absmax, float32; with double quantization 1 byte, the code of it
    fp8    none      a row's divisor stands beside the tiles
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from qerl.formats.base import PackedWeight, WeightFormat, segment_range

ROWS = 16
COLUMNS = 64
CODE_BYTES = 512
"""Bytes of the codes of 4 bits of a tile."""

# Bit of each field of each of the four E2M1 codes of a half: (sign, exponent high, exponent low, mantissa).
_PLACES = ((15, 8, 7, 6), (9, 2, 1, 0), (5, 14, 13, 12), (11, 4, 3, 10))
_SIGN_ACROSS = 2
"""The code whose sign stands in the other half."""
_SLICE_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class TileLayout:
    """What of a tile depends on the format."""

    scale_bytes: int
    """Bytes of the scales of a row of a tile."""
    pairs: bool
    """Codes are kept as pairs for a table; otherwise as the fields of E2M1 or E4M3."""
    wide: bool = False
    """Codes have 8 bits, those of E4M3; otherwise 4."""

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a tile."""
        return 2 * CODE_BYTES if self.wide else CODE_BYTES

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        return self.code_bytes + ROWS * self.scale_bytes

    def shape(self, d_out: int, d_in: int) -> tuple[int, int, int]:
        """Shape of the tensor `tiles` of a weight."""
        return -(-d_out // ROWS), -(-d_in // COLUMNS), self.tile_bytes


class TiledFormat(WeightFormat):
    """A format whose weights are put into tiles on a CUDA device."""

    tile_layout: TileLayout
    tile_divisor: float = 1.0
    """The kernels multiply with V = W_hat * divisor and divide the sums; of a format that does not store divisors of its own."""

    @abstractmethod
    def to_parts(self, packed: PackedWeight, rows: slice) -> tuple[Tensor, Tensor]:
        """Of rows of a weight in its natural order: (codes, one a byte [rows, inputs, padded as stored], the bytes of the tiles' scales)."""

    @abstractmethod
    def from_parts_of_tiles(self, parts: Iterable[tuple[Tensor, Tensor]], shape: tuple[int, int]) -> dict[str, Tensor]:
        """The natural order's codes and scales of a weight of `shape`, from runs of rows as `to_parts` gives them, padded to whole tiles."""

    def tileable(self, packed: PackedWeight) -> bool:
        """Whether the weight's blocks lie in tiles."""
        del packed
        return True

    def for_device(self, packed: PackedWeight) -> PackedWeight:
        return self.tiled(packed) if packed.device.type == "cuda" and self.tileable(packed) else packed

    def tiled(self, packed: PackedWeight) -> PackedWeight:
        """The weight as tiles, on any device."""
        if packed.order == "tiles":
            return packed
        assert self.tileable(packed), (packed.format, packed.shape)
        ordered = {"tiles": self._to_tiles(packed), **self.beside_tiles(packed)}
        return replace(packed, tensors=ordered, order="tiles", kept_OI=None)

    def beside_tiles(self, packed: PackedWeight) -> dict[str, Tensor]:
        """What the kernels read beside the tiles of a weight in its natural order."""
        return {key: packed.tensors[key] for key in sorted(self.per_segment)}

    def from_beside_tiles(self, packed: PackedWeight, start: int, stop: int) -> dict[str, Tensor]:
        """The way back, of output rows [start, stop)."""
        first, last, _ = segment_range(packed.segments, start, stop)
        return {key: packed.tensors[key][first:last] for key in sorted(self.per_segment)}

    def natural(self, packed: PackedWeight) -> PackedWeight:
        return packed if packed.order == "natural" else self._untiled(packed, 0, packed.shape[0])

    def rows(self, packed: PackedWeight, start: int, stop: int) -> PackedWeight:
        if packed.order == "natural":
            return self.natural_rows(packed, start, stop)
        return self._untiled(packed, start, stop)

    def natural_rows(self, packed: PackedWeight, start: int, stop: int) -> PackedWeight:
        """`rows` of a weight in its natural order."""
        return super().rows(packed, start, stop)

    def _to_tiles(self, packed: PackedWeight) -> Tensor:
        layout, d_out = self.tile_layout, packed.shape[0]
        tiles = torch.empty(layout.shape(*packed.shape), dtype=torch.uint8, device=packed.device)
        for first, last in _slices(0, tiles.shape[0], tiles.shape[1]):
            codes, scales = self.to_parts(packed, slice(first * ROWS, min(last * ROWS, d_out)))
            _fill(tiles[first:last], codes, scales, layout)
        return tiles

    def _untiled(self, packed: PackedWeight, start: int, stop: int) -> PackedWeight:
        """Output rows [start, stop) of a tiled weight in the natural order."""
        _, _, counts = segment_range(packed.segments, start, stop)
        shape = (stop - start, packed.shape[1])
        parts = _runs(packed.tensors["tiles"], self.tile_layout, start, stop)
        stored = self.from_parts_of_tiles(parts, shape)
        stored |= self.from_beside_tiles(packed, start, stop)
        return replace(packed, shape=shape, tensors=stored, segments=counts, order="natural", kept_OI=None)


def _slices(first: int, last: int, units: int) -> Iterator[tuple[int, int]]:
    """Runs of row tiles to work on at once."""
    step = max(1, _SLICE_ELEMENTS // (units * COLUMNS * ROWS))
    for start in range(first, last, step):
        yield start, min(start + step, last)


def _runs(tiles: Tensor, layout: TileLayout, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(codes [rows, inputs], bytes of scales [rows, units * scale_bytes]) of output rows [start, stop), a run of them at a time."""
    for first, last in _slices(start // ROWS, -(-stop // ROWS), tiles.shape[1]):
        codes, scales = _read(tiles[first:last], layout)
        inside = slice(max(start, first * ROWS) - first * ROWS, min(stop, last * ROWS) - first * ROWS)
        yield codes[inside], scales[inside]


def _fill(tiles: Tensor, codes: Tensor, scales: Tensor, layout: TileLayout) -> None:
    """Writes whole tiles from the codes and scales of their rows."""
    row_tiles, units, _ = tiles.shape
    rows, columns = row_tiles * ROWS, units * COLUMNS
    codes = pad(codes, (0, columns - codes.shape[1], 0, rows - codes.shape[0]))
    scales = pad(scales, (0, units * layout.scale_bytes - scales.shape[1], 0, rows - scales.shape[0]))
    if layout.wide:
        # [T, h, g, U, pair of steps, step, e, t, u] -> [h, T, U, pair, g, t, step, e, u]
        fields = codes.view(row_tiles, 2, 8, units, 2, 2, 2, 4, 2).permute(1, 0, 3, 4, 2, 7, 5, 6, 8).reshape(2, -1)
        words = _join_wide(fields)
    else:
        # [T, h, g, U, j, e, t, u] -> [code = 2 e + h, T, U, g, t, j, u]
        fields = codes.view(row_tiles, 2, 8, units, 4, 2, 4, 2).permute(5, 1, 0, 3, 2, 6, 4, 7).reshape(4, -1)
        words = _join_pairs(fields) if layout.pairs else _join_fields(fields)
    tiles[..., : layout.code_bytes] = words.view(torch.uint8).view(row_tiles, units, layout.code_bytes)
    ordered = scales.view(row_tiles, 2, 8, units, layout.scale_bytes).permute(0, 3, 2, 1, 4)
    tiles[..., layout.code_bytes :] = ordered.reshape(row_tiles, units, ROWS * layout.scale_bytes)


def _read(tiles: Tensor, layout: TileLayout) -> tuple[Tensor, Tensor]:
    """(codes [rows, inputs], bytes of scales [rows, units * scale_bytes]) of whole tiles, uint8."""
    row_tiles, units, _ = tiles.shape
    words = tiles[..., : layout.code_bytes].contiguous()
    if layout.wide:
        parts = _split_wide(words).view(2, row_tiles, units, 2, 8, 4, 2, 2, 2)  # [h, T, U, pair, g, t, step, e, u]
        codes = parts.permute(1, 0, 4, 2, 3, 6, 7, 5, 8)
    else:
        fields = _split_pairs(words) if layout.pairs else _split_fields(words)
        parts = fields.view(2, 2, row_tiles, units, 8, 4, 4, 2)  # [e, h, T, U, g, t, j, u]
        codes = parts.permute(2, 1, 4, 3, 6, 0, 5, 7)
    stored = tiles[..., layout.code_bytes :].reshape(row_tiles, units, 8, 2, layout.scale_bytes).permute(0, 3, 2, 1, 4)
    return (
        codes.reshape(row_tiles * ROWS, units * COLUMNS),
        stored.reshape(row_tiles * ROWS, units * layout.scale_bytes),
    )


def _join_fields(fields: Tensor) -> Tensor:
    """int16 halves of E2M1 codes [4, N], the two of a word neighbors."""
    halves = torch.zeros(fields.shape[1], dtype=torch.int16, device=fields.device)
    for index, table in enumerate(_scatter(fields.device)):
        code = _across(fields[index]) if index == _SIGN_ACROSS else fields[index]
        halves |= table.index_select(0, code.int())
    return halves


def _across(codes: Tensor) -> Tensor:
    """uint8 E2M1 codes [N], each with its neighbor's sign."""
    return codes & 7 | codes.view(-1, 2).flip(1).view(-1) & 8


def _split_fields(words: Tensor) -> Tensor:
    """uint8 E2M1 codes [4, N] of halves."""
    halves, parts = words.view(torch.int16).view(-1), []
    for places in _PLACES:
        bits = [((halves >> place) & 1) << (3 - index) for index, place in enumerate(places)]
        parts.append((bits[0] | bits[1] | bits[2] | bits[3]).to(torch.uint8))
    parts[_SIGN_ACROSS] = _across(parts[_SIGN_ACROSS])
    return torch.stack(parts)


def _join_wide(fields: Tensor) -> Tensor:
    """int16 halves of E4M3 codes [2, N]."""
    first, second = fields.int()
    halves = (first & 0x80) << 8 | (first & 0x7F) << 4 | (second & 0x80) << 4 | (second & 0x70) << 8 | second & 0x0F
    return halves.to(torch.int16)


def _split_wide(words: Tensor) -> Tensor:
    """uint8 E4M3 codes [2, N] of halves."""
    halves = words.view(torch.int16).view(-1).int()
    first = halves >> 8 & 0x80 | halves >> 4 & 0x7F
    second = halves >> 4 & 0x80 | halves >> 8 & 0x70 | halves & 0x0F
    return torch.stack((first, second)).to(torch.uint8)


def _join_pairs(fields: Tensor) -> Tensor:
    """uint8 [N, 4] of NF4 codes [4, 2 N], neighbors a byte."""
    return (fields[:, 0::2] | (fields[:, 1::2] << 4)).T.contiguous()


def _split_pairs(words: Tensor) -> Tensor:
    """uint8 NF4 codes [4, 2 N] of bytes."""
    data = words.view(-1, 4).T
    return torch.stack((data & 15, data >> 4), dim=2).view(4, -1)


@cache
def _scatter(device: torch.device) -> Tensor:
    """int16 [4, 16]: the bits that each E2M1 code sets in a half."""
    table = [
        [sum(((code >> (3 - index)) & 1) << place for index, place in enumerate(places)) for code in range(16)]
        for places in _PLACES
    ]
    return torch.tensor(table, dtype=torch.int32).to(torch.int16).to(device)
