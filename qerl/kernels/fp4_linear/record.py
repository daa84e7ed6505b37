"""The C records that describe adapters and row segments to the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from qerl.formats import PackedWeight
from qerl.kernels.fp4_linear.adapter import Placement

MAX_PARTS = 4
MAX_SEGMENTS = 4


class Part(ctypes.Structure):
    """`Part` of cuda/layer.cuh."""

    __slots__ = ()  # a name that is no field is an error
    _fields_ = (
        ("b", ctypes.c_void_p),
        ("row_start", ctypes.c_int),
        ("row_stop", ctypes.c_int),
        ("rank_start", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("unused", ctypes.c_int),
    )


Parts = Part * MAX_PARTS
Stops = ctypes.c_int * MAX_SEGMENTS


def fits(weight: PackedWeight, placements: Sequence[Placement], a_RI: Sequence[Tensor], b_OR: Sequence[Tensor]) -> bool:
    """Whether a call can be described: one stacked A, bfloat16, even ranks, few parts and segments."""
    matrices = all(matrix.is_contiguous() and matrix.dtype == torch.bfloat16 for matrix in (*a_RI, *b_OR))
    even = all(place.ranks.start % 2 == 0 and place.ranks.stop % 2 == 0 for place in placements)
    few = len(a_RI) <= 1 and len(placements) <= MAX_PARTS and len(weight.segments) <= MAX_SEGMENTS
    return matrices and even and few


def parts_of(placements: Sequence[Placement], b_OR: Sequence[Tensor]) -> Parts:  # type: ignore[valid-type]
    """The adapter parts, in order."""
    return _parts_at(tuple(placements), tuple([b.data_ptr() for b in b_OR]), tuple([b.shape[1] for b in b_OR]))


@lru_cache(maxsize=4096)
def _parts_at(placements: tuple[Placement, ...], addresses: tuple[int, ...], ranks: tuple[int, ...]) -> Parts:  # type: ignore[valid-type]
    """Kept, since a pass asks for those of all its layers. Callers copy it."""
    parts = Parts()
    for index, (place, address, rank) in enumerate(zip(placements, addresses, ranks, strict=True)):
        parts[index] = Part(address, place.rows.start, place.rows.stop, place.ranks.start, rank, place.scale, 0)
    return parts


def side_of(weight: PackedWeight) -> int | None:
    """Address of what the kernels read beside tiles, where the format has such: divisors of segments or of rows, or what doubly quantized scales need."""
    for name in ("global_scale", "divisor", "groups"):
        if name in weight.tensors:
            return weight.tensors[name].data_ptr()
    return None


def stops_of(weight: PackedWeight) -> Stops:  # type: ignore[valid-type]
    """One past the last row of every segment."""
    return Stops(*accumulate(weight.segments))
