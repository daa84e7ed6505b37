"""Tiles of logits that stay in the cache of the GPU: one matrix product a tile, then one pass over it.

Legend: N tokens, M tokens of a block, D hidden size, V vocabulary, v rows of the head in a tile.

With l = logits / T, a reference m (the largest l so far, within a margin) and p = exp(l - m), a tile adds to three sums a token:

    s += sum p,   t += sum p (l - m),   E += sum over v != target of p_v W_v

    lse = m + ln s,   H = ln s - t / s,   d logp / d hidden = ((1 - p_target) W_target - E / s) / T

E is formed in the forward pass if a gradient to the hidden states is wanted, so the backward pass of the log-probs scales it by
one number a token: no logits again. The target is left out of E because the two large terms of a token that is almost certain
would cancel. p is rounded to the type of the hidden states for its product, sums are float32. The gradient of the entropy, of
the head and of the bias do need the logits again (`gradients`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl.formats import PackedWeight
from qerl.kernels.sizes import power_of_2
from qerl.kernels.token_logprobs import autograd, draw, reference
from qerl.kernels.token_logprobs.choices import Wanted
from qerl.kernels.token_logprobs.device import absorb, finish, logits_gradient
from qerl.kernels.token_logprobs.head import Head, factored_rows, row_stretches
from qerl.kernels.token_logprobs.logits import head_logits
from qerl.kernels.token_logprobs.tiles import TILE_ROWS, tile_tokens

__all__ = ["head_logits", "token_logprobs"]

_NEGATIVE = -3.0e38
# Blocks that share the tiles of a packed head, which have to be unpacked first.
_TOGETHER = 4


def token_logprobs(
    hidden_ND: Tensor,
    head: Head,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperature: float,
    chunk: int | None,
    wanted: Wanted | None = None,
) -> tuple[Tensor, Tensor]:
    """See `qerl.kernels.token_logprobs.token_logprobs`; `chunk` is the most tokens of a block, `wanted` is filled."""
    packed_with_trained_bias = isinstance(head, PackedWeight) and bias_V is not None and bias_V.requires_grad
    if hidden_ND.dtype == torch.float64 or not len(hidden_ND) or packed_with_trained_bias:
        return reference.token_logprobs(hidden_ND, head, bias_V, targets_N, temperature, chunk, wanted)
    chunk = chunk or tile_tokens(*hidden_ND.shape)
    return _TokenLogprobs.apply(hidden_ND, head, bias_V, targets_N, temperature, chunk, wanted)


class _TokenLogprobs(torch.autograd.Function):
    """Gradients to hidden, head (if dense) and bias, from both outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head: Head,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature: float,
        chunk: int,
        wanted: Wanted | None,
    ) -> tuple[Tensor, Tensor]:
        eager = ctx.needs_input_grad[0] and not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2])
        logp_N, entropy_N, lse_N = (
            torch.empty(len(hidden_ND), dtype=torch.float32, device=hidden_ND.device) for _ in range(3)
        )
        slope_ND = torch.empty_like(hidden_ND) if eager else None
        parts = list(_blocks(len(hidden_ND), chunk))
        room = _Room(hidden_ND, parts[0].stop, eager)
        together = _TOGETHER if isinstance(head, PackedWeight) else 1
        for first in range(0, len(parts), together):
            group = parts[first : first + together]
            chosen = [None if wanted is None else wanted.part(part) for part in group]
            blocks = [
                _Block(hidden_ND[part], targets_N[part], temperature, room, head, one)
                for part, one in zip(group, chosen, strict=True)
            ]
            for index, tile in enumerate(_tiles(head, hidden_ND.dtype)):
                for block in blocks:
                    block.add(index, *tile, bias_V)
            for part, block in zip(group, blocks, strict=True):
                slope_MD = None if slope_ND is None else slope_ND[part]
                block.finish(logp_N[part], entropy_N[part], lse_N[part], slope_MD)
            if wanted is not None and wanted.uniform_N is not None:
                for index, tile in enumerate(_tiles(head, hidden_ND.dtype)):
                    for part, block in zip(group, blocks, strict=True):
                        block.resolve(index, *tile, bias_V, lse_N[part])
        autograd.keep(ctx, hidden_ND, head, bias_V, targets_N, lse_N, entropy_N, slope_ND)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, head, bias_V, targets_N, lse_N, entropy_N, slope_ND = autograd.kept(ctx)
        grad_logp_N, grad_entropy_N = grads
        if slope_ND is not None and grad_entropy_N is None:
            grad_hidden = None if grad_logp_N is None else (slope_ND * grad_logp_N[:, None]).to(hidden_ND.dtype)
            return grad_hidden, None, None, None, None, None, None
        grad_hidden, grad_head, grad_bias = gradients(
            hidden_ND, head, bias_V, targets_N, ctx.temperature, ctx.chunk, lse_N, entropy_N, grad_logp_N, grad_entropy_N,
            ctx.needs_input_grad[:3],
        )  # fmt: skip
        return grad_hidden, grad_head, grad_bias, None, None, None, None


class _Room:
    """Memory of one tile, which all blocks use in turn: logits and, if a gradient is wanted, p."""

    def __init__(self, hidden_ND: Tensor, most: int, eager: bool):
        self.logits = torch.empty(most * TILE_ROWS, dtype=torch.float32, device=hidden_ND.device)
        self.p = torch.empty(most * TILE_ROWS, dtype=hidden_ND.dtype, device=hidden_ND.device) if eager else None


class _Block:
    """Running sums of one block of tokens."""

    def __init__(
        self,
        hidden_MD: Tensor,
        targets_M: Tensor,
        temperature: float,
        room: _Room,
        head: Head,
        wanted: Wanted | None,
    ):
        count, device, eager = len(hidden_MD), hidden_MD.device, room.p is not None
        self.room = room
        self.hidden_MD, self.targets_M, self.temperature = hidden_MD.contiguous(), targets_M.contiguous(), temperature
        self.sums_4M = torch.zeros(4, count, dtype=torch.float32, device=device)
        self.sums_4M[0] = _NEGATIVE
        """Reference m, s, t, and l of the target."""
        self.e_MD = torch.zeros(hidden_MD.shape, dtype=torch.float32, device=device) if eager else None
        self.target_MD = torch.empty_like(self.hidden_MD) if eager else None
        """W of each target."""
        self.wanted = wanted
        self.top_M = None if wanted is None else torch.full((count,), -torch.inf, device=device)
        """Largest logit."""
        self.draw = None if wanted is None or wanted.uniform_N is None else draw.Draw(wanted, list(_tile_rows(head)))

    def add(self, index: int, rows: slice, values_vD: Tensor, divisor_v: Tensor | None, bias_V: Tensor | None) -> None:
        """Take in one tile of the head."""
        count, width = len(self.hidden_MD), len(values_vD)
        logits_Mv = _product(self.hidden_MD, values_vD.T, self.room.logits[: count * width].view(count, width))
        p_Mv = None if self.room.p is None else self.room.p[: count * width].view(count, width)
        kept = self.draw
        block = max(power_of_2(width), 1 if kept is None else draw.PART)
        absorb[(count,)](
            logits_Mv,
            divisor_v,
            None if bias_V is None else bias_V[rows],
            self.targets_M,
            self.sums_4M,
            p_Mv,
            self.e_MD,
            values_vD,
            self.target_MD,
            self.top_M,
            None if self.wanted is None else self.wanted.top_N,
            None if kept is None else kept.parts_MP,
            None if kept is None else kept.references_Mt,
            index,
            0 if kept is None else kept.tiles,
            0 if kept is None else kept.lanes,
            rows.start,
            count,
            width,
            self.hidden_MD.shape[1],
            self.temperature,
            UNIT=self.temperature == 1.0,
            BLOCK=block,
            WIDTH=min(power_of_2(self.hidden_MD.shape[1]), 1024),
            PART=draw.PART,
            num_warps=_warps(block),
        )
        if self.e_MD is not None and p_Mv is not None:
            _product(p_Mv, values_vD, self.e_MD, add=True)

    def finish(self, logp_M: Tensor, entropy_M: Tensor, lse_M: Tensor, slope_MD: Tensor | None) -> None:
        """Write the results of the block."""
        width = self.hidden_MD.shape[1]
        finish[(len(self.hidden_MD),)](
            self.sums_4M,
            self.e_MD,
            self.target_MD,
            self.top_M,
            None if self.wanted is None else self.wanted.top_logprobs_N,
            logp_M,
            entropy_M,
            lse_M,
            slope_MD,
            len(self.hidden_MD),
            width,
            self.temperature,
            UNIT=self.temperature == 1.0,
            WIDTH=power_of_2(width),
            num_warps=4,
        )
        if self.draw is not None:
            self.draw.choose_parts(self.sums_4M)

    def resolve(
        self,
        index: int,
        rows: slice,
        values_vD: Tensor,
        divisor_v: Tensor | None,
        bias_V: Tensor | None,
        lse_M: Tensor,
    ) -> None:
        """Draw the tokens that lie in one tile, after `finish`."""
        assert self.draw is not None
        bias_v = None if bias_V is None else bias_V[rows]
        self.draw.resolve(
            index, rows, self.hidden_MD, values_vD, divisor_v, bias_v, self.sums_4M, lse_M, self.temperature
        )


def gradients(
    hidden_ND: Tensor,
    head: Head,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperature: float,
    chunk: int,
    lse_N: Tensor,
    entropy_N: Tensor,
    grad_logp_N: Tensor | None,
    grad_entropy_N: Tensor | None,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients to hidden, head and bias from logits that are computed again, a tile at a time; sums are float32."""
    grad_hidden = torch.empty_like(hidden_ND) if needed[0] else None
    device, shape = hidden_ND.device, tuple(head.shape)
    grad_head = torch.zeros(shape, dtype=torch.float32, device=device) if needed[1] else None
    grad_bias = torch.zeros(shape[0], dtype=torch.float32, device=device) if needed[2] else None
    for part in _blocks(len(hidden_ND), chunk):
        hidden_MD = hidden_ND[part].contiguous()
        count = len(hidden_MD)
        logits = torch.empty(count * TILE_ROWS, dtype=torch.float32, device=device)
        grad = torch.empty(count * TILE_ROWS, dtype=hidden_MD.dtype, device=device)
        sum_MD = torch.zeros(hidden_MD.shape, dtype=torch.float32, device=device) if needed[0] else None
        for rows, values_vD, divisor_v in _tiles(head, hidden_MD.dtype):
            width = len(values_vD)
            logits_Mv = _product(hidden_MD, values_vD.T, logits[: count * width].view(count, width))
            grad_Mv = grad[: count * width].view(count, width)
            block = power_of_2(width)
            logits_gradient[(count,)](
                logits_Mv,
                divisor_v,
                None if bias_V is None else bias_V[rows],
                targets_N[part],
                lse_N[part],
                entropy_N[part],
                None if grad_logp_N is None else grad_logp_N[part].contiguous(),
                None if grad_entropy_N is None else grad_entropy_N[part].contiguous(),
                grad_Mv,
                rows.start,
                width,
                temperature,
                UNIT=temperature == 1.0,
                BLOCK=block,
                num_warps=_warps(block),
            )
            # The gradient is divided by the divisors of a packed head, as the sum over its values needs it; neither such a
            # head nor a bias beside it gets a gradient here.
            if sum_MD is not None:
                _product(grad_Mv, values_vD, sum_MD, add=True)
            if grad_head is not None:
                _product(grad_Mv.T, hidden_MD, grad_head[rows], add=True)
            if grad_bias is not None:
                grad_bias[rows] += grad_Mv.float().sum(0)
        if grad_hidden is not None and sum_MD is not None:
            grad_hidden[part] = sum_MD
    return (
        grad_hidden,
        None if grad_head is None else grad_head.to(head.dtype if isinstance(head, Tensor) else torch.float32),
        None if grad_bias is None or bias_V is None else grad_bias.to(bias_V.dtype),
    )


def _warps(block: int) -> int:
    """Of a program that takes a row of a tile: 16 logits a thread."""
    return min(max(block // 512, 1), 16)


def _blocks(tokens: int, most: int) -> Iterator[slice]:
    """Blocks of about equal size, of at most `most` tokens, in multiples of 64 where they can be."""
    step = -(-tokens // -(-tokens // most))
    step = min(most, -(-step // 64) * 64)
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


def _tile_rows(head: Head) -> Iterator[slice]:
    """Rows of each tile of the head, in order; tiles of about equal size."""
    stretches = row_stretches(head) if isinstance(head, PackedWeight) else (slice(0, len(head)),)
    for rows in stretches:
        for part in _blocks(rows.stop - rows.start, TILE_ROWS):
            yield slice(rows.start + part.start, rows.start + part.stop)


def _tiles(head: Head, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """(rows, values [v, D], row divisor [v] or None) of the whole head, tiles of about equal size."""
    if isinstance(head, PackedWeight):
        for rows, values_VD, divisor_V in factored_rows(head, dtype):
            for part in _blocks(len(values_VD), TILE_ROWS):
                inside = slice(rows.start + part.start, rows.start + part.stop)
                yield inside, values_VD[part], None if divisor_V is None else divisor_V[part].contiguous()
        return
    values_VD = head.to(dtype)
    for part in _blocks(len(values_VD), TILE_ROWS):
        yield part, values_VD[part], None


def _product(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """out = a b, or out += a b, in float32."""
    if a.dtype == torch.float32:
        return out.addmm_(a, b) if add else torch.mm(a, b, out=out)
    if a.device.type == "cpu":
        return out.addmm_(a.float(), b.float()) if add else torch.mm(a.float(), b.float(), out=out)
    if add:
        return torch.ops.aten.addmm.dtype_out(out, a, b, torch.float32, out=out)
    return torch.ops.aten.mm.dtype_out(a, b, torch.float32, out=out)
