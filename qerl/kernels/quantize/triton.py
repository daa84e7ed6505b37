# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""NVFP4, rounded to nearest as compressed-tensors does: one pass for the largest magnitude, one for scales and codes.

Every step is the float32 operation of `qerl.formats.nvfp4`, with divisions rounded to nearest, so the bytes are equal. E4M3 and
E2M1 are rounded in integer and float32 arithmetic, not by the hardware's conversions, which older cards lack.

Legend: O output rows, I inputs, B blocks of 16 of a row, N blocks of a program.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.formats import PackedWeight
from qerl.formats.base import check_finite, check_weight
from qerl.formats.nvfp4 import BLOCK, global_scale
from qerl.kernels.quantize import reference
from qerl.kernels.sizes import ceil_div

_PROGRAM_BLOCKS, _PROGRAM_ELEMENTS = 256, 8192


def quantize(
    weight_OI: Tensor, format_name: str, method: str, rounding: str, segments: Sequence[int] | None, name: str
) -> PackedWeight:
    """See `qerl.kernels.quantize.quantize`."""
    if (format_name, method, rounding) != ("nvfp4", "rtn", "ct") or weight_OI.dtype == torch.float64:
        return reference.quantize(weight_OI, format_name, method, rounding, segments, name)
    rows = check_weight(weight_OI, segments, name)
    (d_out, d_in), device = weight_OI.shape, weight_OI.device
    weight_OI = weight_OI.contiguous()
    count = weight_OI.numel()
    partial = torch.empty(ceil_div(count, _PROGRAM_ELEMENTS), dtype=torch.float32, device=device)
    _largest[(len(partial),)](weight_OI, partial, count, SIZE=_PROGRAM_ELEMENTS, num_warps=4)
    reach = partial.amax()
    divisor = global_scale(reach)
    blocks = -(-d_in // BLOCK)
    packed = torch.empty(d_out, blocks * BLOCK // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(d_out, blocks, dtype=torch.uint8, device=device)
    _quantize[(ceil_div(scales.numel(), _PROGRAM_BLOCKS),)](
        weight_OI,
        divisor,
        packed,
        scales,
        scales.numel(),
        blocks,
        d_in,
        WHOLE=d_in % BLOCK == 0,
        N=_PROGRAM_BLOCKS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    # Asked last: the answer waits for the device, which has both passes to do by then.
    check_finite(reach, name)
    tensors = {
        "packed": packed,
        "block_scales": scales.view(torch.float8_e4m3fn),
        "global_scale": divisor.repeat(len(rows)),
    }
    return PackedWeight(format="nvfp4", shape=(d_out, d_in), tensors=tensors, segments=rows)


@triton.jit
def _largest(weight, partial, count, SIZE: tl.constexpr):
    """Largest magnitude of a stretch; NaN if there is one in it."""
    places = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    value = tl.load(weight + places, mask=places < count, other=0.0).to(tl.float32)
    broken = tl.max((value != value).to(tl.int32), axis=0)
    highest = tl.max(tl.where(value == value, tl.abs(value), 0.0), axis=0)
    tl.store(partial + tl.program_id(0), tl.where(broken > 0, float("nan"), highest))


@triton.jit
def _e4m3(value):
    """(byte, its value) nearest to each float32 in [0, 448], ties to even; a byte of 0 becomes 0.125 (byte 32)."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
    normal = (rounded >> 20) - ((127 - 7) << 3)
    # Below 2^-6 the numbers are multiples of 2^-9; adding and subtracting 1.5 * 2^23 rounds to integers.
    steps = (value * 512.0 + 12582912.0) - 12582912.0
    small = value < 0.015625
    byte = tl.where(small, steps.to(tl.int32), normal)
    exact = tl.where(small, steps * (1.0 / 512.0), rounded.to(tl.float32, bitcast=True))
    return tl.where(byte == 0, 32, byte), tl.where(byte == 0, 0.125, exact)


@triton.jit
def _e2m1(x):
    """Code nearest to each float32, ties to the even code, magnitudes above 6 saturated; the sign is set where x < 0."""
    magnitude = tl.minimum(tl.abs(x), 6.0)
    binade = tl.maximum((magnitude.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 1.0)
    large = binade * 6291456.0
    halves = (((magnitude + large) - large) * 2.0).to(tl.int32)
    # 0 1 2 3 4 6 8 12 halves have the codes 0 to 7.
    code = tl.where(halves <= 4, halves, tl.where(halves == 6, 5, tl.where(halves == 8, 6, 7)))
    return code | tl.where(x < 0.0, 8, 0)


@triton.jit
def _quantize(weight, divisor, packed, scales, count, blocks, d_in, WHOLE: tl.constexpr, N: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    inside = block < count
    element = tl.arange(0, 16)
    if WHOLE:
        places = block[:, None] * 16 + element[None, :]
        mask = inside[:, None]
    else:
        row, first = block // blocks, (block % blocks) * 16
        places = row[:, None] * d_in + first[:, None] + element[None, :]
        mask = inside[:, None] & (first[:, None] + element[None, :] < d_in)
    w = tl.load(weight + places, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(divisor)
    highest = tl.max(tl.abs(w), axis=1)
    byte, value = _e4m3(tl.minimum(g * tl.div_rn(highest, 6.0), 448.0))
    step = tl.div_rn(value, g)
    code = _e2m1(tl.div_rn(w, tl.broadcast_to(step[:, None], (N, 16))))
    low, high = tl.split(tl.reshape(code, (N, 8, 2)))
    pair = tl.arange(0, 8)
    tl.store(packed + block[:, None] * 8 + pair[None, :], (low | (high << 4)).to(tl.uint8), mask=inside[:, None])
    tl.store(scales + block, byte.to(tl.uint8), mask=inside)
