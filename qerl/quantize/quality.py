"""How far a packed weight is from the weight it was made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from qerl.formats import PackedWeight, dequantize


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorQuality:
    """Error of one tensor."""

    shape: tuple[int, int]
    error: float
    """Norm of w_hat - w."""
    norm: float
    """Norm of w."""
    nbytes: int
    """Stored bytes, scales included."""
    dense_nbytes: int
    """Bytes of the tensor as it was read."""

    def to_dict(self) -> dict[str, Any]:
        """What `quality.json` holds of it."""
        return {"shape": list(self.shape), **_figures(self.error, self.norm), "bytes": self.nbytes}


def measure(weight: Tensor, packed: PackedWeight) -> TensorQuality:
    """Compare `weight` [d_out, d_in] with what `packed` stands for; norms in float64."""
    difference = dequantize(packed).sub_(weight)
    return TensorQuality(
        shape=packed.shape,
        error=float(vector_norm(difference, dtype=torch.float64)),
        norm=float(vector_norm(weight, dtype=torch.float64)),
        nbytes=packed.nbytes(),
        dense_nbytes=weight.numel() * weight.element_size(),
    )


def summary(tensors: dict[str, TensorQuality]) -> dict[str, Any]:
    """Figures over all tensors together, and the name of the worst one."""
    parts = tensors.values()
    error, norm = (math.hypot(*values) for values in ([p.error for p in parts], [p.norm for p in parts]))
    return {
        "tensors": len(tensors),
        **_figures(error, norm),
        "worst": max(tensors, key=lambda name: _relative(tensors[name].error, tensors[name].norm)),
        "bytes": sum(part.nbytes for part in parts),
        "dense_bytes": sum(part.dense_nbytes for part in parts),
    }


def _relative(error: float, norm: float) -> float:
    return error / norm if norm > 0 else 0.0


def _figures(error: float, norm: float) -> dict[str, float | None]:
    """Relative error |w_hat - w| / |w|, and the same as a signal to noise ratio in dB (none when it is exact)."""
    relative = _relative(error, norm)
    return {"relative_error": relative, "sqnr_db": -20 * math.log10(relative) if relative > 0 else None}
