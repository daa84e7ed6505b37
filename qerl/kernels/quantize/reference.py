"""The formats' own arithmetic, in torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qerl.formats import PackedWeight, get_format


def quantize(
    weight_OI: Tensor, format_name: str, method: str, rounding: str, segments: Sequence[int] | None, name: str
) -> PackedWeight:
    """See `qerl.kernels.quantize.quantize`."""
    fmt = get_format(format_name)
    return fmt.quantize(weight_OI, method=method, rounding=rounding, segments=segments, name=name)
