# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""MXFP4, rounded to nearest as compressed-tensors or torchao do, in one pass: a block of 32 knows its scale by itself.

The arithmetic is that of `qerl.formats.mxfp4`: the scale is a power of two, so quotients are exact products. Codes and their words are those of
NVFP4 (`triton`). A block is a thread's own: four loads of eight weights, four words of codes.

Legend: O output rows, I inputs, N blocks of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.formats import PackedWeight
from qerl.formats.mxfp4 import BLOCK
from qerl.kernels.quantize.words import words
from qerl.kernels.sizes import ceil_div

_PROGRAM_BLOCKS = 128


def rounded(
    weight_OI: Tensor, rows: tuple[int, ...], rounding: str = "ct", *, fused: bool | None = None
) -> tuple[PackedWeight, Tensor]:
    """(the weight in MXFP4, float32 [1]: 0, or infinity or NaN where the weight holds one), without waiting for the device.

    Args:
        weight_OI: float32, bfloat16 or float16.
        rows: of the fused parts.
        rounding: `ct` or `torchao`.
        fused: signs by fused multiply-adds, as of `triton.rounded`; None on a device alone.
    """
    (d_out, d_in), device = weight_OI.shape, weight_OI.device
    weight_OI = weight_OI.contiguous()
    blocks = ceil_div(d_in, BLOCK)
    packed = torch.empty(d_out, blocks, 4, dtype=torch.int32, device=device)
    scales = torch.empty(d_out, blocks, dtype=torch.uint8, device=device)
    bad = torch.zeros(1, dtype=torch.int32, device=device)
    _quantize_mxfp4[(ceil_div(scales.numel(), _PROGRAM_BLOCKS),)](
        weight_OI,
        packed,
        scales,
        bad,
        scales.numel(),
        blocks,
        d_in,
        WHOLE=d_in % BLOCK == 0,
        FUSED=weight_OI.is_cuda if fused is None else fused,
        TORCHAO=rounding == "torchao",
        N=_PROGRAM_BLOCKS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    tensors = {"packed": packed.view(torch.uint8).view(d_out, blocks * BLOCK // 2), "block_scales": scales}
    return PackedWeight(format="mxfp4", shape=(d_out, d_in), tensors=tensors, segments=rows), bad.view(torch.float32)


@triton.jit
def _eight(weight, block, inside, blocks, d_in, FIRST: tl.constexpr, WHOLE: tl.constexpr):
    """Weights FIRST to FIRST + 7 of each block, float32 [N, 8]."""
    element = FIRST + tl.arange(0, 8)[None, :]
    if WHOLE:
        places = block[:, None] * 32 + element
        mask = inside[:, None]
    else:
        column = (block % blocks * 32)[:, None] + element
        places = (block // blocks)[:, None] * d_in + column
        mask = inside[:, None] & (column < d_in)
    return tl.load(weight + places, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _coded(w, inverse, FUSED: tl.constexpr, TORCHAO: tl.constexpr):
    """The word of eight codes [N]."""
    wide = tl.broadcast_to(inverse[:, None], w.shape)
    if TORCHAO:
        # The sign is the weight's own, that of -0, too.
        return words(w, w * wide, True)
    elif FUSED:
        # The sum makes a positive zero of -0, and keeps the sign of what is too small to be a number.
        return words(w, tl.fma(w, wide, 0.0), True)
    else:
        return words(w, w * wide, False)


@triton.jit
def _quantize_mxfp4(
    weight,
    packed,
    scales,
    bad,
    count,
    blocks,
    d_in,
    WHOLE: tl.constexpr,
    FUSED: tl.constexpr,
    TORCHAO: tl.constexpr,
    N: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    inside = block < count
    first = _eight(weight, block, inside, blocks, d_in, 0, WHOLE)
    second = _eight(weight, block, inside, blocks, d_in, 8, WHOLE)
    third = _eight(weight, block, inside, blocks, d_in, 16, WHOLE)
    fourth = _eight(weight, block, inside, blocks, d_in, 24, WHOLE)
    # Bits of floats without a sign are ordered as the floats are, NaN last.
    largest = tl.maximum(
        tl.maximum(_bits_of_largest(first), _bits_of_largest(second)),
        tl.maximum(_bits_of_largest(third), _bits_of_largest(fourth)),
    )
    tl.atomic_max(bad + block * 0, largest, mask=inside & (largest >= 0x7F800000), sem="relaxed")
    # A quarter carries into the exponent from 1.75 times a power of two on.
    exponent = tl.minimum(tl.maximum(((largest + 0x200000) >> 23) - 2, 0), 252)
    # 2^(127 - e), from 2^127 to 2^-125: a normal number.
    least = exponent
    if TORCHAO:
        # No divisor is below 2^-126.
        least = tl.maximum(exponent, 1)
    inverse = ((254 - least) << 23).to(tl.float32, bitcast=True)
    tl.store(packed + block * 4, _coded(first, inverse, FUSED, TORCHAO), mask=inside)
    tl.store(packed + block * 4 + 1, _coded(second, inverse, FUSED, TORCHAO), mask=inside)
    tl.store(packed + block * 4 + 2, _coded(third, inverse, FUSED, TORCHAO), mask=inside)
    tl.store(packed + block * 4 + 3, _coded(fourth, inverse, FUSED, TORCHAO), mask=inside)
    tl.store(scales + block, exponent.to(tl.uint8), mask=inside)


@triton.jit
def _bits_of_largest(w):
    """[N] of [N, 8]."""
    return tl.max(w.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
