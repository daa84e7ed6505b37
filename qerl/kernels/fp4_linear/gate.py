"""The layout gate: is what a kernel reads out of a packed weight what the format says is in it?

Adapters can hide a layout fault by learning around it, so the question is settled before there are rewards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qerl.errors import LayoutGateError
from qerl.formats import PackedWeight, dequantize
from qerl.kernels import dispatch, philox

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
"""Largest |y - y_exact| / (|x| |w_row|) by compute type: one rounding of the output (up to 2^-8 of it in
bfloat16) and, in a dense copy, one of every weight; in float32 the order of summation; in float64 the float32 rounding of s / G."""


def layout_gate(
    weight: PackedWeight,
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    dense_OI: Tensor | None = None,
    tokens: int = 8,
    kernel: str = "auto",
) -> float:
    """Compare the chosen kernel with the explicitly dequantized product, in float64, on fixed normal inputs.

    Args:
        weight: the packed weight, where it will be used.
        name: the module, for the error.
        dtype: compute type of the activations.
        dense_OI: the dense copy that the kernel will be given, if any.
        tokens: rows of the fixed input.
        kernel: implementation by name.

    Returns:
        The largest error over tokens and output rows, relative to |x| |w_row|.

    Raises:
        LayoutGateError: the error exceeds `TOLERANCES[dtype]`, naming module, kernel and row.
        KernelUnavailableError: `kernel` cannot run here.
    """
    device, (_, d_in) = weight.device, weight.shape
    x_TI = philox.normal(0, "layout_gate", tokens * d_in, device=device).view(tokens, d_in).to(dtype)
    chosen = dispatch.resolve("fp4_linear", device, kernel)
    y_TO, _ = dispatch.load("fp4_linear", device, kernel).forward(x_TI, weight, None, (), (), (), dense_OI)
    w_OI = dequantize(weight, torch.float64)
    x_TI = x_TI.double()
    sizes_TO = x_TI.norm(dim=1)[:, None] * w_OI.norm(dim=1).clamp(min=1e-30)
    errors_O = ((y_TO.double() - x_TI @ w_OI.T).abs() / sizes_TO).nan_to_num(nan=torch.inf).amax(0)
    worst = int(errors_O.argmax())
    error, tolerance = float(errors_O[worst]), TOLERANCES[dtype]
    if error > tolerance:
        raise LayoutGateError(
            f"module '{name}': the {chosen} kernel disagrees with the dequantized {weight.format} weight",
            got=f"relative error {error:.2e} at output row {worst} of {list(weight.shape)}",
            expected=f"at most {tolerance:.0e} in {str(dtype).removeprefix('torch.')}",
            remedy="Packed storage and kernel do not share one layout; choose another kernel and report this.",
        )
    return error
