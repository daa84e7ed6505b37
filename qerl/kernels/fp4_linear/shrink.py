"""Launching the shrink kernel: h = x A^T in front of products that do not make it themselves."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from qerl.kernels.cuda import Launch
from qerl.kernels.fp4_linear.workspace import Code, compiled

COLUMNS = 4
"""Rows of x of a block, in eights."""
CLUSTER = 8
"""Blocks that split the inputs."""
THREADS = 256
MOST_ROWS = 1024
"""Rows of x up to which this kernel takes the place of cuBLAS."""


class _Params(ctypes.Structure):
    """`ShrinkParams` of cuda/shrink.cu."""

    __slots__ = ()  # a name that is no field is an error
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "a", "h")),
        *((name, ctypes.c_int) for name in ("m", "k", "ranks", "rank_groups", "vectors")),
    )


def shrink(x_TI: Tensor, a_RI: Tensor) -> Tensor:
    """h = x A^T [T, R] of bfloat16 matrices, added in float32 and rounded to bfloat16 once.

    cuBLAS cuts the long sums of so few outputs into parts, which it would round too; so it gives its sums in float32.
    """
    if not 0 < x_TI.shape[0] <= MOST_ROWS or torch.cuda.get_device_capability(x_TI.device) != (9, 0):
        return torch.mm(x_TI, a_RI.T, out_dtype=torch.float32).to(torch.bfloat16)
    x_TI, a_RI = x_TI.contiguous(), a_RI.contiguous()
    (tokens, inputs), ranks = x_TI.shape, a_RI.shape[0]
    h_TR = torch.empty(tokens, ranks, dtype=torch.bfloat16, device=x_TI.device)
    vectors = inputs % 8 == 0 and x_TI.data_ptr() % 16 == 0 and a_RI.data_ptr() % 16 == 0
    params = _Params(
        x=x_TI.data_ptr(),
        a=a_RI.data_ptr(),
        h=h_TR.data_ptr(),
        m=tokens,
        k=inputs,
        ranks=ranks,
        rank_groups=-(-ranks // 16),
        vectors=int(vectors),
    )
    blocks = params.rank_groups * -(-tokens // (8 * COLUMNS)) * CLUSTER
    kernel = compiled(x_TI.device, *code())
    kernel.launch(Launch(grid=blocks, block=THREADS, cluster=CLUSTER, overlap=True), params)
    return h_TR


def code() -> Code:
    """What `shrink` runs where cuBLAS does not take its place."""
    return Code("shrink", tuple(macros().items()))


def macros() -> dict[str, int]:
    """Compile-time constants of cuda/shrink.cu."""
    return {"NT": COLUMNS, "CLUSTER": CLUSTER}
