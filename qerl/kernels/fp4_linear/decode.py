"""Launching the decode kernel: few rows of x, the weight read once, adapters and bias inside."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from qerl.formats import PackedWeight
from qerl.kernels.cuda import Kernel, Launch
from qerl.kernels.fp4_linear import geometry
from qerl.kernels.fp4_linear.adapter import Placement
from qerl.kernels.fp4_linear.geometry import Geometry
from qerl.kernels.fp4_linear.workspace import Workspace, compiled, workspace

MOST_ROWS = 16


class _Part(ctypes.Structure):
    _fields_ = (
        ("b", ctypes.c_void_p),
        ("row_start", ctypes.c_int),
        ("row_stop", ctypes.c_int),
        ("rank_start", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("unused", ctypes.c_int),
    )


class _Params(ctypes.Structure):
    """`DecodeParams` of cuda/decode.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("tiles", "x", "out", "bias", "global_scale", "a", "partial_h", "counters")
        ),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "units", "row_tiles", "ranks", "sub_slices")),
        *((name, ctypes.c_int) for name in ("round_tiles", "slice_units", "segments", "parts", "float_out")),
        ("segment_stop", ctypes.c_int * geometry.MAX_SEGMENTS),
        ("part", _Part * geometry.MAX_PARTS),
    )


def takes(
    x_TI: Tensor, weight: PackedWeight, placements: Sequence[Placement], a_RI: Sequence[Tensor], b_OR: Sequence[Tensor]
) -> bool:
    """Whether the kernel can run this call, whatever its speed."""
    even = all(
        place.ranks.start % 2 == 0 and b.shape[1] % 2 == 0 and b.is_contiguous() and b.dtype == torch.bfloat16
        for place, b in zip(placements, b_OR, strict=True)
    )
    return (
        0 < x_TI.shape[0] <= MOST_ROWS
        and len(a_RI) <= 1
        and all(a.is_contiguous() and a.dtype == torch.bfloat16 for a in a_RI)
        and even
        and len(placements) <= geometry.MAX_PARTS
        and len(weight.segments) <= geometry.MAX_SEGMENTS
        and find(workspace(x_TI.device), x_TI.shape[0], weight.shape, a_RI[0].shape[0] if a_RI else 0) is not None
    )


def product(
    x_TI: Tensor,
    weight: PackedWeight,
    bias_O: Tensor | None,
    placements: Sequence[Placement],
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """y [T, O] in `dtype` (bfloat16 or float32), rounded once, for what `takes` accepts."""
    space = workspace(x_TI.device)
    x_TI = x_TI.contiguous()
    ranks = a_RI[0].shape[0] if a_RI else 0
    shape = find(space, x_TI.shape[0], weight.shape, ranks)
    assert shape is not None, (x_TI.shape, weight.shape)
    assert -(-ranks // 16) * shape.partial_floats <= space.partial_h.numel(), "too many adapter ranks"
    out_TO = torch.empty(x_TI.shape[0], weight.shape[0], dtype=dtype, device=x_TI.device)
    if bias_O is not None:
        bias_O = bias_O.to(torch.bfloat16).contiguous()
    params = _Params(
        tiles=weight.tensors["tiles"].data_ptr(),
        x=x_TI.data_ptr(),
        out=out_TO.data_ptr(),
        bias=None if bias_O is None else bias_O.data_ptr(),
        global_scale=weight.tensors["global_scale"].data_ptr(),
        a=a_RI[0].data_ptr() if a_RI else None,
        partial_h=space.partial_h.data_ptr(),
        counters=space.counters.data_ptr(),
        m=x_TI.shape[0],
        n=weight.shape[0],
        k=weight.shape[1],
        units=shape.units,
        row_tiles=shape.row_tiles,
        ranks=ranks,
        sub_slices=shape.sub_slices,
        round_tiles=shape.round_tiles,
        slice_units=shape.slice_units,
        segments=len(weight.segments),
        parts=len(placements),
        float_out=int(dtype == torch.float32),
    )
    for index, stop in enumerate(accumulate(weight.segments)):
        params.segment_stop[index] = stop
    for index, (place, b) in enumerate(zip(placements, b_OR, strict=True)):
        params.part[index] = _Part(
            b.data_ptr(), place.rows.start, place.rows.stop, place.ranks.start, b.shape[1], place.scale, 0
        )
    _kernel(space, shape.columns, shape.cluster).launch(_launch(shape), params)
    return out_TO


def find(space: Workspace, rows: int, shape: tuple[int, int], ranks: int) -> Geometry | None:
    """The geometry for `rows` rows of x on a device; None where there is none."""
    key = (-(-rows // 8), shape, ranks)
    if key not in space.geometries:
        space.geometries[key] = geometry.best_geometry(
            rows,
            shape,
            ranks,
            clusters=lambda cluster: _clusters(space, cluster),
            limit=space.shared_limit,
        )
    return space.geometries[key]


def _clusters(space: Workspace, cluster: int) -> int:
    """Clusters that run at the same time, each block with all of a multiprocessor's shared memory."""
    if cluster == 1:
        return space.multiprocessors
    if torch.cuda.get_device_capability(space.device) < (9, 0):
        return 0
    launch = Launch(grid=cluster, block=geometry.THREADS, shared=space.shared_limit, cluster=cluster)
    return space.resident_clusters(launch)


def _kernel(space: Workspace, columns: int, cluster: int) -> Kernel:
    macros = {"NT": columns, "WARPS": geometry.WARPS, "STAGES": geometry.STAGES, "CLUSTER": cluster}
    return compiled(space.device, "decode", tuple(macros.items()))


def _launch(shape: Geometry) -> Launch:
    return Launch(
        grid=shape.clusters * shape.cluster, block=geometry.THREADS, shared=shape.shared, cluster=shape.cluster
    )
