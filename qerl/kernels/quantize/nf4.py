# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""NF4, rounded to nearest, in one pass: a block of 64 knows its scale by itself.

The arithmetic is that of `qerl.formats.nf4`: x = w * (1 / absmax), and its code is the number of middles between neighboring quantiles that x is
above, found by four comparisons. Doubly quantized scales are made of the float32 ones by `qerl.formats.double_quant`, a second and small pass
(one number for 64 weights) in torch. Weights are a thread's own by eights, and eight threads have a block.

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
        scales = double_quant.quantize(absmax, [ceil_div(count, BLOCK) for count in counts])
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
        *_middles(),
        SMALLEST=struct.unpack("i", struct.pack("f", SMALLEST_ABSMAX))[0],
        TAIL=count % BLOCK != 0,
        N=_PROGRAM_BLOCKS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return words.view(torch.uint8).view(-1)[: ceil_div(count, 2)], absmax


@cache
def _middles() -> tuple[float, ...]:
    """The 15 numbers half way between quantiles, rounded to float32 as the format rounds them."""
    quantiles = torch.tensor(QUANTILES)
    return tuple(((quantiles[:-1] + quantiles[1:]) / 2).tolist())


@triton.jit
def _quantize_nf4(
    weight,
    words,
    scales,
    bad,
    count,
    blocks,
    M0: tl.constexpr,
    M1: tl.constexpr,
    M2: tl.constexpr,
    M3: tl.constexpr,
    M4: tl.constexpr,
    M5: tl.constexpr,
    M6: tl.constexpr,
    M7: tl.constexpr,
    M8: tl.constexpr,
    M9: tl.constexpr,
    M10: tl.constexpr,
    M11: tl.constexpr,
    M12: tl.constexpr,
    M13: tl.constexpr,
    M14: tl.constexpr,
    SMALLEST: tl.constexpr,
    TAIL: tl.constexpr,
    N: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    inside = block < blocks
    word = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    element = tl.arange(0, 8)[None, None, :]
    places = word[:, :, None] * 8 + element
    mask = inside[:, None, None]
    if TAIL:
        mask = places < count
    w = tl.load(weight + places, mask=mask, other=0.0).to(tl.float32)
    # Bits of floats without a sign are ordered as the floats are, NaN last.
    largest = tl.max(tl.max(w.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2), axis=1)
    tl.atomic_max(bad + block * 0, largest, mask=inside & (largest >= 0x7F800000), sem="relaxed")
    least = tl.maximum(largest, SMALLEST).to(tl.float32, bitcast=True)
    absmax = largest.to(tl.float32, bitcast=True)
    x = w * tl.div_rn(1.0, least)[:, None, None]
    if TAIL:
        # A last, partial block is divided, by a scale that is not 0.
        last = block == blocks - 1
        absmax = tl.where(last, least, absmax)
        x = tl.where(last[:, None, None], tl.div_rn(w, tl.broadcast_to(least[:, None, None], w.shape)), x)
    a = x > M7
    b = x > tl.where(a, M11, M3)
    c = x > tl.where(a, tl.where(b, M13, M9), tl.where(b, M5, M1))
    high = tl.where(b, tl.where(c, M14, M12), tl.where(c, M10, M8))
    low = tl.where(b, tl.where(c, M6, M4), tl.where(c, M2, M0))
    d = x > tl.where(a, high, low)
    # The even element of a pair has the high bits of its byte.
    shift = (element ^ 1) * 4
    code = (a.to(tl.int32) * 8 + b.to(tl.int32) * 4) + (c.to(tl.int32) * 2 + d.to(tl.int32))
    tl.store(words + word, tl.sum(code << shift, axis=2), mask=inside[:, None])
    tl.store(scales + block, absmax, mask=inside)
