"""The linear layer of a frozen, packed base weight with LoRA adapters: y = W_hat x + b + scale * B (A x).

Legend: T tokens, I inputs, O output rows (of all fused projections), R adapter ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.formats import PackedWeight
from qerl.kernels import dispatch
from qerl.kernels.fp4_linear.adapter import AdapterPart, AdapterParts, Layer, flatten
from qerl.kernels.fp4_linear.autograd import Fp4Linear
from qerl.kernels.fp4_linear.gate import layout_gate
from qerl.kernels.fp4_linear.regimes import SMALL_WEIGHT
from qerl.kernels.fp4_linear.tiled import by_rows

__all__ = [
    "AdapterPart",
    "AdapterParts",
    "Layer",
    "compile_ahead",
    "fp4_linear",
    "keep",
    "keeps",
    "layout_gate",
    "served",
]


def served(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed weights are multiplied by the CUDA kernels, which a dequantized copy would keep them from."""
    return device.type == "cuda" and dtype == torch.bfloat16


def keeps(weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Whether products with activations in `dtype` are faster where V is kept: those of small weights by the CUDA kernels."""
    if not served(weight.device, dtype) or weight.shape[0] * weight.shape[1] >= SMALL_WEIGHT:
        return False
    if weight.format == "bf16":
        return weight.tensors["weight"].dtype == torch.bfloat16
    from qerl.kernels.fp4_linear.unpack import FORMATS  # needs Triton, which a CPU may lack

    return (weight.order == "tiles" and not by_rows(weight)) or weight.format in FORMATS


def keep(weight: PackedWeight) -> PackedWeight:
    """The weight with V beside it (`PackedWeight.kept_OI`, README.md), for what `keeps`: 2 bytes a number, and no product rounds more for it. An
    unquantized weight is its own V, at no cost.

    Raises:
        KernelUnavailableError: a kernel cannot be compiled here.
    """
    from qerl.kernels.fp4_linear import dense

    return dense.keep(weight)


def compile_ahead(layers: Sequence[Layer], most_rows: int) -> None:
    """Have the code of products with each of these layers and up to ``most_rows`` rows of bfloat16, forward and backward; for what is `served`.

    Layers that differ in their numbers alone need be named once. A line of progress says how many kernels there are, and how long it took.

    Raises:
        KernelUnavailableError: a kernel cannot be compiled.
    """
    from qerl.kernels.fp4_linear import ahead  # needs Triton, which a CPU may lack

    ahead.compile_ahead(layers, most_rows)


def fp4_linear(
    x_TI: Tensor,
    weight: PackedWeight,
    bias_O: Tensor | None = None,
    adapters: Sequence[AdapterPart] = (),
    dense_OI: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    output: bool = True,
    kernel: str = "auto",
) -> Tensor:
    """Apply a packed weight of any format, and its adapters, to activations.

    Args:
        x_TI: activations, compute type (float32, bfloat16, float64).
        weight: packed weight; gets no gradient.
        bias_O: added to the base product.
        adapters: parts in x's dtype; see `AdapterPart` for sharing one A.
        dense_OI: dequantized copy owned by the caller, used instead of unpacking. In float32 it changes nothing but
            the last bits; in bfloat16 the copy has rounded each weight once, which the packed product does not.
        dtype: of y; that of x when not given. In float32, y is what the product added up, not rounded again (on the CPU, products of
            unquantized weights have rounded it already).
        output: False if y will not be read, because the call is made again for what its backward pass needs; y is NaN then.
        kernel: implementation by name.

    Returns:
        y [T, O]. Gradients flow to x, bias, every A and B; the backward pass unpacks the weight again.

    Raises:
        KernelUnavailableError: `kernel` cannot run here.
    """
    placements, a_RI, b_OR = flatten(adapters)
    implementation = dispatch.load("fp4_linear", x_TI.device, kernel)
    dtype = dtype or x_TI.dtype
    if not torch.is_grad_enabled():
        assert output, "nothing else is made without gradients"
        return implementation.forward(x_TI, weight, bias_O, placements, a_RI, b_OR, dense_OI, dtype)[0]
    return Fp4Linear.apply(x_TI, bias_O, weight, dense_OI, placements, dtype, implementation, output, *a_RI, *b_OR)
