# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""FP8 of an LM head, in one pass: a row knows its divisor by itself.

The arithmetic is that of `qerl.formats.fp8`. A row is a program's own and stays in registers between its largest magnitude and its codes. Devices that convert
to E4M3 (sm_89 and later) do so; others, and the interpreter, round by integers.

Legend: O output rows, I inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.formats import PackedWeight
from qerl.formats.fp8 import LARGEST
from qerl.kernels.quantize.words import e4m3
from qerl.kernels.sizes import power_of_2

LONGEST_ROW = 1 << 16
"""Inputs, at most: what a program's registers hold."""
_CONVERTS = (8, 9)


def rounded(weight_OI: Tensor, rows: tuple[int, ...], *, converts: bool | None = None) -> tuple[PackedWeight, Tensor]:
    """(the weight in FP8, float32 [1]: 0, or infinity or NaN where the weight holds one), without waiting for the device.

    Args:
        weight_OI: float32, bfloat16 or float16, at most `LONGEST_ROW` inputs.
        rows: of the fused parts.
        converts: by the device's own conversion; None where it has one.
    """
    (d_out, d_in), device = weight_OI.shape, weight_OI.device
    weight_OI = weight_OI.contiguous()
    codes = torch.empty(d_out, d_in, dtype=torch.float8_e4m3fn, device=device)
    divisor = torch.empty(d_out, dtype=torch.float32, device=device)
    bad = torch.zeros(1, dtype=torch.int32, device=device)
    size = power_of_2(d_in)
    if converts is None:
        converts = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CONVERTS
    _quantize_fp8[(d_out,)](
        weight_OI,
        codes if converts else codes.view(torch.uint8),
        divisor,
        bad,
        d_in,
        LARGEST=LARGEST,
        LARGEST_FLOAT=torch.finfo(torch.float32).max,
        CONVERTS=converts,
        SIZE=size,
        num_warps=min(max(size // 1024, 1), 16),
        enable_fp_fusion=False,
    )
    tensors = {"codes": codes, "divisor": divisor}
    return PackedWeight(format="fp8", shape=(d_out, d_in), tensors=tensors, segments=rows), bad.view(torch.float32)


@triton.jit
def _quantize_fp8(
    weight,
    codes,
    divisor,
    bad,
    d_in,
    LARGEST: tl.constexpr,
    LARGEST_FLOAT: tl.constexpr,
    CONVERTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0)
    place = row.to(tl.int64) * d_in + tl.arange(0, SIZE)
    mask = tl.arange(0, SIZE) < d_in
    w = tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
    # Bits of floats without a sign are ordered as the floats are, NaN last.
    bits = tl.max(w.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    tl.atomic_max(bad, bits, mask=bits >= 0x7F800000, sem="relaxed")
    largest = bits.to(tl.float32, bitcast=True)
    # A number over a tensor is its reciprocal times the number, as torch divides.
    factor = tl.minimum(tl.div_rn(1.0, largest) * LARGEST, LARGEST_FLOAT)
    factor = tl.where(largest > 0.0, factor, 1.0)
    x = w * factor
    if CONVERTS:
        code = tl.minimum(tl.maximum(x, -LARGEST), LARGEST).to(codes.dtype.element_ty)
    else:
        byte, _ = e4m3(tl.minimum(tl.abs(x), LARGEST))
        code = (byte | (x.to(tl.int32, bitcast=True) >> 24 & 0x80)).to(tl.uint8)
    tl.store(codes + place, code, mask=mask)
    tl.store(divisor + row, factor)
