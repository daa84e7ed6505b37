"""Gradients on their way back through an attention of float16: multiplied by a power of two.

float16 has three more bits than bfloat16 but a range of 6e-8 to 65,504, and the gradient of a mean over tens of thousands of tokens lies below it. So where
it enters, it is multiplied by the power of two that brings its largest magnitude to a half or more, below one; where it leaves, that is taken out again. The
power is found on the device. v's gradient adds up the queries that see a key, each with a weight of at most one: it would take
65,504 of them, all of the largest magnitude and of one sign, to pass float16's range. What does pass it is infinite, and what was not
finite stays so: an update from it is not made (`optim.nonfinite`). A value below 2^-14 of the largest loses bits, 2^-25 of the largest at most.

Between `enlarge_inside` and `enlarge_from` everything must be linear in the gradient. The factor travels as the gradient of a tensor that one
makes and the other takes, so a graph holds no state.

Legend: T tokens, X rows of q, k and v, H query heads, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_EXPONENT = 0x7F800000
"""Bits of a float32 that are its exponent, 127 more than that of the power of two below it."""
_UNIT = 1 << 23
"""Of that exponent."""


def enlarge_inside(*inputs: Tensor) -> tuple[Tensor, ...]:
    """(the inputs, and a mark for `enlarge_from`): where the gradient becomes what it was. Inputs are all that learn or lead to what learns."""
    return _Inside.apply(*inputs)


def enlarge_from(output_THd: Tensor, mark: Tensor, dtype: torch.dtype) -> Tensor:
    """Attention's output in ``dtype``, whose gradient is enlarged into the type of ``output_THd``."""
    return _From.apply(output_THd, mark, dtype)


class _Inside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        return *(given.view_as(given) for given in inputs), inputs[0].new_empty((), dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        *enlarged, inverse = grads
        return tuple(grad * inverse for grad in enlarged)


class _From(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output_THd: Tensor, mark: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = output_THd.dtype
        return output_THd.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad_THd,) = grads
        factor, inverse = powers(grad_THd)
        enlarged_THd = torch.empty(grad_THd.shape, dtype=ctx.dtype, device=grad_THd.device)
        return torch.mul(grad_THd, factor, out=enlarged_THd), inverse, None


def powers(grad: Tensor) -> tuple[Tensor, Tensor]:
    """(the power of two that brings the largest magnitude to 1/2 or more, below 1, its inverse), float32 [] each, both normal numbers: magnitudes beyond
    2^±126 come as near as that allows, and zeros, infinities and NaN stay what they are. Made of bits, so that it is exact."""
    largest = torch.linalg.vector_norm(grad, torch.inf, dtype=torch.float32)
    exponent = (largest.view(torch.int32) & _EXPONENT).clamp(max=252 * _UNIT)
    power = (253 * _UNIT - exponent).view(torch.float32)
    return power, power.reciprocal()
