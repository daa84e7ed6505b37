"""The layout gate: is what a kernel reads out of a packed weight what the format says is in it?

Adapters can hide a layout fault by learning around it, so the question is settled before there are rewards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qerl.errors import LayoutGateError
from qerl.formats import PackedWeight, dequantize
from qerl.kernels import dispatch, philox
from qerl.kernels.fp4_linear.regimes import one_of_each

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
"""Largest |y - y_exact| / (|x| |w_row|) by compute type: one rounding of the output (up to 2^-8 of it in
bfloat16) and, in a dense copy, one of every weight; in float32 the order of summation; in float64 the float32 rounding of s / G."""
_COMPARED_AT_ONCE = 1024
"""Rows of x that are compared in float64 at one time: outputs of a 32B are half a megabyte a row there, several times over."""


def layout_gate(
    weight: PackedWeight,
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    output_dtype: torch.dtype | None = None,
    dense_OI: Tensor | None = None,
    tokens: int | None = None,
    kernel: str = "auto",
) -> float:
    """Compare the chosen kernel with the explicitly dequantized product, in float64, on fixed normal inputs.

    Args:
        weight: the packed weight, where it will be used.
        name: the module, for the error.
        dtype: compute type of the activations.
        output_dtype: of the outputs; that of the activations when not given.
        dense_OI: the dense copy that the kernel will be given, if any.
        tokens: rows of the fixed input; None takes one number for each regime of the kernel's.
        kernel: implementation by name.

    Returns:
        The largest error over tokens and output rows, relative to |x| |w_row|.

    Raises:
        LayoutGateError: the error exceeds `TOLERANCES[dtype]`, naming module, kernel and row.
        KernelUnavailableError: `kernel` cannot run here.
    """
    device = weight.device
    module, chosen = dispatch.load("fp4_linear", device, kernel), dispatch.resolve("fp4_linear", device, kernel)
    exact_OI = dequantize(weight, torch.float64)
    largest = 0.0
    if tokens is not None:
        counts: tuple[int, ...] = (tokens,)
    else:
        counts = _one_of_each(weight) if device.type == "cuda" else (8,)
    for count in counts:
        x_TI = fixed_input(count, weight.shape[1], dtype, device)
        y_TO, _ = module.forward(x_TI, weight, None, (), (), (), dense_OI, output_dtype)
        for start in range(0, count, _COMPARED_AT_ONCE):
            some = slice(start, start + _COMPARED_AT_ONCE)
            row, error = worst_row(y_TO[some], x_TI[some], exact_OI)
            check_error(error, row, name, chosen, weight, dtype)
            largest = max(largest, error)
    return largest


def _one_of_each(weight: PackedWeight) -> tuple[int, ...]:
    return one_of_each(torch.cuda.get_device_capability(weight.device), kept=weight.kept_OI is not None)


def fixed_input(tokens: int, d_in: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The activations that gates compare on, standard normal [tokens, d_in]."""
    return philox.normal(0, "layout_gate", tokens * d_in, device=device).view(tokens, d_in).to(dtype)


def worst_row(y_TO: Tensor, x_TI: Tensor, w_OI: Tensor) -> tuple[int, float]:
    """(output row, error relative to |x| |w_row|) with the largest error of y against x w^T, `w_OI` float64."""
    x_TI = x_TI.double()
    sizes_TO = x_TI.norm(dim=1)[:, None] * w_OI.norm(dim=1).clamp(min=1e-30)
    errors_O = ((y_TO.double() - x_TI @ w_OI.T).abs() / sizes_TO).nan_to_num(nan=torch.inf).amax(0)
    worst = int(errors_O.argmax())
    return worst, float(errors_O[worst])


def check_error(error: float, row: int, name: str, kernel: str, weight: PackedWeight, dtype: torch.dtype) -> None:
    """Stop on an error above `TOLERANCES[dtype]`.

    Raises:
        LayoutGateError: naming module, kernel and row.
    """
    tolerance = TOLERANCES[dtype]
    if error > tolerance:
        raise LayoutGateError(
            f"module '{name}': the {kernel} kernel disagrees with the dequantized {weight.format} weight",
            got=f"relative error {error:.2e} at output row {row} of {list(weight.shape)}",
            expected=f"at most {tolerance:.0e} in {str(dtype).removeprefix('torch.')}",
            remedy="Packed storage and kernel do not share one layout; choose another kernel and report this.",
        )
