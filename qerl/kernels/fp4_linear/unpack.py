# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""MXFP4 and NF4 that have no tiles (NF4's blocks straddle rows, a scale of MXFP4 is above 2) to a dense matrix in one pass: the bytes are read
once, the values written once. Tiles have `dense.dequantize_tiles`.

The values are those of the formats' own `dequantize`, to the bit: a code's value times its scale in float32, then cast.
"""

from __future__ import annotations

from functools import cache
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.formats import PackedWeight, get_format
from qerl.formats.nf4 import BLOCK, QUANTILES, Nf4Format

FORMATS = ("mxfp4", "nf4", "nf4_dq")
_PAIRS = 1024
"""Bytes that a program reads."""


def unpack(weight: PackedWeight, out_OI: Tensor) -> Tensor:
    """W_hat into contiguous `out_OI` [d_out, d_in] (bfloat16 or float32), for a weight of one of `FORMATS` in its natural order."""
    assert weight.format in FORMATS and weight.order == "natural", (weight.format, weight.order)
    data, (d_out, d_in) = weight.tensors["packed"], weight.shape
    if weight.format == "mxfp4":
        width = data.shape[1]
        scales = weight.tensors["block_scales"]
        _mxfp4[(d_out, triton.cdiv(width, _PAIRS))](data, scales, out_OI, width, d_in, scales.shape[1], PAIRS=_PAIRS)
        return out_OI
    fmt = cast(Nf4Format, get_format(weight.format))
    absmax, quantiles = fmt.absmax(weight), _quantiles(data.device)
    row = byte = block = 0
    for rows in weight.segments:
        count = rows * d_in
        own = (data[byte:], absmax[block:], quantiles, out_OI[row:])
        _nf4[(triton.cdiv(count, 2 * _PAIRS),)](*own, count, BLOCK=BLOCK, PAIRS=_PAIRS)
        row, byte, block = row + rows, byte + -(-count // 2), block + -(-count // BLOCK)
    return out_OI


@cache
def _quantiles(device: torch.device) -> Tensor:
    return torch.tensor(QUANTILES, dtype=torch.float32, device=device)


@triton.jit
def _e2m1(code):
    """Value of a code of 4 bits, float32."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    normal = (((exponent + 126) << 23) | (mantissa << 22)).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent > 0, normal, mantissa.to(tl.float32) * 0.5)
    return tl.where(code & 8 != 0, -magnitude, magnitude)


@triton.jit
def _mxfp4(data, scales, out, width, d_in, blocks, PAIRS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < width
    byte = tl.load(data + row * width + pair, mask=inside, other=0).to(tl.int32)
    exponent = tl.load(scales + row * blocks + pair // 16, mask=inside, other=0).to(tl.int32)
    # 2^(e - 127); 2^-127 is no normal number.
    scale = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
    values = tl.interleave(_e2m1(byte & 15) * scale, _e2m1(byte >> 4) * scale)
    column = 2 * tl.program_id(1) * PAIRS + tl.arange(0, 2 * PAIRS)
    tl.store(out + row * d_in + column, values.to(out.dtype.element_ty), mask=column < d_in)


@triton.jit
def _nf4(data, absmax, quantiles, out, count, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * PAIRS
    pair = first + tl.arange(0, PAIRS)
    inside = 2 * pair < count
    byte = tl.load(data + pair, mask=inside, other=0).to(tl.int32)
    scale = tl.load(absmax + 2 * pair // BLOCK, mask=inside, other=0.0)
    # The even element is in the high nibble.
    even, odd = tl.load(quantiles + (byte >> 4)) * scale, tl.load(quantiles + (byte & 15)) * scale
    place = 2 * first + tl.arange(0, 2 * PAIRS)
    tl.store(out + place, tl.interleave(even, odd).to(out.dtype.element_ty), mask=place < count)
