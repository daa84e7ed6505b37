"""The product of activations with a packed weight, in plain torch.

Legend: T tokens, I inputs, O output rows, R adapter ranks.

    y = (x V^T) / G,  V = q * s        from packed storage: V is exact, G divides once, after the dot product
    y = x W_hat^T                      from a dense copy that the caller keeps, in the dtype it has
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from qerl.formats import PackedWeight, get_format
from qerl.kernels.fp4_linear.adapter import Placement


def forward(
    x_TI: Tensor,
    weight: PackedWeight,
    bias_O: Tensor | None,
    placements: Sequence[Placement],
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
    dense_OI: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(y [T, O] in x's dtype, the shrunk activations x A^T [T, R] of every distinct A)."""
    y_TO = _base(x_TI, weight, bias_O, dense_OI)
    shrunk = tuple(x_TI @ a.T for a in a_RI)
    for place, b in zip(placements, b_OR, strict=True):
        h_TR = shrunk[place.a_index][:, place.ranks]
        y_TO[:, place.rows].addmm_(h_TR.to(y_TO.dtype), b.T.to(y_TO.dtype), alpha=place.scale)
    return y_TO.to(x_TI.dtype), shrunk


def input_gradient(
    grad_TO: Tensor,
    weight: PackedWeight,
    dense_OI: Tensor | None,
    grad_h: Sequence[Tensor] = (),
    a_RI: Sequence[Tensor] = (),
) -> Tensor:
    """dX = dY W_hat + sum of dH A over the distinct A, [T, I] in dY's dtype; dequantizes again."""
    grad_TI = _base_gradient(grad_TO, weight, dense_OI)
    for h, a in zip(grad_h, a_RI, strict=True):
        grad_TI.addmm_(h, a)
    return grad_TI


def _base_gradient(grad_TO: Tensor, weight: PackedWeight, dense_OI: Tensor | None) -> Tensor:
    if dense_OI is not None:
        return grad_TO @ dense_OI.to(grad_TO.dtype)
    values_OI, divisor_O = get_format(weight.format).factored(weight, _accumulator(grad_TO, weight))
    wide_TO = grad_TO.to(values_OI.dtype)
    if divisor_O is not None:
        wide_TO = wide_TO / divisor_O.to(values_OI.dtype)
    return (wide_TO @ values_OI).to(grad_TO.dtype)


def _base(x_TI: Tensor, weight: PackedWeight, bias_O: Tensor | None, dense_OI: Tensor | None) -> Tensor:
    """x W_hat^T + bias [T, O], in the accumulator's dtype when the storage has a divisor."""
    if dense_OI is not None:
        # The bias goes into the product, as in any framework's dense layer: float32 results then round alike.
        return linear(x_TI, dense_OI.to(x_TI.dtype), None if bias_O is None else bias_O.to(x_TI.dtype))
    values_OI, divisor_O = get_format(weight.format).factored(weight, _accumulator(x_TI, weight))
    y_TO = x_TI.to(values_OI.dtype) @ values_OI.T
    if divisor_O is not None:
        y_TO.div_(divisor_O)
    return y_TO if bias_O is None else y_TO.add_(bias_O)


def _accumulator(x: Tensor, weight: PackedWeight) -> torch.dtype:
    """Unquantized weights multiply in the compute type; packed ones in at least float32, for the division."""
    if weight.format == "bf16" or x.dtype == torch.float64:
        return x.dtype
    return torch.float32
