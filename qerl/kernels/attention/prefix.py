"""Keys and values of a prompt for every answer that continues it.

Legend: T tokens, U keys, R tokens of prompts that are shared, C most answers of one, K key/value heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Which token's key stands where, both ways."""

    source_U: Tensor
    """int64 [U]: token whose key it is."""
    own_T: Tensor
    """int64 [T]: where a token's key stands among those of its own sequence."""
    prompt_R: Tensor
    """int64 [R]: tokens that have further copies."""
    copies_RC: Tensor
    """int64 [R, C]: where the copies stand."""
    real_RC: Tensor
    """bool [R, C]: False in places that only fill up."""


def repeat_prefixes(k_TKd: Tensor, v_TKd: Tensor, repeats: Repeats) -> tuple[Tensor, Tensor]:
    """k and v of every key, [U, K, d]. Gradients of copies are added in float32, in a fixed order."""
    return _Repeat.apply(k_TKd, v_TKd, repeats)


class _Repeat(torch.autograd.Function):
    """Keeps nothing but the places."""

    @staticmethod
    def forward(ctx: Any, k_TKd: Tensor, v_TKd: Tensor, repeats: Repeats) -> tuple[Tensor, Tensor]:
        ctx.repeats = repeats
        return k_TKd.index_select(0, repeats.source_U), v_TKd.index_select(0, repeats.source_U)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(grads[0], ctx.repeats), _gathered(grads[1], ctx.repeats), None


def _gathered(grad_UKd: Tensor, repeats: Repeats) -> Tensor:
    grad_TKd = grad_UKd.index_select(0, repeats.own_T)
    wide = torch.promote_types(grad_UKd.dtype, torch.float32)
    copies_RCKd = grad_UKd[repeats.copies_RC].to(wide)
    total_RKd = (copies_RCKd * repeats.real_RC[:, :, None, None]).sum(1)
    own_RKd = grad_TKd.index_select(0, repeats.prompt_R).to(wide)
    return grad_TKd.index_copy_(0, repeats.prompt_R, (own_RKd + total_RKd).to(grad_UKd.dtype))
