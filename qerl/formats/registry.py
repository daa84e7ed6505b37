"""Which weight formats exist: one line each."""

from __future__ import annotations

import torch
from torch import Tensor

from qerl.errors import FormatError, nearest
from qerl.formats.base import PackedWeight, WeightFormat
from qerl.formats.bf16 import Bf16Format
from qerl.formats.fp8 import Fp8Format
from qerl.formats.mxfp4 import Mxfp4Format
from qerl.formats.nf4 import Nf4Format
from qerl.formats.nvfp4 import Nvfp4Format

_FORMATS: dict[str, WeightFormat] = {
    fmt.name: fmt
    for fmt in (
        Bf16Format(),
        Nvfp4Format(),
        Mxfp4Format(),
        Nf4Format(),
        Nf4Format(double_quant=True),
        Fp8Format(),
    )
}

FORMAT_NAMES = tuple(_FORMATS)


def get_format(name: str) -> WeightFormat:
    """The format called `name`.

    Raises:
        FormatError: no such format.
    """
    if name not in _FORMATS:
        close = nearest(name, FORMAT_NAMES)
        raise FormatError(
            "unknown weight format",
            got=repr(name),
            expected="one of " + ", ".join(FORMAT_NAMES),
            remedy=f"Did you mean '{close}'?" if close else None,
        )
    return _FORMATS[name]


def dequantize(packed: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The dense matrix [d_out, d_in] of a packed weight of any format, in `dtype`."""
    return get_format(packed.format).dequantize(packed, dtype)
