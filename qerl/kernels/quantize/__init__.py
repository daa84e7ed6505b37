"""Quantize a weight that is on the device. The bytes are those of `qerl.formats`, whichever implementation makes them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qerl.formats import PackedWeight
from qerl.kernels import dispatch

__all__ = ["quantize"]


def quantize(
    weight_OI: Tensor,
    format_name: str,
    *,
    method: str = "rtn",
    rounding: str = "ct",
    segments: Sequence[int] | None = None,
    name: str = "weight",
    kernel: str = "auto",
) -> PackedWeight:
    """`get_format(format_name).quantize(weight)`, byte for byte.

    Args:
        weight_OI: floating point [d_out, d_in].
        format_name: one of `qerl.formats.FORMAT_NAMES`.
        method, rounding, segments, name: as of `WeightFormat.quantize`.
        kernel: implementation by name. `triton` has kernels for every format with method `rtn`, and does the rest as the
            reference does.

    Raises:
        FormatError: see `WeightFormat.quantize`.
        KernelUnavailableError: `kernel` cannot run here.
    """
    implementation = dispatch.load("quantize", weight_OI.device, kernel)
    return implementation.quantize(weight_OI, format_name, method, rounding, segments, name)
