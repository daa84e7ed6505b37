"""The large regime and the backward pass: a tiled weight is dequantized into shared scratch, and cuBLAS multiplies.

The scratch holds V (README.md, Where the rounding is), and G stands for the divisor of sums with it. cuBLAS multiplies its float32 sums by 1 / G. Adapters are columns of the product
beside the weight's, h beside x (and the other way round in the backward pass), or in the output before it:

    y = round(([x, h] [V, B']^T) / G + bias),            B' = round(scale * G * B), zeros in the columns of other parts
    y = (x V^T) / G + c,                                 c = bias + scale * B h,           h = round(A x)

Outputs in bfloat16 are made in the first way: a young adapter adds less than half of their spacing, which one rounding of the whole sum keeps on average
and a rounding of x V^T before it is added loses, which is what cuBLAS does with a bfloat16 output that it is to add to. Float32 outputs are made in whichever way moves fewer bytes.

cuBLAS is told to add partial sums in float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from qerl.formats import PackedWeight
from qerl.formats.tiles import ROWS
from qerl.kernels.cuda import Launch
from qerl.kernels.fp4_linear.adapter import Placement, columns_of, rows_of
from qerl.kernels.fp4_linear.record import side_of
from qerl.kernels.fp4_linear.reference import add_product
from qerl.kernels.fp4_linear.shrink import shrink
from qerl.kernels.fp4_linear.tiled import TILED, by_rows
from qerl.kernels.fp4_linear.workspace import SCALE_BASE, Code, compiled, workspace

_BLOCKS_A_MULTIPROCESSOR, _BLOCKS_WITH_TABLE = 8, 4
_THREADS = 256
_STAGED_BYTES = _THREADS // 32 * 16 * 144
_STRIDE = 128
_WIDE_TOKENS = 8192
"""Tokens of one product with adapters as columns, at most: x is copied for it."""
_BYTES_AN_OPERATION = 1 / 190
"""Bytes that are moved in the time of one operation of the matrix units (4.2e12 and 790e12 a second on an H200)."""


_PREPARATION = 16_000_000
"""Bytes that are moved in the time of the small operations that put adapters beside a weight, two more than those they save."""


class _Params(ctypes.Structure):
    """`DequantizeParams` of cuda/dequantize.cu."""

    __slots__ = ()
    _fields_ = (
        ("tiles", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("side", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("n", "k", "stride", "units", "row_tiles")),
        ("scale_base", ctypes.c_uint),
    )


def forward(
    x_TI: Tensor,
    weight: PackedWeight,
    bias_O: Tensor | None,
    placements: Sequence[Placement],
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(y [T, O] in `dtype` (bfloat16 or float32), the shrunk activations x A^T [T, R] of every distinct A)."""
    tokens = x_TI.shape[0]
    shrunk = tuple(shrink(x_TI, a) for a in a_RI)
    y_TO = torch.empty(tokens, weight.shape[0], dtype=dtype, device=x_TI.device)
    if adapters_as_columns(tokens, weight, a_RI, bias_O is not None, dtype.itemsize):
        _wide(y_TO, x_TI, weight, bias_O, placements, shrunk, b_OR)
        return y_TO, shrunk
    values_OI, alphas = values(weight)
    with _Float32Sums():
        if not placements:
            _multiply(y_TO, x_TI, values_OI, alphas, bias_O)
            return y_TO, shrunk
        # Sizes that are not aligned leave no columns beside the weight's.
        sums_TO = y_TO if y_TO.dtype != torch.bfloat16 else torch.empty_like(y_TO, dtype=torch.float32)
        _start(sums_TO, bias_O, placements, shrunk, b_OR)
        for rows, alpha in alphas:
            add_product(columns_of(sums_TO, rows), x_TI, rows_of(values_OI, rows).T, alpha=alpha)
    return (y_TO if sums_TO is y_TO else y_TO.copy_(sums_TO)), shrunk


def adapters_as_columns(
    tokens: int, weight: PackedWeight, a_RI: Sequence[Tensor], bias: bool, itemsize: int = 2
) -> bool:
    """Whether adapters are columns of the product: of bfloat16 outputs wherever they can be, of others where copying x and multiplying by more
    columns is cheaper than reading and writing the output once more (twice with a bias)."""
    (d_out, d_in), ranks = weight.shape, sum(a.shape[0] for a in a_RI)
    if ranks == 0 or ranks % 8 != 0 or d_in % 8 != 0:
        return False
    if itemsize == 2:
        return weight.order == "tiles" or weight.format == "bf16"
    saved = (4 if bias else 2) * itemsize
    return weight.order == "tiles" and _worth_more_terms(tokens, d_in, d_out, ranks, saved)


def _worth_more_terms(tokens: int, terms: int, outputs: int, ranks: int, saved: int) -> bool:
    """For a token: `saved` bytes of every output, or its inputs are read and written and every output has `ranks` more terms."""
    gained = saved * outputs - 4 * terms - 2 * ranks - 2 * outputs * ranks * _BYTES_AN_OPERATION
    return ranks > 0 and tokens * gained > _PREPARATION


def _multiply(
    y_TO: Tensor, x_TI: Tensor, values_OI: Tensor, alphas: Sequence[tuple[slice, float]], bias_O: Tensor | None
) -> None:
    """y = x V^T / G + bias. cuBLAS adds the bias itself if all rows have one G (and in float32 if sizes are aligned); it is in the output
    before that otherwise."""
    aligned = values_OI.shape[0] % 8 == 0 and values_OI.shape[1] % 8 == 0
    if bias_O is not None and len(alphas) == 1 and aligned and y_TO.dtype == x_TI.dtype:
        torch.addmm(bias_O.to(y_TO.dtype), x_TI, values_OI.T, alpha=alphas[0][1], out=y_TO)
        return
    if bias_O is not None:
        y_TO.copy_(bias_O.expand_as(y_TO))
    beta = float(bias_O is not None)
    for rows, alpha in alphas:
        add_product(columns_of(y_TO, rows), x_TI, rows_of(values_OI, rows).T, beta=beta, alpha=alpha)


def _runs(tokens: int) -> Iterator[slice]:
    """The tokens of each product whose inputs are copied."""
    for start in range(0, tokens, _WIDE_TOKENS):
        yield slice(start, min(start + _WIDE_TOKENS, tokens))


def _wide(
    y_TO: Tensor,
    x_TI: Tensor,
    weight: PackedWeight,
    bias_O: Tensor | None,
    placements: Sequence[Placement],
    shrunk: Sequence[Tensor],
    b_OR: Sequence[Tensor],
) -> None:
    """Writes y, from products with adapters as columns beside the weight's."""
    tokens, d_in = x_TI.shape
    starts = list(accumulate((h.shape[1] for h in shrunk), initial=d_in))
    values_OC, alphas = values(weight, columns=starts[-1])
    values_OC[:, d_in:].zero_()
    for place, b in zip(placements, b_OR, strict=True):
        columns = slice(starts[place.a_index] + place.ranks.start, starts[place.a_index] + place.ranks.stop)
        for rows, alpha in alphas:
            inside = slice(max(rows.start, place.rows.start), min(rows.stop, place.rows.stop))
            if inside.start < inside.stop:
                own = slice(inside.start - place.rows.start, inside.stop - place.rows.start)
                torch.mul(rows_of(b, own), place.scale / alpha, out=values_OC[inside, columns])
    for some in _runs(tokens):
        x_TC = torch.cat((rows_of(x_TI, some), *(rows_of(h, some) for h in shrunk)), dim=1)
        with _Float32Sums():
            _multiply(rows_of(y_TO, some), x_TC, values_OC, alphas, bias_O)


def input_gradient(grad_TO: Tensor, weight: PackedWeight, grad_h: Sequence[Tensor], a_RI: Sequence[Tensor]) -> Tensor:
    """dX = dY W_hat + sum of dH A [T, I], bfloat16; dequantizes again."""
    (d_out, d_in), tokens = weight.shape, grad_TO.shape[0]
    grad_TI = torch.empty(tokens, d_in, dtype=grad_TO.dtype, device=grad_TO.device)
    if adapters_as_rows(tokens, weight, a_RI):
        starts = list(accumulate((a.shape[0] for a in a_RI), initial=d_out))
        values_CI, ((_, alpha),) = values(weight, rows=starts[-1])
        for start, a in zip(starts, a_RI, strict=False):
            values_CI[start : start + a.shape[0]] = a
        for some in _runs(tokens):
            grad_TC = torch.cat((rows_of(grad_TO, some), *(rows_of(h, some) / alpha for h in grad_h)), dim=1)
            with _Float32Sums():
                rows_of(grad_TI, some).addmm_(grad_TC, values_CI, beta=0.0, alpha=alpha)
        return grad_TI
    values_OI, alphas = values(weight)
    with _Float32Sums():
        for index, (h, a) in enumerate(zip(grad_h, a_RI, strict=True)):
            grad_TI.addmm_(h, a, beta=float(index > 0))
        for index, (rows, alpha) in enumerate(alphas):
            beta = float(index > 0 or len(a_RI) > 0)
            grad_TI.addmm_(columns_of(grad_TO, rows), rows_of(values_OI, rows), beta=beta, alpha=alpha)
    return grad_TI


def adapters_as_rows(tokens: int, weight: PackedWeight, a_RI: Sequence[Tensor]) -> bool:
    """As `adapters_as_columns`, for the product with the transposed weight; its rows then have one G."""
    (d_out, d_in), ranks = weight.shape, sum(a.shape[0] for a in a_RI)
    aligned = d_out % 8 == 0 and d_in % 8 == 0 and ranks % 8 == 0
    return (
        weight.order == "tiles"
        and len(weight.segments) == 1
        and aligned
        and _worth_more_terms(tokens, d_out, d_in, ranks, 4)
    )


class _Float32Sums:
    """No partial sums in bfloat16 inside. A class, since a generator as context manager takes the host twice as long."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def __exit__(self, *error: object) -> None:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = self._before


def values(
    weight: PackedWeight, *, rows: int | None = None, columns: int | None = None
) -> tuple[Tensor, tuple[tuple[slice, float], ...]]:
    """(V bfloat16 [d_out, d_in], output rows with the same 1 / G, each with it).

    V is kept, or in scratch that the next call overwrites. A tiled weight may be given more rows or columns, which are left as they are; it
    is in scratch then, and so is an unquantized one.
    """
    space = workspace(weight.device)
    if weight.kept_OI is not None and rows is None and columns is None:
        out_OI = weight.kept_OI
    else:
        out_OI = _unpacked(weight, space.scratch(rows or weight.shape[0], columns or weight.shape[1]))
    return out_OI, _joined(weight.segments, row_alphas(weight))


@lru_cache(maxsize=1024)
def _joined(segments: tuple[int, ...], alphas: tuple[float, ...]) -> tuple[tuple[slice, float], ...]:
    """Rows of neighboring segments with the same 1 / G, each run with it."""
    found: list[tuple[slice, float]] = []
    for stop, count, alpha in zip(accumulate(segments), segments, alphas, strict=True):
        start = found.pop()[0].start if found and found[-1][1] == alpha else stop - count
        found.append((slice(start, stop), alpha))
    return tuple(found)


def row_alphas(weight: PackedWeight) -> tuple[float, ...]:
    """What sums with V are multiplied by, of every segment. The first call of a weight that stores divisors waits for the device."""
    if weight.order != "tiles":
        return (1.0,) * len(weight.segments)
    assert not by_rows(weight), (weight.format, weight.shape)
    return workspace(weight.device).alphas(weight)


def _unpacked(weight: PackedWeight, out_OI: Tensor) -> Tensor:
    if weight.order == "tiles":
        return dequantize_tiles(weight, out_OI)
    if weight.format == "bf16":
        out_OI[: weight.shape[0], : weight.shape[1]].copy_(weight.tensors["weight"])
        return out_OI
    from qerl.kernels.fp4_linear.unpack import unpack  # needs Triton, which a CPU may lack

    return unpack(weight, out_OI)


def keep(weight: PackedWeight) -> PackedWeight:
    """The weight with V kept beside it: 2 bytes a number, but for an unquantized one, which is V. Waits for the device."""
    if weight.format == "bf16":
        return replace(weight, kept_OI=weight.tensors["weight"])
    row_alphas(weight)  # found here, since a capture could not wait for them
    out_OI = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    return replace(weight, kept_OI=_unpacked(weight, out_OI))


def unpacked_rows(weight: PackedWeight, start: int, stop: int) -> Tensor:
    """V of output rows [start, stop) of a tiled weight, `start` a multiple of 16: bfloat16, kept, or in scratch that the next call overwrites."""
    if weight.kept_OI is not None:
        return weight.kept_OI[start:stop]
    assert start % ROWS == 0, start
    assert "groups" not in weight.tensors, "groups of doubly quantized scales are of whole weights"
    tiles = weight.tensors["tiles"][start // ROWS : -(-stop // ROWS)]
    shape = (stop - start, weight.shape[1])
    part = replace(weight, shape=shape, tensors={**weight.tensors, "tiles": tiles}, kept_OI=None)
    return dequantize_tiles(part, workspace(weight.device).scratch(*part.shape))


def macros(name: str) -> dict[str, int]:
    """Compile-time constants of cuda/dequantize.cu for the format called `name`."""
    return TILED[name].macros(_STRIDE)


@cache
def code(name: str) -> Code:
    """What dequantizes the format called `name`."""
    return Code("dequantize", tuple(macros(name).items()))


def divisors(weight: PackedWeight) -> Tensor:
    """What sums with V are divided by, float32 [d_out], of a tiled weight."""
    if by_rows(weight):
        return weight.tensors["divisor"]
    stored = weight.tensors.get("global_scale")
    if stored is None:
        return torch.full((weight.shape[0],), TILED[weight.format].divisor, device=weight.device)
    return torch.cat([scale.expand(rows) for scale, rows in zip(stored, weight.segments, strict=True)])


def dequantize_tiles(weight: PackedWeight, out_OI: Tensor) -> Tensor:
    """V of a tiled weight into the first columns of bfloat16 `out_OI` [d_out, at least d_in]; one pass."""
    tiles = weight.tensors["tiles"]
    row_tiles, units, _ = tiles.shape
    space = workspace(weight.device)
    params = _Params(
        tiles.data_ptr(),
        out_OI.data_ptr(),
        side_of(weight),
        *weight.shape,
        out_OI.stride(0),
        units,
        row_tiles,
        SCALE_BASE,
    )
    launch = _launch(weight.format, row_tiles * units, space.multiprocessors)
    compiled(space.device, *code(weight.format)).launch(launch, params)
    return out_OI


@cache
def _launch(name: str, tiles: int, multiprocessors: int) -> Launch:
    """The geometry of dequantizing so many tiles of a format."""
    tile = TILED[name]
    most = multiprocessors * (_BLOCKS_WITH_TABLE if tile.looks_up else _BLOCKS_A_MULTIPROCESSOR)
    return Launch(
        grid=min(-(-tiles * 32 // _THREADS), most), block=_THREADS, shared=_STAGED_BYTES + tile.table_bytes(_STRIDE)
    )


def _start(
    y_TO: Tensor,
    bias_O: Tensor | None,
    placements: Sequence[Placement],
    shrunk: Sequence[Tensor],
    b_OR: Sequence[Tensor],
) -> None:
    """Writes bias + scale * B h to the output, rounded to its type."""
    covered = sum(place.rows.stop - place.rows.start for place in placements)
    if covered < y_TO.shape[1]:
        y_TO.copy_(bias_O.expand_as(y_TO)) if bias_O is not None else y_TO.zero_()
    for place, b in zip(placements, b_OR, strict=True):
        part_TO, h_TR = columns_of(y_TO, place.rows), columns_of(shrunk[place.a_index], place.ranks)
        if bias_O is None:
            add_product(part_TO, h_TR, b.T, beta=0.0, alpha=place.scale)
        elif y_TO.dtype != h_TR.dtype:
            part_TO.copy_(bias_O[place.rows].expand_as(part_TO))
            add_product(part_TO, h_TR, b.T, alpha=place.scale)
        else:
            bias = bias_O[place.rows].to(y_TO.dtype)
            torch.addmm(bias, h_TR, b.T, alpha=place.scale, out=part_TO)
