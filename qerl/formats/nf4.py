"""NF4: codes that are the 16 quantiles of a normal distribution, one float32 scale a block of 64. 4.5 bits a weight.

    w_hat = NF4[code] * absmax

Blocks run over each projection FLATTENED, so they straddle rows where d_in is no multiple of 64, and every projection of a
fused group starts a block of its own. The EVEN element is in the HIGH nibble. Stored tensors, for projections of n elements,
those of a fused group one after the other:

    packed  uint8    [ceil(n / 2)]
    absmax  float32  [ceil(n / 64)]

Double quantization (`nf4_dq`, 4.127 bits) stores `absmax` in 8 bits: see `qerl.formats.double_quant`.

On a CUDA device `for_device` replaces them by `tiles`, the same numbers in the order of `qerl.formats.tiles`, if rows are
whole blocks. The kernels multiply with one rounded form of w_hat * c, the same whatever the number of rows: see `qerl/kernels/fp4_linear/README.md`.

Equal to the byte to bitsandbytes' CPU build, for round to nearest: x = w * (1 / absmax), the code of the nearest quantile, the
lower one of equals; in a last, partial block x = w / absmax with absmax at least 1e-38; codes follow the scale before its own
quantization. (A fused group equals one call of it a projection.) There is one rounding: `ct` and `torchao` are the same here.

Searched method: `mse` tries scales from 0.80 to 1.12 of the largest magnitude, then the least-squares scale of the best one's
codes, and keeps what leaves the least squared error.

Source: Dettmers et al., QLoRA (arXiv 2305.14314), section 3 and appendix E; 8-bit map: Dettmers, arXiv 1511.04561.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from qerl.errors import FormatError
from qerl.formats import double_quant
from qerl.formats.base import (
    BlockScales,
    PackedWeight,
    check_choices,
    check_finite,
    check_weight,
    segment_range,
    slice_elements,
)
from qerl.formats.search import least_error
from qerl.formats.tiles import TiledFormat, TileLayout

BLOCK = 64
SMALLEST_ABSMAX = 1e-38

# The quantiles as bitsandbytes has them, -1 and 1 at the ends and 0 among them.
QUANTILES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

CODEBOOK_SCALE = 0.718353271484375
"""c: the CUDA kernels hold the quantiles as bfloat16(c * q). Of all numbers it leaves about the least error, weighted by the square of the values and by how often normal
weights have them: 7.8e-4 (1.36e-3 without it)."""

_CODE_OF_ZERO = QUANTILES.index(0.0)
_CELLS = 64
_FACTORS = (0.96, 0.92, 1.04, 0.88, 1.08, 0.84, 1.12, 0.8)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(quantiles float32 [16]; for each of 64 equal cells of [-1, 1]: code at its low end, uint8; the boundary in it)."""
    quantiles = torch.tensor(QUANTILES)
    middles = (quantiles[:-1] + quantiles[1:]) / 2
    edges = torch.arange(_CELLS) * (2 / _CELLS) - 1
    low = torch.bucketize(edges, middles)
    boundary = torch.cat((middles, torch.tensor([torch.inf])))[low]
    return quantiles.to(device), low.to(torch.uint8).to(device), boundary.to(device)


def _codes(x: Tensor) -> Tensor:
    """uint8 codes of the nearest quantiles; the lower of equals; values beyond [-1, 1] saturate.

    No cell of the table holds more than one boundary between codes, and no boundary is near the edge of a cell.
    """
    _, low, boundary = _tables(x.device)
    flat = x.reshape(-1).clamp(-1, 1)
    cell = flat.add(1).mul_(_CELLS / 2).to(torch.int32).clamp_(max=_CELLS - 1)
    return (low.index_select(0, cell) + (flat > boundary.index_select(0, cell))).view(x.shape)


def _values(codes: Tensor) -> Tensor:
    """float32 quantiles of codes."""
    quantiles, _, _ = _tables(codes.device)
    return quantiles.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def _reciprocal(absmax: Tensor) -> Tensor:
    return 1.0 / absmax.clamp(min=SMALLEST_ABSMAX)


class Nf4Format(TiledFormat):
    """See the module's docstring. One instance stores float32 scales (`nf4`), one doubly quantized ones (`nf4_dq`)."""

    block = BLOCK
    methods = ("rtn", "mse")
    tile_divisor = CODEBOOK_SCALE

    def __init__(self, *, double_quant: bool = False):
        self.double_quant = double_quant
        self.name = "nf4_dq" if double_quant else "nf4"
        self.tile_layout = TileLayout(scale_bytes=1 if double_quant else 4, pairs=True)
        self.per_segment = frozenset({"absmax_offset"}) if double_quant else frozenset()
        self._scale_key = "absmax_codes" if double_quant else "absmax"
        self._scale_dtype = torch.uint8 if double_quant else torch.float32

    def block_scales(
        self,
        weight: Tensor,
        *,
        method: str = "rtn",
        rounding: str = "ct",
        segments: Sequence[int] | None = None,
        name: str = "weight",
        importance_I: Tensor | None = None,
        shared: BlockScales | None = None,
    ) -> BlockScales:
        """As `WeightFormat.block_scales`; held as float32 `absmax`, also where storing quantizes it."""
        del shared  # no tensor-wide part
        check_choices(self, method, rounding)
        rows = check_weight(weight, segments, name)
        reach = weight.abs().amax().float()
        check_finite(reach, name)
        absmax = []
        size = slice_elements(weight.device, search=True)
        for flat in _projections(weight, rows):
            for start in range(0, flat.numel(), size):
                part = flat[start : start + size]
                w_NK = _blocks(part)
                absmax_N = w_NK.abs().amax(-1)
                if part.numel() % BLOCK:
                    absmax_N[-1].clamp_(min=SMALLEST_ABSMAX)
                if method == "mse":
                    absmax_N = _search(w_NK, absmax_N, _importance(importance_I, start, part.numel()))
                absmax.append(absmax_N)
        return BlockScales(
            format=self.name,
            shape=(weight.shape[0], weight.shape[1]),
            segments=rows,
            rounding=rounding,
            reach=reach,
            tensors={"absmax": torch.cat(absmax)},
        )

    def quantize_with_scales(self, weight: Tensor, scales: BlockScales) -> PackedWeight:
        absmax = scales.tensors["absmax"]
        packed, first = [], 0
        size = slice_elements(weight.device)
        for flat in _projections(weight, scales.segments):
            for start in range(0, flat.numel(), size):
                part = flat[start : start + size]
                x_NK = _blocks(part)
                absmax_N1 = absmax[first : first + x_NK.shape[0], None]
                first += x_NK.shape[0]
                x = (x_NK * _reciprocal(absmax_N1)).view(-1)[: part.numel()]
                if tail := part.numel() % BLOCK:
                    x[-tail:] = part[-tail:].float() / absmax_N1[-1]
                codes = torch.nn.functional.pad(_codes(x), (0, x.numel() % 2), value=_CODE_OF_ZERO)
                packed.append((codes[0::2] << 4) | codes[1::2])
        stored = {"absmax": absmax}
        if self.double_quant:
            stored = double_quant.quantize(absmax, _block_counts(scales.segments, scales.shape[1]))
        tensors = {"packed": torch.cat(packed), **stored}
        return PackedWeight(format=self.name, shape=scales.shape, tensors=tensors, segments=scales.segments)

    def absmax(self, packed: PackedWeight) -> Tensor:
        """Scale of every block, float32, all projections one after the other."""
        packed = self.natural(packed)
        if not self.double_quant:
            return packed.tensors["absmax"]
        return double_quant.dequantize(packed.tensors, _block_counts(packed.segments, packed.shape[1]))

    def steps(self, scales: BlockScales, columns: slice | None = None) -> Tensor:
        d_in = scales.shape[1]
        absmax = scales.tensors["absmax"].split(_block_counts(scales.segments, d_in))
        parts = [
            part.repeat_interleave(BLOCK)[: rows * d_in].view(rows, d_in)
            for part, rows in zip(absmax, scales.segments, strict=True)
        ]
        return torch.cat(parts)[:, columns or slice(None)]

    def snap(self, weight: Tensor, steps: Tensor) -> Tensor:
        return _values(_codes(weight.float() * _reciprocal(steps))).mul_(steps)

    def column_block(self, d_in: int) -> int:
        """Blocks that straddle rows leave no slice of columns with scales of its own."""
        return BLOCK if d_in % BLOCK == 0 else d_in

    def join_columns(self, parts: Sequence[BlockScales]) -> BlockScales:
        rows = parts[0].shape[0]
        absmax = torch.cat([part.tensors["absmax"].view(rows, -1) for part in parts], dim=1).view(-1)
        return replace(parts[0], shape=(rows, sum(part.shape[1] for part in parts)), tensors={"absmax": absmax})

    def tileable(self, packed: PackedWeight) -> bool:
        """No block straddles rows, and doubly quantized scales have few enough projections."""
        few = not self.double_quant or len(packed.segments) <= double_quant.KERNEL_SEGMENTS
        return few and packed.shape[1] % BLOCK == 0

    def to_parts(self, packed: PackedWeight, rows: slice) -> tuple[Tensor, Tensor]:
        d_out, d_in = packed.shape
        data = packed.tensors["packed"].view(d_out, d_in // 2)[rows]
        absmax = packed.tensors[self._scale_key].view(d_out, d_in // BLOCK)[rows]
        return torch.stack((data >> 4, data & 15), dim=2).flatten(1), absmax.view(torch.uint8)

    def beside_tiles(self, packed: PackedWeight) -> dict[str, Tensor]:
        if not self.double_quant:
            return {}
        return {"groups": double_quant.kernel_groups(packed.tensors, packed.segments, packed.shape[1] // BLOCK)}

    def from_beside_tiles(self, packed: PackedWeight, start: int, stop: int) -> dict[str, Tensor]:
        if not self.double_quant:
            return {}
        assert (start, stop) == (0, packed.shape[0]), "of whole weights"
        return double_quant.from_kernel_groups(packed.tensors["groups"], packed.segments, packed.shape[1] // BLOCK)

    def rows(self, packed: PackedWeight, start: int, stop: int) -> PackedWeight:
        if self.double_quant:
            return self.natural_rows(self.natural(packed), start, stop)
        return super().rows(packed, start, stop)

    def from_parts_of_tiles(self, parts: Iterable[tuple[Tensor, Tensor]], shape: tuple[int, int]) -> dict[str, Tensor]:
        found = [
            ((codes[:, 0::2] << 4) | codes[:, 1::2], scales.contiguous().view(self._scale_dtype))
            for codes, scales in parts
        ]
        packed, absmax = (torch.cat(column).view(-1) for column in zip(*found, strict=True))
        return {"packed": packed, self._scale_key: absmax}

    def dequantize(self, packed: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        packed = self.natural(packed)
        absmax, data, d_in = self.absmax(packed), packed.tensors["packed"], packed.shape[1]
        out = torch.empty(packed.shape, dtype=dtype, device=packed.device)
        first_row = first_block = first_byte = 0
        for rows in packed.segments:
            count = rows * d_in
            flat = out[first_row : first_row + rows].view(-1)
            for start in range(0, count, slice_elements(out.device)):
                size = min(slice_elements(out.device), count - start)
                begin = first_byte + start // 2
                pairs = data[begin : begin + -(-size // 2)]
                codes = torch.stack((pairs >> 4, pairs & 15), dim=1).view(-1)[:size]
                block = first_block + start // BLOCK
                values_NK = _blocks(_values(codes))
                values_NK *= absmax[block : block + values_NK.shape[0], None]
                flat[start : start + size] = values_NK.view(-1)[:size]
            first_row, first_byte = first_row + rows, first_byte + -(-count // 2)
            first_block += -(-count // BLOCK)
        return out

    def factored(self, packed: PackedWeight, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The weight itself: neither quantiles nor scales are short numbers, so nothing is exact in bfloat16."""
        return self.dequantize(packed, dtype), None

    def nbytes(self, shape: tuple[int, int], segments: Sequence[int] | None = None, itemsize: int = 2) -> int:
        del itemsize  # storage does not depend on the compute type
        total = 0
        for rows in segments or shape[:1]:
            blocks = -(-rows * shape[1] // BLOCK)
            scales = double_quant.nbytes(blocks) if self.double_quant else 4 * blocks
            total += -(-rows * shape[1] // 2) + scales
        return total

    def natural_rows(self, packed: PackedWeight, start: int, stop: int) -> PackedWeight:
        """As `WeightFormat.rows`, where a row begins a block (and, doubly quantized, at the ends of projections).

        Raises:
            FormatError: the row is in the middle of a block.
        """
        begin, end = (self._place(packed, row) for row in (start, stop))
        first, last, counts = segment_range(packed.segments, start, stop)
        ranges = {
            "packed": (begin[0], end[0]),
            "absmax": (begin[1], end[1]),
            "absmax_codes": (begin[1], end[1]),
            "absmax_scales": (begin[2], end[2]),
            "absmax_offset": (first, last),
        }
        tensors = {key: tensor[slice(*ranges[key])] for key, tensor in packed.tensors.items()}
        shape = (stop - start, packed.shape[1])
        return replace(packed, shape=shape, tensors=tensors, segments=counts, kept_OI=None)

    def _place(self, packed: PackedWeight, row: int) -> tuple[int, int, int]:
        """(bytes, blocks, groups of blocks) stored before a row."""
        stored_bytes = blocks = groups = 0
        for rows in packed.segments:
            count = min(row, rows) * packed.shape[1]
            whole = row >= rows
            if not whole and (count % BLOCK or (self.double_quant and count % (BLOCK * double_quant.GROUP))):
                raise FormatError(
                    "a block of scales straddles this row of an NF4 weight",
                    got=f"row {row} of a part with {packed.shape[1]} inputs",
                    expected="a row that begins a block",
                )
            stored_bytes += -(-count // 2)
            blocks += -(-count // BLOCK)
            groups += -(-count // (BLOCK * double_quant.GROUP))
            row -= min(row, rows)
        return stored_bytes, blocks, groups


def _search(w_NK: Tensor, absmax_N: Tensor, importance_NK: Tensor | None) -> Tensor:
    """The scales that `mse` chooses, float32 [N]."""

    def round_trip(w_NK: Tensor, scale_N: Tensor) -> Tensor:
        return _values(_codes(w_NK * _reciprocal(scale_N)[:, None])).mul_(scale_N[:, None])

    tried = [absmax_N, *(factor * absmax_N for factor in _FACTORS)]
    best_N = least_error(w_NK, tried, round_trip, importance_NK)
    q_NK = _values(_codes(w_NK * _reciprocal(best_N)[:, None]))
    weighted_NK = q_NK if importance_NK is None else q_NK * importance_NK
    fitted_N = (weighted_NK * w_NK).sum(-1) / (weighted_NK * q_NK).sum(-1)
    usable_N = torch.isfinite(fitted_N) & (fitted_N > 0)
    return least_error(w_NK, [best_N, torch.where(usable_N, fitted_N, best_N)], round_trip, importance_NK)


def _importance(importance_I: Tensor | None, start: int, count: int) -> Tensor | None:
    """Weights of `count` elements of a flattened projection, from `start` on, as blocks."""
    if importance_I is None:
        return None
    index = torch.arange(start, start + count, device=importance_I.device)
    return _blocks(importance_I[index % importance_I.numel()])


def _block_counts(segments: Sequence[int], d_in: int) -> list[int]:
    return [-(-rows * d_in // BLOCK) for rows in segments]


def _projections(weight: Tensor, segments: Sequence[int]) -> Iterator[Tensor]:
    """Each fused part, flattened."""
    for part in weight.split(list(segments)):
        yield part.reshape(-1)


def _blocks(flat: Tensor) -> Tensor:
    """float32 [N, 64], padded with zeros."""
    return torch.nn.functional.pad(flat.float(), (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
