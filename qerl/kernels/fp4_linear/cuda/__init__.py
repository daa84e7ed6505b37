"""The packed linear layer on a CUDA device. What runs, by the number of rows of x (see README.md):

    decode   up to `decode.MOST_ROWS` rows, tiled NVFP4: one kernel, weight read once for a group of rows, adapters inside
    large    more rows, and MXFP4 and NF4: one pass of dequantization, then cuBLAS

Unquantized weights, other compute types and a dense copy of the caller's go through the plain products of `reference`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.formats import PackedWeight
from qerl.kernels.fp4_linear import decode, dense, reference
from qerl.kernels.fp4_linear.adapter import Placement


def forward(
    x_TI: Tensor,
    weight: PackedWeight,
    bias_O: Tensor | None,
    placements: Sequence[Placement],
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
    dense_OI: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """(y [T, O] in x's dtype, the shrunk activations x A^T of every distinct A, or None where no memory ever held them)."""
    if not fast(x_TI, weight, dense_OI):
        return reference.forward(x_TI, weight, bias_O, placements, a_RI, b_OR, dense_OI)
    if weight.order == "tiles" and decode.takes(x_TI, weight, placements, a_RI, b_OR):
        return decode.product(x_TI, weight, bias_O, placements, a_RI, b_OR), None
    return dense.forward(x_TI, weight, bias_O, placements, a_RI, b_OR)


def input_gradient(grad_TO: Tensor, weight: PackedWeight, dense_OI: Tensor | None) -> Tensor:
    """dX = dY W_hat [T, I] of the base product, in dY's dtype; dequantizes again."""
    if not fast(grad_TO, weight, dense_OI):
        return reference.input_gradient(grad_TO, weight, dense_OI)
    return dense.input_gradient(grad_TO, weight)


def fast(x: Tensor, weight: PackedWeight, dense_OI: Tensor | None) -> bool:
    """Whether these kernels have the call; the plain products take the rest."""
    packed = weight.order == "tiles" or weight.format in ("mxfp4", "nf4", "nf4_dq")
    return dense_OI is None and x.dtype == torch.bfloat16 and packed
