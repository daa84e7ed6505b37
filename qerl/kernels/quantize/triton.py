# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""NVFP4, rounded to nearest as compressed-tensors or torchao do: one pass for the largest magnitude, one for scales and codes.

Every step gives the result of the float32 operation of `qerl.formats.nvfp4`, so the bytes are equal. E4M3 and E2M1 are rounded in
integer and float32 arithmetic, not by the hardware's conversions, which older cards lack. A block is a thread's own: 16 weights by
two loads, their largest without a shuffle, 8 codes a word.

Legend: O output rows, I inputs, B blocks of 16 of a row, N blocks of a program.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.formats import PackedWeight
from qerl.formats.base import ROUNDINGS, check_finite, check_weight
from qerl.formats.nvfp4 import BLOCK
from qerl.kernels.quantize import fp8, mxfp4, nf4, reference
from qerl.kernels.quantize.words import e4m3, words
from qerl.kernels.sizes import ceil_div, power_of_2

_FORMATS = ("nvfp4", "mxfp4", "nf4", "nf4_dq", "fp8")
_PROGRAM_ELEMENTS = 16384
_PROGRAM_BLOCKS = 128


def quantize(
    weight_OI: Tensor, format_name: str, method: str, rounding: str, segments: Sequence[int] | None, name: str
) -> PackedWeight:
    """See `qerl.kernels.quantize.quantize`."""
    known = format_name in _FORMATS and method == "rtn" and rounding in ROUNDINGS
    wide = format_name == "fp8" and weight_OI.shape[-1] > fp8.LONGEST_ROW
    if not known or wide or weight_OI.dtype == torch.float64:
        return reference.quantize(weight_OI, format_name, method, rounding, segments, name)
    rows = check_weight(weight_OI, segments, name)
    if format_name == "nvfp4":
        packed, reach = rounded(weight_OI, rows, rounding)
    elif format_name == "mxfp4":
        packed, reach = mxfp4.rounded(weight_OI, rows, rounding)
    elif format_name == "fp8":
        packed, reach = fp8.rounded(weight_OI, rows)
    else:
        packed, reach = nf4.rounded(weight_OI, rows, doubly=format_name == "nf4_dq")
    # Asked last: the answer waits for the device, which has all passes to do by then.
    check_finite(reach, name)
    return packed


def rounded(
    weight_OI: Tensor,
    rows: tuple[int, ...],
    rounding: str = "ct",
    *,
    reach_1: Tensor | None = None,
    fused: bool | None = None,
) -> tuple[PackedWeight, Tensor]:
    """(the weight in NVFP4, its largest magnitude float32 [1]), without waiting for the device; meaningless where that is not finite.

    Args:
        weight_OI: float32, bfloat16 or float16.
        rows: of the fused parts.
        rounding: `ct` or `torchao`.
        reach_1: the largest magnitude float32 [1], if it is known: the weight is read once then, not twice.
        fused: quotients by reciprocals and fused multiply-adds, which a device rounds once (Triton's interpreter does not); None on a device
            alone. Not of `torchao`, which multiplies.
    """
    (d_out, d_in), device = weight_OI.shape, weight_OI.device
    weight_OI = weight_OI.contiguous()
    count, blocks = weight_OI.numel(), ceil_div(d_in, BLOCK)
    if reach_1 is None:
        reach = torch.zeros(1, dtype=torch.int32, device=device)
        _largest[(ceil_div(count, _PROGRAM_ELEMENTS),)](weight_OI, reach, count, SIZE=_PROGRAM_ELEMENTS, num_warps=8)
    else:
        reach = reach_1.view(torch.int32)
    packed = torch.empty(d_out, blocks, 2, dtype=torch.int32, device=device)
    scales = torch.empty(d_out, blocks, dtype=torch.uint8, device=device)
    divisor = torch.empty(len(rows), dtype=torch.float32, device=device)
    _quantize[(ceil_div(scales.numel(), _PROGRAM_BLOCKS),)](
        weight_OI,
        reach,
        packed,
        scales,
        divisor,
        len(rows),
        scales.numel(),
        blocks,
        d_in,
        WHOLE=d_in % BLOCK == 0,
        FUSED=weight_OI.is_cuda if fused is None else fused,
        CORRECTIONS=2 if weight_OI.dtype == torch.float32 else 1,
        TORCHAO=rounding == "torchao",
        PARTS=power_of_2(len(rows)),
        N=_PROGRAM_BLOCKS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    tensors = {
        "packed": packed.view(torch.uint8).view(d_out, blocks * BLOCK // 2),
        "block_scales": scales.view(torch.float8_e4m3fn),
        "global_scale": divisor,
    }
    return PackedWeight(format="nvfp4", shape=(d_out, d_in), tensors=tensors, segments=rows), reach.view(torch.float32)


@triton.jit
def _largest(weight, reach, count, SIZE: tl.constexpr):
    """Bits of the largest magnitude, as an integer: those of floats without a sign are ordered as the floats are, NaN last."""
    places = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    value = tl.load(weight + places, mask=places < count, other=0.0).to(tl.float32)
    tl.atomic_max(reach, tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0), sem="relaxed")


@triton.jit
def _scale(value):
    """(byte, its value) of the E4M3 number nearest to each float32 in [0, 448]; a byte of 0 becomes 0.125 (byte 32)."""
    byte, exact = e4m3(value)
    return tl.where(byte == 0, 32, byte), tl.where(byte == 0, 0.125, exact)


@triton.jit
def _corrected(a, minus_b, inverse, CORRECTIONS: tl.constexpr):
    """a / b rounded to nearest, from 1 / b rounded to nearest, by corrections that take the error's exact value: the first brings the quotient
    within one unit of its last place, after which the second rounds correctly. Needs a fused multiply-add and numbers far from the ends of float32's range.

    One correction alone is off by a rounding only if a / b lies within 2^-23 units of the last place of a number half way between two. Of a with 11 bits or less, as
    bfloat16 and float16 have, no such quotient is on the other side of an edge between two codes (README.md); of any a, none by 6 is."""
    quotient = a * inverse
    for _ in tl.static_range(CORRECTIONS):
        quotient = tl.fma(tl.fma(quotient, minus_b, a), inverse, quotient)
    return quotient


@triton.jit
def _quotient(w, step, FUSED: tl.constexpr, CORRECTIONS: tl.constexpr):
    """w / step rounded to nearest, or, with one correction, on the same side of every edge between codes."""
    wide = tl.broadcast_to(step[:, None], w.shape)
    if FUSED:
        inverse = tl.broadcast_to(tl.div_rn(1.0, step)[:, None], w.shape)
        # The step is negated, once a block: a quotient would be by an instruction of its own.
        return _corrected(w, -wide, inverse, CORRECTIONS)
    else:
        return tl.div_rn(w, wide)


@triton.jit
def _quantize(
    weight,
    reach,
    packed,
    scales,
    divisor,
    parts,
    count,
    blocks,
    d_in,
    WHOLE: tl.constexpr,
    FUSED: tl.constexpr,
    CORRECTIONS: tl.constexpr,
    TORCHAO: tl.constexpr,
    PARTS: tl.constexpr,
    N: tl.constexpr,
):
    # A number over a tensor is its reciprocal times the number, as torch divides.
    reached = tl.load(reach).to(tl.float32, bitcast=True)
    g = tl.div_rn(1.0, reached) * 2688.0
    if TORCHAO:
        # The largest float32 where G is beyond it, and 1 where its reciprocal is nothing.
        p = tl.div_rn(reached, 2688.0)
        g = tl.where(p > 0.0, tl.minimum(g, 3.4028234663852886e38), 1.0)
        p = tl.where(p > 0.0, p, 1.0)
    else:
        g = tl.where(g == float("inf"), 1.0, g)
    # From the end of the weight, which the pass for the largest magnitude has left in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    if program == 0:
        part = tl.arange(0, PARTS)
        tl.store(divisor + part, tl.zeros((PARTS,), tl.float32) + g, mask=part < parts)
    block = program.to(tl.int64) * N + tl.arange(0, N)
    inside = block < count
    element = tl.arange(0, 8)
    if WHOLE:
        places = block[:, None] * 16 + element[None, :]
        mask, later = inside[:, None], inside[:, None]
    else:
        row, first = block // blocks, (block % blocks) * 16
        places = row[:, None] * d_in + first[:, None] + element[None, :]
        mask = inside[:, None] & (first[:, None] + element[None, :] < d_in)
        later = inside[:, None] & (first[:, None] + element[None, :] + 8 < d_in)
    low = tl.load(weight + places, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(weight + places + 8, mask=later, other=0.0).to(tl.float32)
    highest = tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1))
    if TORCHAO:
        byte, value = _scale(tl.minimum(tl.maximum(tl.div_rn(tl.div_rn(highest, 6.0), p), 0.015625), 448.0))
        factor = tl.broadcast_to(tl.div_rn(tl.div_rn(1.0, p), value)[:, None], low.shape)
        # Zeros times an overflowed factor would be NaN; the sign is the weight's own, that of -0, too.
        first_word = words(low, tl.where(low == 0.0, low, low * factor), True)
        second_word = words(high, tl.where(high == 0.0, high, high * factor), True)
    elif FUSED and (g > 1e-15) & (g < 1e15):
        # Where the magnitudes are so small that the quotient's error is not exact, the scale is 0 whatever it is.
        sixth = _corrected(highest, -6.0, 0.16666667163372040, 1)
        byte, value = _scale(tl.minimum(g * sixth, 448.0))
        step = _corrected(value, -g, tl.div_rn(1.0, g), 2)
        first_word = words(low, _quotient(low, step, True, CORRECTIONS), True)
        second_word = words(high, _quotient(high, step, True, CORRECTIONS), True)
    else:
        byte, value = _scale(tl.minimum(g * tl.div_rn(highest, 6.0), 448.0))
        step = tl.div_rn(value, g)
        first_word = words(low, _quotient(low, step, False, 2), False)
        second_word = words(high, _quotient(high, step, False, 2), False)
    tl.store(packed + block * 2, first_word, mask=inside)
    tl.store(packed + block * 2 + 1, second_word, mask=inside)
    tl.store(scales + block, byte.to(tl.uint8), mask=inside)
