"""The product of activations with a packed weight, in plain torch.

Legend: T tokens, I inputs, O output rows, R adapter ranks.

    y = (x V^T) / G,  V = q * s        from packed storage: V is exact, G divides once, after the dot product
    y = x W_hat^T                      from a dense copy that the caller keeps, in the dtype it has
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.formats import PackedWeight, get_format
from qerl.kernels.fp4_linear.adapter import Placement, columns_of
from qerl.kernels.product import product
from qerl.kernels.types import as_type


def forward(
    x_TI: Tensor,
    weight: PackedWeight,
    bias_O: Tensor | None,
    placements: Sequence[Placement],
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
    dense_OI: Tensor | None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(y [T, O] in `dtype`, which is that of x when not given, the shrunk activations x A^T [T, R] of every distinct A)."""
    dtype = dtype or x_TI.dtype
    y_TO = _base(x_TI, weight, bias_O, dense_OI, dtype)
    inner = shrunk(x_TI, weight, placements, a_RI, b_OR, dense_OI)
    for place, b in zip(placements, b_OR, strict=True):
        h_TR = columns_of(inner[place.a_index], place.ranks)
        add_product(columns_of(y_TO, place.rows), h_TR, b.T, alpha=place.scale)
    return as_type(y_TO, dtype), inner


def shrunk(
    x_TI: Tensor,
    weight: PackedWeight,
    placements: Sequence[Placement],
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
    dense_OI: Tensor | None,
) -> tuple[Tensor, ...]:
    """What `forward` gives beside y, alone."""
    return tuple(x_TI @ a.T for a in a_RI)


def add_product(y_TO: Tensor, a_TK: Tensor, b_KO: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> None:
    """y = beta y + alpha a b, in place. Where y is wider than a and b, the products are added to it without a rounding between."""
    if y_TO.dtype == a_TK.dtype:
        y_TO.addmm_(a_TK, b_KO, beta=beta, alpha=alpha)
    elif y_TO.is_cuda and y_TO.dtype == torch.float32:
        torch.addmm(y_TO, a_TK, b_KO, out_dtype=torch.float32, beta=beta, alpha=alpha, out=y_TO)
    else:
        y_TO.addmm_(a_TK.to(y_TO.dtype), b_KO.to(y_TO.dtype), beta=beta, alpha=alpha)


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


def _base(
    x_TI: Tensor, weight: PackedWeight, bias_O: Tensor | None, dense_OI: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """x W_hat^T + bias [T, O], in the wider of `dtype` and the type that it was added up in: adapters come before the rounding."""
    if dense_OI is not None and not _sums_in(dtype, x_TI):
        # The bias goes into the product, as in any framework's dense layer: float32 results then round alike.
        bias_O = None if bias_O is None else as_type(bias_O, x_TI.dtype)
        return as_type(product(x_TI, as_type(dense_OI, x_TI.dtype), bias_O), dtype)
    divisor_O = None
    if dense_OI is not None:
        values_OI = dense_OI.to(x_TI.dtype)
    else:
        values_OI, divisor_O = get_format(weight.format).factored(weight, _accumulator(x_TI, weight))
    if values_OI.dtype == x_TI.dtype and _sums_in(dtype, x_TI):
        y_TO = torch.mm(x_TI, values_OI.T, out_dtype=dtype)
    else:
        y_TO = product(x_TI.to(values_OI.dtype), values_OI)
    if divisor_O is not None:
        y_TO.div_(divisor_O)
    y_TO = y_TO.to(torch.promote_types(y_TO.dtype, dtype))
    return y_TO if bias_O is None else y_TO.add_(bias_O)


def _sums_in(dtype: torch.dtype, x_TI: Tensor) -> bool:
    """Whether a product of x can give its sums in another type than x's, which torch's can on CUDA."""
    return x_TI.is_cuda and dtype == torch.float32 and x_TI.dtype in (torch.bfloat16, torch.float16)


def _accumulator(x: Tensor, weight: PackedWeight) -> torch.dtype:
    """Unquantized weights multiply in the compute type; packed ones in at least float32, for the division."""
    if weight.format == "bf16" or x.dtype == torch.float64:
        return x.dtype
    return torch.float32
