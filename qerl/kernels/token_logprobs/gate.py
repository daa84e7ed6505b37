"""The layout gate of a packed LM head, a stretch of rows at a time (a vocabulary in float64 would be large)."""

from __future__ import annotations

import torch
from torch import Tensor

from qerl.formats import PackedWeight, get_format
from qerl.kernels import dispatch
from qerl.kernels.fp4_linear.gate import check_error, fixed_input, worst_row
from qerl.kernels.fp4_linear.regimes import one_of_each
from qerl.kernels.token_logprobs import reference
from qerl.kernels.token_logprobs.head import row_stretches


def head_gate(
    head: PackedWeight,
    name: str = "lm_head",
    *,
    dtype: torch.dtype = torch.float32,
    dense_VD: Tensor | None = None,
    tokens: int | None = None,
    kernel: str = "auto",
) -> float:
    """Compare the logits of the chosen kernel with the explicitly dequantized product, in float64, on fixed normal inputs.

    Arguments, result and errors as of `qerl.kernels.fp4_linear.layout_gate`; `dense_VD` is the dense copy that the kernel
    will be given, if any. Without `tokens`, every kernel that reads the head as it is stored gets a number of them; and what
    training multiplies with, rows that are unpacked, is looked at too.
    """
    fmt = get_format(head.format)
    module = dispatch.load("token_logprobs", head.device, kernel)
    given = []
    for count in _reading(head.device) if tokens is None else (tokens,):
        x_ND = fixed_input(count, head.shape[1], dtype, head.device)
        given.append((x_ND, module.head_logits(x_ND, head if dense_VD is None else dense_VD, None)))
    if tokens is None and dense_VD is None:
        x_ND = given[0][0]
        given.append((x_ND, reference.head_logits(x_ND, head, None)))
    largest, worst = 0.0, 0
    for rows in row_stretches(head):
        exact_VD = fmt.dequantize(fmt.rows(head, rows.start, rows.stop), torch.float64)
        for x_ND, logits_NV in given:
            row, error = worst_row(logits_NV[:, rows], x_ND, exact_VD)
            if error > largest:
                largest, worst = error, rows.start + row
    check_error(largest, worst, name, dispatch.resolve("token_logprobs", head.device, kernel), head, dtype)
    return largest


def _reading(device: torch.device) -> tuple[int, ...]:
    """Numbers of tokens, one for each kernel that reads tiles."""
    return one_of_each(torch.cuda.get_device_capability(device))[:-1] if device.type == "cuda" else (8,)
