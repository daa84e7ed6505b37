"""The layout gate of a packed LM head, a stretch of rows at a time (a vocabulary in float64 would be large)."""

from __future__ import annotations

import torch
from torch import Tensor

from qerl.formats import PackedWeight, get_format
from qerl.kernels import dispatch
from qerl.kernels.fp4_linear.gate import check_error, fixed_input, worst_row
from qerl.kernels.token_logprobs.head import row_stretches


def head_gate(
    head: PackedWeight,
    name: str = "lm_head",
    *,
    dtype: torch.dtype = torch.float32,
    dense_VD: Tensor | None = None,
    tokens: int = 8,
    kernel: str = "auto",
) -> float:
    """Compare the logits of the chosen kernel with the explicitly dequantized product, in float64, on fixed normal inputs.

    Arguments, result and errors as of `qerl.kernels.fp4_linear.layout_gate`; `dense_VD` is the dense copy that the kernel
    will be given, if any.
    """
    fmt = get_format(head.format)
    x_ND = fixed_input(tokens, head.shape[1], dtype, head.device)
    module = dispatch.load("token_logprobs", head.device, kernel)
    logits_NV = module.head_logits(x_ND, head if dense_VD is None else dense_VD, None)
    largest, worst = 0.0, 0
    for rows in row_stretches(head):
        exact_VD = fmt.dequantize(fmt.rows(head, rows.start, rows.stop), torch.float64)
        row, error = worst_row(logits_NV[:, rows], x_ND, exact_VD)
        if error > largest:
            largest, worst = error, rows.start + row
    check_error(largest, worst, name, dispatch.resolve("token_logprobs", head.device, kernel), head, dtype)
    return largest
