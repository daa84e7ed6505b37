"""The next kernels for sm_90, chosen by name (`kernel="hopper"`): compiled for it by the tests, and not yet run on a device.

decode   few rows: as `cuda`, with bulk copies and remote stores that count at barriers
middle   tens to hundreds of rows: weight expanded in registers, wgmma, adapters in the epilogue
large    as `cuda`
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.errors import KernelUnavailableError
from qerl.formats import PackedWeight
from qerl.kernels.fp4_linear import cuda, decode, dense, middle, reference
from qerl.kernels.fp4_linear.adapter import Placement
from qerl.kernels.fp4_linear.geometry import BULK

DECODE_ROWS = 16
"""Rows of x up to which the decode kernel runs."""


def forward(
    x_TI: Tensor,
    weight: PackedWeight,
    bias_O: Tensor | None,
    placements: Sequence[Placement],
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
    dense_OI: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """As `cuda.forward`.

    Raises:
        KernelUnavailableError: the device is not of sm_90.
    """
    capability = torch.cuda.get_device_capability(x_TI.device)
    if capability != (9, 0):
        raise KernelUnavailableError(
            "the hopper kernels of fp4_linear do not run on this device",
            got="sm_" + "".join(str(part) for part in capability),
            expected="sm_90",
            remedy="Use kernel=cuda.",
        )
    if not cuda.fast(x_TI, weight, dense_OI):
        return reference.forward(x_TI, weight, bias_O, placements, a_RI, b_OR, dense_OI)
    if weight.order == "tiles":
        if x_TI.shape[0] <= DECODE_ROWS and decode.takes(x_TI, weight, placements, a_RI, b_OR, BULK):
            return decode.product(x_TI, weight, bias_O, placements, a_RI, b_OR, variant=BULK), None
        if x_TI.shape[0] <= middle.MOST_ROWS and middle.takes(x_TI, weight, placements, a_RI, b_OR):
            shrunk = tuple(x_TI @ a.T for a in a_RI)
            return middle.product(x_TI, weight, bias_O, placements, shrunk, b_OR), shrunk
    return dense.forward(x_TI, weight, bias_O, placements, a_RI, b_OR)


def input_gradient(grad_TO: Tensor, weight: PackedWeight, dense_OI: Tensor | None) -> Tensor:
    """As `cuda.input_gradient`."""
    return cuda.input_gradient(grad_TO, weight, dense_OI)
