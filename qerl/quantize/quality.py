"""How far quantized tensors are from the tensors they were made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

_PART_ELEMENTS = 1 << 24

IDEAL_BYTES = 9 / 16
"""Bytes a weight of NVFP4 without padding and global scales: 4 bits, and 8 bits for 16 weights."""


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
    """Bytes of the tensor in the plain checkpoint."""

    def to_dict(self) -> dict[str, Any]:
        """What `quality.json` holds of it."""
        return {"shape": list(self.shape), **_figures(self.error, self.norm), "bytes": self.nbytes}

    def to_record(self) -> dict[str, Any]:
        """All fields as JSON values; see `from_record`."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> TensorQuality:
        """The inverse of `to_record`."""
        return cls(**{**record, "shape": tuple(record["shape"])})


def measure(weight: Tensor, dense: Tensor, *, nbytes: int, dense_nbytes: int) -> TensorQuality:
    """Compare `weight` [d_out, d_in] with `dense`, what its stored form of `nbytes` stands for; norms in float64."""
    # By rows: a difference, or a float64 copy, of a whole tensor would be the largest thing in memory.
    step = max(1, _PART_ELEMENTS // weight.shape[1])
    parts = list(zip(weight.split(step), dense.split(step), strict=True))
    errors = [vector_norm(w_hat - w, dtype=torch.float64) for w, w_hat in parts]
    norms = [vector_norm(w, dtype=torch.float64) for w, _ in parts]
    return TensorQuality(
        shape=(weight.shape[0], weight.shape[1]),
        error=float(vector_norm(torch.stack(errors))),
        norm=float(vector_norm(torch.stack(norms))),
        nbytes=nbytes,
        dense_nbytes=dense_nbytes,
    )


def summary(tensors: dict[str, TensorQuality]) -> dict[str, Any]:
    """Figures over all tensors together, and the name of the worst one."""
    parts = tensors.values()
    error, norm = (math.hypot(*values) for values in ([p.error for p in parts], [p.norm for p in parts]))
    stored = sum(part.nbytes for part in parts)
    weights = sum(math.prod(part.shape) for part in parts)
    return {
        "tensors": len(tensors),
        **_figures(error, norm),
        "worst": max(tensors, key=lambda name: _relative(tensors[name].error, tensors[name].norm)),
        "bytes": stored,
        "dense_bytes": sum(part.dense_nbytes for part in parts),
        "bytes_per_weight": stored / weights,
        "over_ideal": stored / weights / IDEAL_BYTES,
    }


def _relative(error: float, norm: float) -> float:
    return error / norm if norm > 0 else 0.0


def _figures(error: float, norm: float) -> dict[str, float | None]:
    """Relative error |w_hat - w| / |w|, and the same as a signal to noise ratio in dB (none when it is exact)."""
    relative = _relative(error, norm)
    return {"relative_error": relative, "sqnr_db": -20 * math.log10(relative) if relative > 0 else None}
