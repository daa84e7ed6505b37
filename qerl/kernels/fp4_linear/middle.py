"""Launching the middle kernel: tens to hundreds of rows of x, the weight expanded in registers and multiplied by wgmma."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl.formats import PackedWeight
from qerl.kernels.cuda import Kernel, Launch
from qerl.kernels.fp4_linear import record
from qerl.kernels.fp4_linear.adapter import Placement
from qerl.kernels.fp4_linear.workspace import SCALE_BASE, Workspace, compiled, workspace

MOST_ROWS = 512
ROWS_A_BLOCK = 128
THREADS = 256

_STEPS_OF_OVERHEAD = 8
"""What a block costs besides its steps, in steps."""


class _Params(ctypes.Structure):
    """`MiddleParams` of cuda/middle.cu."""

    __slots__ = ()  # a name that is no field is an error
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tiles", "x", "out", "bias", "global_scale", "h")),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "units", "row_tiles", "token_tiles", "ranks")),
        *((name, ctypes.c_int) for name in ("segments", "parts", "float_out")),
        ("scale_base", ctypes.c_uint),
        ("unused", ctypes.c_int),
        ("segment_stop", record.Stops),
        ("part", record.Parts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One way to run the kernel."""

    tokens: int
    """Rows of x of a block."""
    stages: int
    resident: int
    """Blocks of a multiprocessor."""
    cluster: int
    """Blocks that share outputs, each with a slice of the inputs."""

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self.stages * (128 * self.tokens + 5120) + 1024


def takes(
    x_TI: Tensor, weight: PackedWeight, placements: Sequence[Placement], a_RI: Sequence[Tensor], b_OR: Sequence[Tensor]
) -> bool:
    """Whether the kernel can run this call, whatever its speed."""
    return (
        torch.cuda.get_device_capability(x_TI.device) == (9, 0)
        and x_TI.shape[0] > 0
        and weight.shape[1] % 8 == 0
        and record.fits(weight, placements, a_RI, b_OR)
    )


def product(
    x_TI: Tensor,
    weight: PackedWeight,
    bias_O: Tensor | None,
    placements: Sequence[Placement],
    shrunk: Sequence[Tensor],
    b_OR: Sequence[Tensor],
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """y [T, O] in `dtype` (bfloat16 or float32), rounded once, for what `takes` accepts; `shrunk` is x A^T [T, R]."""
    space = workspace(x_TI.device)
    x_TI = x_TI.contiguous()
    if x_TI.data_ptr() % 16 != 0:
        x_TI = x_TI.clone()
    tokens, (row_tiles, units, _) = x_TI.shape[0], weight.tensors["tiles"].shape
    shape = choose(tokens, row_tiles, units, space.multiprocessors)
    token_tiles = -(-tokens // shape.tokens)
    out_TO = torch.empty(tokens, weight.shape[0], dtype=dtype, device=x_TI.device)
    if bias_O is not None:
        bias_O = bias_O.to(torch.bfloat16).contiguous()
    params = _Params(
        tiles=weight.tensors["tiles"].data_ptr(),
        x=x_TI.data_ptr(),
        out=out_TO.data_ptr(),
        bias=None if bias_O is None else bias_O.data_ptr(),
        global_scale=weight.tensors["global_scale"].data_ptr(),
        h=shrunk[0].data_ptr() if shrunk else None,
        m=tokens,
        n=weight.shape[0],
        k=weight.shape[1],
        units=units,
        row_tiles=row_tiles,
        token_tiles=token_tiles,
        ranks=shrunk[0].shape[1] if shrunk else 0,
        segments=len(weight.segments),
        parts=len(placements),
        float_out=int(dtype == torch.float32),
        scale_base=SCALE_BASE,
        segment_stop=record.stops_of(weight),
        part=record.parts_of(placements, b_OR),
    )
    blocks = -(-row_tiles * 16 // ROWS_A_BLOCK) * token_tiles * shape.cluster
    launch = Launch(grid=blocks, block=THREADS, shared=shape.shared, cluster=shape.cluster, overlap=True)
    _kernel(space, shape).launch(launch, params)
    return out_TO


def choose(tokens: int, row_tiles: int, units: int, multiprocessors: int) -> Shape:
    """The shape for `tokens` rows of x and a weight of so many tiles."""
    width, stages, resident = next(
        (entry for entry in ((32, 8, 2), (64, 6, 2), (128, 5, 2)) if tokens <= entry[0]), (256, 5, 1)
    )
    jobs = -(-row_tiles * 16 // ROWS_A_BLOCK) * -(-tokens // width)

    def cost(cluster: int) -> int:
        return -(-jobs * cluster // multiprocessors) * (-(-units // cluster) + _STEPS_OF_OVERHEAD)

    clusters = [cluster for cluster in (1, 2, 4, 8) if cluster <= min(units, width // 8)]
    return Shape(tokens=width, stages=stages, resident=resident, cluster=min(clusters, key=cost))


def wgmma_source(tokens: int) -> str:
    """CUDA C++ of `multiply`: the product of 64 rows x 16 inputs in registers with [16, tokens] in shared memory."""
    count = tokens // 2
    outputs = ",".join(f"%{index}" for index in range(count))
    operands = ",".join(f'"+f"(d[{index}])' for index in range(count))
    a = ",".join(f"%{count + index}" for index in range(4))
    return f"""
__device__ __forceinline__ void multiply(float (&d)[{count}], const u32 (&a)[4], u64 b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16 {{{outputs}}}, {{{a}}}, %{count + 4}, 1, 1, 1, 0;"
               : {operands}
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}}
"""


def macros(shape: Shape) -> dict[str, int]:
    """Compile-time constants of cuda/middle.cu."""
    return {"TOKENS": shape.tokens, "STAGES": shape.stages, "CLUSTER": shape.cluster, "RESIDENT": shape.resident}


def _kernel(space: Workspace, shape: Shape) -> Kernel:
    return compiled(space.device, "middle", tuple(macros(shape).items()), wgmma_source(shape.tokens))
