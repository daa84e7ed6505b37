"""Types and forms of tensors. Free of kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def as_type(values: Tensor, dtype: torch.dtype) -> Tensor:
    """``values.to(dtype)``. Torch is not asked where they have that type: a decode step on the CPU has hundreds of such places, .65 us each."""
    return values if values.dtype == dtype else values.to(dtype)


def as_rows(values: Tensor, width: int) -> Tensor:
    """A contiguous matrix of rows of that width: the tensor itself where it is one, since views take the host a good part of a launch."""
    return values if values.dim() == 2 and values.is_contiguous() else values.reshape(-1, width).contiguous()
