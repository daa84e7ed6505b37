"""x W^T + b in plain torch, by the faster of its libraries. Legend: T tokens, I inputs, O output rows.

Torch multiplies float32 on an x86 processor by MKL. oneDNN, which it brings along and multiplies bfloat16 by, reads a large weight faster, above all where
tokens are few ([log](../../docs/log.md)). The operation that torch's compiler emits is the one that asks for it with a weight as it lies in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

LARGE_WEIGHT = 1 << 18
"""Numbers of a weight from which oneDNN multiplies by it. A smaller one stays in a core's cache, and what a call costs counts."""

X86 = ("AVX2", "AVX512")
"""What torch calls the processors that oneDNN was found faster on."""


def product(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """[T, O] in the type of the operands, which have one. A row does not depend on the other rows, beyond rounding not on how many there are.

    Where gradients are recorded, `linear` multiplies, which alone has them.
    """
    large = weight_OI.is_cpu and weight_OI.dtype == torch.float32 and weight_OI.numel() >= LARGE_WEIGHT
    if large and not torch.is_grad_enabled():
        onednn = _onednn()
        if onednn is not None:
            return onednn(x_TI, weight_OI, bias_O, "none", [], "")
    return linear(x_TI, weight_OI, bias_O)


@cache
def _onednn() -> Callable[..., Tensor] | None:
    """oneDNN's product, where torch has it and it is the faster one."""
    if torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() in X86:
        return torch.ops.mkldnn._linear_pointwise.default
    return None
