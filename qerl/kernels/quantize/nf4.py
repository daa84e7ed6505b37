# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""NF4, rounded to nearest, in one pass: a block of 64 knows its scale by itself.

The arithmetic is that of `qerl.formats.nf4`: x = w * (1 / absmax), and its code is the number of middles between neighboring quantiles that x is
above. The 32 cells [(k - 16.5) / 15, (k - 15.5) / 15] hold at most one middle each: a table says how many are below the cell of x, and the one comparison that
is left is with the cell's own. Rounding x to its cell is monotone, so this is exact however x is rounded at a cell's edge. Doubly quantized scales are
made of the float32 ones in a second and small pass (one number for 64 weights), by the table of `qerl.formats.double_quant`, after their mean. Weights are a
thread's own by eights, and eight threads have a block.

Legend: n elements of a flattened projection, N blocks of a program.
"""

from __future__ import annotations

import struct
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.formats import PackedWeight, double_quant
from qerl.formats.nf4 import BLOCK, QUANTILES, SMALLEST_ABSMAX
from qerl.kernels.sizes import ceil_div

_PROGRAM_BLOCKS = 128
_PROGRAM_GROUPS = 4
_CELLS, _CELLS_OF_ONE, _MIDDLE_CELL = 32, 15, 16


def rounded(weight_OI: Tensor, rows: tuple[int, ...], *, doubly: bool) -> tuple[PackedWeight, Tensor]:
    """(the weight in NF4, float32 [1]: 0, or infinity or NaN where the weight holds one), without waiting for the device.

    Args:
        weight_OI: float32, bfloat16 or float16.
        rows: of the fused parts.
        doubly: quantize the scales, too.
    """
    (d_out, d_in), device = weight_OI.shape, weight_OI.device
    flat = weight_OI.contiguous().view(-1)
    bad = torch.zeros(1, dtype=torch.int32, device=device)
    counts = [part * d_in for part in rows]
    # Where projections are whole blocks they are one row of blocks.
    whole = all(count % BLOCK == 0 for count in counts)
    found = [_projection(part, bad) for part in ((flat,) if whole else flat.split(counts))]
    packed, absmax = (column[0] if len(column) == 1 else torch.cat(column) for column in zip(*found, strict=True))
    scales = {"absmax": absmax}
    if doubly:
        scales = _doubly(absmax, [ceil_div(count, BLOCK) for count in counts])
    name = "nf4_dq" if doubly else "nf4"
    stored = PackedWeight(format=name, shape=(d_out, d_in), tensors={"packed": packed, **scales}, segments=rows)
    return stored, bad.view(torch.float32)


def _projection(flat: Tensor, bad: Tensor) -> tuple[Tensor, Tensor]:
    """(bytes of codes uint8 [ceil(n / 2)], scales float32 [ceil(n / 64)]) of one projection; notes what is not finite."""
    count = flat.numel()
    blocks = ceil_div(count, BLOCK)
    words = torch.empty(blocks, 8, dtype=torch.int32, device=flat.device)
    absmax = torch.empty(blocks, dtype=torch.float32, device=flat.device)
    _quantize_nf4[(ceil_div(blocks, _PROGRAM_BLOCKS),)](
        flat,
        words,
        absmax,
        bad,
        count,
        blocks,
        _cells(flat.device),
        SMALLEST=struct.unpack("i", struct.pack("f", SMALLEST_ABSMAX))[0],
        TAIL=count % BLOCK != 0,
        CELLS=_CELLS,
        CELLS_OF_ONE=float(_CELLS_OF_ONE),
        # In [2^23, 2^24), where float32 numbers are whole ones.
        MIDDLE_CELL=float((1 << 23) + _MIDDLE_CELL),
        N=_PROGRAM_BLOCKS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return words.view(torch.uint8).view(-1)[: ceil_div(count, 2)], absmax


def _doubly(absmax: Tensor, counts: list[int]) -> dict[str, Tensor]:
    """The stored tensors of `double_quant`, projections of `counts` scales one after the other."""
    device, group = absmax.device, double_quant.GROUP
    codes = torch.empty(absmax.numel(), dtype=torch.uint8, device=device)
    groups = [ceil_div(count, group) for count in counts]
    scales = torch.empty(sum(groups), dtype=torch.float32, device=device)
    parts = absmax.split(counts)
    offsets = torch.cat([double_quant.offset(part) for part in parts])
    for number, (part, codes_N, scales_G) in enumerate(
        zip(parts, codes.split(counts), scales.split(groups), strict=True)
    ):
        _quantize_scales[(ceil_div(len(scales_G), _PROGRAM_GROUPS),)](
            part,
            offsets[number],
            double_quant.table(device),
            codes_N,
            scales_G,
            len(part),
            len(scales_G),
            STEP=double_quant.TABLE_STEP,
            LAST=double_quant.TABLE_SIZE - 1,
            GROUP=group,
            N=_PROGRAM_GROUPS,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return {"absmax_codes": codes, "absmax_scales": scales, "absmax_offset": offsets}


@cache
def _middles() -> tuple[float, ...]:
    """The 15 numbers half way between quantiles, rounded to float32 as the format rounds them."""
    quantiles = torch.tensor(QUANTILES)
    return tuple(((quantiles[:-1] + quantiles[1:]) / 2).tolist())


@cache
def _cells(device: torch.device) -> Tensor:
    """int32 [64]: the bits of the middle of each cell, or of infinity where it has none, and then the number of middles below each. Either half is one
    line of the cache, of which lanes may read any words at once."""
    middle_of = {round(_CELLS_OF_ONE * middle) + _MIDDLE_CELL: middle for middle in _middles()}
    assert len(middle_of) == len(_middles()), "a cell has two middles"
    middles = torch.tensor([middle_of.get(cell, float("inf")) for cell in range(_CELLS)])
    below = torch.tensor([sum(other < cell for other in middle_of) for cell in range(_CELLS)], dtype=torch.int32)
    return torch.cat((middles.view(torch.int32), below)).to(device)


@triton.jit
def _quantize_nf4(
    weight,
    words,
    scales,
    bad,
    count,
    blocks,
    cells,
    SMALLEST: tl.constexpr,
    TAIL: tl.constexpr,
    CELLS: tl.constexpr,
    CELLS_OF_ONE: tl.constexpr,
    MIDDLE_CELL: tl.constexpr,
    N: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * N
    left = tl.minimum(blocks - first, N).to(tl.int32)
    block, word, element = tl.arange(0, N), tl.arange(0, 8 * N), tl.arange(0, 8)[None, :]
    inside, used = block < left, word < 8 * left
    # Neighbouring threads have neighbouring words of eight weights, and eight of them a block.
    place = word[:, None] * 8 + element
    mask = used[:, None]
    if TAIL:
        mask = first * 64 + place < count
    w = tl.load(weight + first * 64 + place, mask=mask, other=0.0).to(tl.float32)
    # Bits of floats without a sign are ordered as the floats are, NaN last.
    largest = tl.max(tl.reshape(tl.max(w.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), (N, 8)), axis=1)
    tl.atomic_max(bad + block * 0, largest, mask=inside & (largest >= 0x7F800000), sem="relaxed")
    least = tl.maximum(largest, SMALLEST).to(tl.float32, bitcast=True)
    absmax = largest.to(tl.float32, bitcast=True)
    x = w * _of_words(tl.div_rn(1.0, least), N)
    if TAIL:
        # A last, partial block is divided, by a scale that is not 0.
        last = first + block == blocks - 1
        absmax = tl.where(last, least, absmax)
        divided = tl.div_rn(w, tl.broadcast_to(_of_words(least, N), w.shape))
        x = tl.where(_of_words(last.to(tl.int32), N) == 1, divided, x)
    # What is not finite has a cell, too.
    cell = tl.fma(x, CELLS_OF_ONE, MIDDLE_CELL).to(tl.int32, bitcast=True) & (CELLS - 1)
    above = x > tl.load(cells + cell).to(tl.float32, bitcast=True)
    code = tl.load(cells + CELLS + cell) + above.to(tl.int32)
    # The even element of a pair has the high bits of its byte.
    tl.store(words + first * 8 + word, tl.sum(code << (element ^ 1) * 4, axis=1), mask=used)
    tl.store(scales + first + block, absmax, mask=inside)


@triton.jit
def _of_words(value, N: tl.constexpr):
    """[8 N, 1] of [N]: each word has its block's."""
    return tl.reshape(tl.broadcast_to(value[:, None], (N, 8)), (8 * N,))[:, None]


@triton.jit
def _quantize_scales(
    absmax,
    offset,
    table,
    codes,
    scales,
    count,
    groups,
    STEP: tl.constexpr,
    LAST: tl.constexpr,
    GROUP: tl.constexpr,
    N: tl.constexpr,
):
    group = tl.program_id(0) * N + tl.arange(0, N)
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = place < count
    # What is beyond the last scale is like the mean.
    apart = tl.where(inside, tl.load(absmax + place, mask=inside, other=0.0) - tl.load(offset), 0.0)
    largest = tl.max(apart.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
    x = apart * tl.broadcast_to(tl.div_rn(1.0, largest)[:, None], apart.shape)
    x = tl.minimum(tl.maximum(x, -1.0), 1.0)
    number = tl.floor((x + 1.0) * STEP + 0.5)
    # What is no number has a place, too.
    number = tl.where(number == number, number, 0.0).to(tl.int32)
    number = tl.minimum(tl.maximum(number, 0), LAST)
    code = tl.load(table + number)
    code = tl.where(tl.broadcast_to((largest == 0.0)[:, None], code.shape), 0, code)
    tl.store(codes + place, code.to(tl.uint8), mask=inside)
    tl.store(scales + group, largest, mask=group < groups)
