"""Launching the decode kernel: few rows of x, the weight read once for each group of them, adapters and bias inside."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.formats import PackedWeight
from qerl.kernels.cuda import Launch
from qerl.kernels.fp4_linear import geometry, record
from qerl.kernels.fp4_linear.adapter import Placement
from qerl.kernels.fp4_linear.geometry import Geometry
from qerl.kernels.fp4_linear.tiled import TILED
from qerl.kernels.fp4_linear.workspace import DECODE_COUNTERS, SCALE_BASE, Code, Workspace, compiled, workspace

MOST_ROWS = 64
"""Rows of x for which reading the weight once for every group of rows still pays."""
GROUPS = (32, 16, 8)
"""Rows of x of one launch, at most; the first that fits into shared memory."""


class _Params(ctypes.Structure):
    """`DecodeParams` of cuda/decode.cuh."""

    __slots__ = ()  # a name that is no field is an error
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tiles", "x", "out", "bias", "side", "a", "partials", "counters")),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "units", "row_tiles")),
        *((name, ctypes.c_int) for name in ("round_tiles", "slice_units", "rank_slots", "ranks")),
        *((name, ctypes.c_int) for name in ("groups", "chunks")),
        *((name, ctypes.c_int) for name in ("segments", "parts", "float_out")),
        ("scale_base", ctypes.c_uint),
        ("segment_stop", record.Stops),
        ("part", record.Parts),
    )


def takes(
    x_TI: Tensor,
    weight: PackedWeight,
    placements: Sequence[Placement],
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
) -> bool:
    """Whether the kernel can run this call, whatever its speed."""
    return (
        0 < x_TI.shape[0] <= MOST_ROWS
        and record.fits(weight, placements, a_RI, b_OR)
        and find(workspace(x_TI.device), x_TI.shape[0], weight, ranks_of(a_RI)) is not None
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
    tokens = x_TI.shape[0]
    shape = find(space, tokens, weight, ranks_of(a_RI))
    assert shape is not None, (x_TI.shape, weight.shape)
    kernel = compiled(space.device, *_code(shape, x_TI, weight, a_RI))
    out_TO = torch.empty(tokens, weight.shape[0], dtype=dtype, device=x_TI.device)
    if bias_O is not None:
        bias_O = bias_O.to(torch.bfloat16).contiguous()
    pieces = shape.cluster * shape.chunks * shape.groups
    params = _Params(
        tiles=weight.tensors["tiles"].data_ptr(),
        bias=None if bias_O is None else bias_O.data_ptr(),
        side=record.side_of(weight),
        a=a_RI[0].data_ptr() if a_RI else None,
        partials=space.sums(pieces * shape.columns * 128).data_ptr() if pieces else None,
        counters=space.counters()[DECODE_COUNTERS].data_ptr(),
        n=weight.shape[0],
        k=weight.shape[1],
        units=shape.units,
        row_tiles=shape.row_tiles,
        round_tiles=shape.round_tiles,
        slice_units=shape.slice_units,
        rank_slots=shape.rank_slots,
        ranks=ranks_of(a_RI),
        groups=shape.groups,
        chunks=shape.chunks,
        segments=len(weight.segments),
        parts=len(placements),
        float_out=int(dtype == torch.float32),
        scale_base=SCALE_BASE,
        segment_stop=record.stops_of(weight),
        part=record.parts_of(placements, b_OR),
    )
    # Groups of equal size, so that every row of a call is summed in the same order.
    groups = -(-tokens // (8 * shape.columns))
    size = -(-tokens // groups)
    for start in range(0, tokens, size):
        part_TI, part_TO = x_TI[start : start + size], out_TO[start : start + size]
        params.x, params.out, params.m = part_TI.data_ptr(), part_TO.data_ptr(), part_TI.shape[0]
        kernel.launch(_launch(shape), params)
    return out_TO


def code(x_TI: Tensor, weight: PackedWeight, a_RI: Sequence[Tensor]) -> Code:
    """What `product` runs for a call that `takes` accepts."""
    shape = find(workspace(x_TI.device), x_TI.shape[0], weight, ranks_of(a_RI))
    assert shape is not None, (x_TI.shape, weight.shape)
    return _code(shape, x_TI, weight, a_RI)


def _code(shape: Geometry, x_TI: Tensor, weight: PackedWeight, a_RI: Sequence[Tensor]) -> Code:
    vectors = weight.shape[1] % 8 == 0 and all(t.data_ptr() % 16 == 0 for t in (x_TI, *a_RI))
    return Code("decode", tuple(macros(shape, weight.format, vectors).items()))


def ranks_of(a_RI: Sequence[Tensor]) -> int:
    """Rows of the stacked A."""
    return sum(a.shape[0] for a in a_RI)


def find(space: Workspace, rows: int, weight: PackedWeight, ranks: int) -> Geometry | None:
    """The geometry that `rows` rows of x and a tiled weight take on a device, all at once or in the largest groups that fit; None where none does."""
    tile = TILED[weight.format]
    for most in GROUPS:
        groups = -(-rows // most)
        columns = -(-rows // (8 * groups))
        key = (columns, weight.format, weight.shape, ranks)
        if key not in space.geometries:
            space.geometries[key] = geometry.best_geometry(
                8 * columns,
                weight.shape,
                ranks,
                clusters=lambda cluster: _clusters(space, cluster),
                limit=space.shared_limit,
                tile_bytes=tile.tile_bytes,
                table_bytes=tile.table_bytes(_stride(columns)),
            )
        if (found := space.geometries[key]) is not None:
            return found
    return None


def _clusters(space: Workspace, cluster: int) -> int:
    """Clusters that run at the same time, each block with all of a multiprocessor's shared memory."""
    if cluster == 1:
        return space.multiprocessors
    if torch.cuda.get_device_capability(space.device) < (9, 0):
        return 0
    launch = Launch(grid=cluster, block=geometry.threads(1), shared=space.shared_limit, cluster=cluster)
    return space.resident_clusters(launch)


def _stride(columns: int) -> int:
    """Bytes from one pair of codes to the next; there is room for the faster table beside few rows of x."""
    return 256 if columns == 1 else 128


def macros(shape: Geometry, name: str, vectors: bool = True) -> dict[str, int]:
    """Compile-time constants of the kernel for the format called `name`; `vectors`: rows of x and A are whole chunks of 16 bytes."""
    return {
        **TILED[name].macros(_stride(shape.columns)),
        "NT": shape.columns,
        "WARPS": geometry.warps(shape.columns),
        "CLUSTER": shape.cluster,
        "STAGES": shape.ring,
        "VECTORS": int(vectors),
    }


def _launch(shape: Geometry) -> Launch:
    return Launch(
        grid=shape.clusters * shape.cluster,
        block=geometry.threads(shape.columns),
        shared=shape.shared,
        cluster=shape.cluster,
        # A, B and bias are read ahead of the wait for the kernel in front. In a captured step that kernel never writes them; outside, it may
        # be what has just brought the adapters up to date.
        overlap=torch.cuda.is_current_stream_capturing(),
    )
