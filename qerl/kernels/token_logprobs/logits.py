# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Logits of few tokens on a CUDA device, from a head as it is stored: every byte of it is read once and unpacked in registers.

Legend: N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.formats import PackedWeight
from qerl.kernels.fp4_linear import cuda
from qerl.kernels.sizes import power_of_2
from qerl.kernels.token_logprobs import reference
from qerl.kernels.token_logprobs.head import Head

# Tokens up to which an FP8 head in its natural order is unpacked in registers, for each of them a 128th of the vocabulary at a time; more are multiplied by
# unpacked stretches of it.
_FP8_TOKENS = 256
_FP8_TILE = 128


def head_logits(hidden_ND: Tensor, head: Head, bias_V: Tensor | None) -> Tensor:
    """See `qerl.kernels.token_logprobs.head_logits`."""
    logits_NV = None
    if isinstance(head, PackedWeight) and hidden_ND.dtype == torch.bfloat16 and len(hidden_ND):
        if head.order == "tiles":
            logits_NV = cuda.float32_product(hidden_ND, head)
        elif head.format == "fp8" and len(hidden_ND) <= _FP8_TOKENS:
            logits_NV = fp8_logits(hidden_ND, head)
    if logits_NV is None:
        return reference.head_logits(hidden_ND, head, bias_V)
    return logits_NV if bias_V is None else logits_NV.add_(bias_V)


def fp8_logits(hidden_ND: Tensor, head: PackedWeight) -> Tensor:
    """float32 [N, V] from a head in its natural order, whose codes become bfloat16 in registers (four significant bits: exact) and a division at the end."""
    (count, width), vocab = hidden_ND.shape, head.shape[0]
    logits_NV = torch.empty(count, vocab, dtype=torch.float32, device=hidden_ND.device)
    tokens = max(16, min(128, power_of_2(count)))
    _fp8_logits[(triton.cdiv(count, tokens), triton.cdiv(vocab, _FP8_TILE))](
        hidden_ND.contiguous(),
        head.tensors["codes"],
        head.tensors["divisor"],
        logits_NV,
        count,
        vocab,
        width,
        TOKENS=tokens,
        ROWS=_FP8_TILE,
        STEP=128 if tokens <= 64 else 64,
        num_warps=8,
        num_stages=3 if 16 < tokens <= 64 else 4,
    )
    return logits_NV


@triton.jit(do_not_specialize=["count"])
def _fp8_logits(
    hidden, codes, divisor, logits, count, vocab, width, TOKENS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, STEP)
    inside, known = token < count, row < vocab
    codes += row.to(tl.int64)[:, None] * width
    hidden += token[None, :] * width
    sums = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    for start in range(0, width, STEP):
        k = start + column
        w = tl.load(codes + k[None, :], mask=known[:, None] & (k < width)[None, :], other=0.0)
        x = tl.load(hidden + k[:, None], mask=inside[None, :] & (k < width)[:, None], other=0.0)
        sums = tl.dot(w.to(tl.bfloat16), x, sums)
    sums = sums / tl.load(divisor + row, mask=known, other=1.0)[:, None]
    place = token.to(tl.int64)[None, :] * vocab + row[:, None]
    tl.store(logits + place, sums, mask=inside[None, :] & known[:, None])
