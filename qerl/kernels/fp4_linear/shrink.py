"""Launching the shrink kernel: h = x A^T in front of the middle kernel, which starts while it runs."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from qerl.kernels.cuda import Launch
from qerl.kernels.fp4_linear.workspace import compiled

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
        *((name, ctypes.c_int) for name in ("m", "k", "ranks", "rank_groups", "vectors", "unused")),
    )


def shrink(x_TI: Tensor, a_RI: Tensor) -> Tensor:
    """x A^T [T, R] of contiguous bfloat16 matrices, added in float32 and rounded to bfloat16 once; on sm_90."""
    if x_TI.shape[0] > MOST_ROWS:
        return x_TI @ a_RI.T
    (tokens, inputs), ranks = x_TI.shape, a_RI.shape[0]
    h_TR = torch.empty(tokens, ranks, dtype=torch.bfloat16, device=x_TI.device)
    rank_groups = -(-ranks // 16)
    vectors = inputs % 8 == 0 and x_TI.data_ptr() % 16 == 0 and a_RI.data_ptr() % 16 == 0
    params = _Params(
        x_TI.data_ptr(), a_RI.data_ptr(), h_TR.data_ptr(), tokens, inputs, ranks, rank_groups, int(vectors), 0
    )
    blocks = rank_groups * -(-tokens // (8 * COLUMNS)) * CLUSTER
    kernel = compiled(x_TI.device, "shrink", tuple(macros().items()))
    kernel.launch(Launch(grid=blocks, block=THREADS, cluster=CLUSTER, overlap=True), params)
    return h_TR


def macros() -> dict[str, int]:
    """Compile-time constants of cuda/shrink.cu."""
    return {"NT": COLUMNS, "CLUSTER": CLUSTER}
