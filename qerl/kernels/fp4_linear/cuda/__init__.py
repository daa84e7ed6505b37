"""The packed linear layer on a CUDA device. What runs is chosen by the number of rows of x (`regimes`, README.md); a weight that has no
tiles is always dequantized in one pass and multiplied by cuBLAS.

Other compute types, large unquantized weights and a dense copy of the caller's go through the plain products of `reference`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.formats import PackedWeight
from qerl.kernels.fp4_linear import decode, dense, kept, middle, reference, regimes, unpack
from qerl.kernels.fp4_linear.adapter import Placement
from qerl.kernels.fp4_linear.shrink import shrink
from qerl.kernels.fp4_linear.tiled import by_rows


def forward(
    x_TI: Tensor,
    weight: PackedWeight,
    bias_O: Tensor | None,
    placements: Sequence[Placement],
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
    dense_OI: Tensor | None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """(y [T, O] in `dtype`, which is that of x when not given, the shrunk activations x A^T of every distinct A, or None where no memory
    ever held them)."""
    dtype = dtype or x_TI.dtype
    if not fast(x_TI, weight, dense_OI):
        return reference.forward(x_TI, weight, bias_O, placements, a_RI, b_OR, dense_OI, dtype)
    regime = regime_of(x_TI, weight, placements, a_RI, b_OR)
    if regime == regimes.DECODE:
        return decode.product(x_TI, weight, bias_O, placements, a_RI, b_OR, dtype=dtype), None
    if regime == regimes.MIDDLE:
        return middle.product(x_TI, weight, bias_O, placements, a_RI, b_OR, dtype=dtype)
    if regime == regimes.KEPT:
        return kept.product(x_TI, weight, bias_O, placements, a_RI, b_OR, dtype=dtype), None
    return dense.forward(x_TI, weight, bias_O, placements, a_RI, b_OR, dtype=dtype)


def shrunk(
    x_TI: Tensor,
    weight: PackedWeight,
    placements: Sequence[Placement],
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
    dense_OI: Tensor | None,
) -> tuple[Tensor, ...] | None:
    """What `forward` gives beside y, with the same bits: without y, or with as little of it as the kernel that makes both can."""
    if not fast(x_TI, weight, dense_OI):
        return reference.shrunk(x_TI, weight, placements, a_RI, b_OR, dense_OI)
    regime = regime_of(x_TI, weight, placements, a_RI, b_OR)
    if regime in (regimes.DECODE, regimes.KEPT):
        return None
    if regime == regimes.MIDDLE:
        return middle.shrunk(x_TI, weight, placements, a_RI, b_OR)
    return tuple(shrink(x_TI, a) for a in a_RI)


def regime_of(
    x_TI: Tensor,
    weight: PackedWeight,
    placements: Sequence[Placement],
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
    *,
    head: bool = False,
) -> str:
    """The kernel that takes a call which is `fast`, or of an LM `head` one of `float32_product`: the first of `regimes.preferred` that can."""
    if x_TI.shape[0] > regimes.MOST_ROWS:
        return regimes.DENSE
    takes = {regimes.DECODE: decode.takes, regimes.MIDDLE: middle.takes, regimes.KEPT: kept.takes}
    numbers, capability = weight.shape[0] * weight.shape[1], torch.cuda.get_device_capability(x_TI.device)
    options = {"kept": weight.kept_OI is not None, "adapters": bool(placements), "tiled": weight.order == "tiles"}
    few, many = regimes.few_rows(weight.format, head=head), regimes.many_rows(head=head)
    for regime in regimes.preferred(x_TI.shape[0], numbers, capability, few=few, many=many, **options):
        if takes[regime](x_TI, weight, placements, a_RI, b_OR):
            return regime
    return regimes.DENSE


def input_gradient(
    grad_TO: Tensor,
    weight: PackedWeight,
    dense_OI: Tensor | None,
    grad_h: Sequence[Tensor] = (),
    a_RI: Sequence[Tensor] = (),
) -> Tensor:
    """dX = dY W_hat + sum of dH A over the distinct A, [T, I] in dY's dtype; dequantizes again."""
    if not fast(grad_TO, weight, dense_OI):
        return reference.input_gradient(grad_TO, weight, dense_OI, grad_h, a_RI)
    return dense.input_gradient(grad_TO, weight, grad_h, a_RI)


def float32_product(x_TI: Tensor, weight: PackedWeight) -> Tensor | None:
    """x W_hat^T [T, O] in float32, logits, for a tiled weight and bfloat16 x, where a kernel that reads the tiles has the call; None elsewhere."""
    regime = regime_of(x_TI, weight, (), (), (), head=True)
    if regime == regimes.DECODE:
        return decode.product(x_TI, weight, None, (), (), (), dtype=torch.float32)
    if regime == regimes.MIDDLE:
        return middle.product(x_TI, weight, None, (), (), (), dtype=torch.float32)[0]
    if regime == regimes.KEPT:
        return kept.product(x_TI, weight, None, (), (), (), dtype=torch.float32)
    return None


def fast(x: Tensor, weight: PackedWeight, dense_OI: Tensor | None) -> bool:
    """Whether these kernels have the call; the plain products take the rest."""
    packed = (weight.order == "tiles" and not by_rows(weight)) or weight.format in unpack.FORMATS
    return dense_OI is None and x.dtype == torch.bfloat16 and (packed or weight.kept_OI is not None)
