"""The large regime and the backward pass: a tiled weight is dequantized into shared scratch, and cuBLAS multiplies.

The scratch holds V = q * s, exact in bfloat16. cuBLAS multiplies its float32 sums by 1 / G and adds what the output holds already, bias
and adapters, before its one rounding:

    y = round((x V^T) / G + c),    c = round(bias + scale * B round(A x))

cuBLAS is told to add partial sums in float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor

from qerl.formats import PackedWeight, get_format
from qerl.kernels.cuda import Launch
from qerl.kernels.fp4_linear.adapter import Placement
from qerl.kernels.fp4_linear.workspace import SCALE_BASE, compiled, workspace

_BLOCKS_A_MULTIPROCESSOR = 8
_THREADS = 256


class _Params(ctypes.Structure):
    """`DequantizeParams` of cuda/dequantize.cu."""

    __slots__ = ()
    _fields_ = (
        ("tiles", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("n", "k", "units", "row_tiles")),
        ("scale_base", ctypes.c_uint),
    )


def forward(
    x_TI: Tensor,
    weight: PackedWeight,
    bias_O: Tensor | None,
    placements: Sequence[Placement],
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(y [T, O] bfloat16, the shrunk activations x A^T [T, R] of every distinct A)."""
    shrunk = tuple(x_TI @ a.T for a in a_RI)
    y_TO = torch.empty(x_TI.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x_TI.device)
    filled = _start(y_TO, bias_O, placements, shrunk, b_OR)
    values_OI, alphas = values(weight)
    with _float32_sums():
        for rows, alpha in alphas:
            y_TO[:, rows].addmm_(x_TI, values_OI[rows].T, beta=float(filled), alpha=alpha)
    return y_TO, shrunk


def input_gradient(grad_TO: Tensor, weight: PackedWeight) -> Tensor:
    """dX = dY W_hat [T, I], bfloat16; dequantizes again."""
    values_OI, alphas = values(weight)
    grad_TI = torch.empty(grad_TO.shape[0], weight.shape[1], dtype=grad_TO.dtype, device=grad_TO.device)
    with _float32_sums():
        for index, (rows, alpha) in enumerate(alphas):
            grad_TI.addmm_(grad_TO[:, rows], values_OI[rows], beta=float(index > 0), alpha=alpha)
    return grad_TI


@contextmanager
def _float32_sums() -> Iterator[None]:
    """No partial sums in bfloat16 inside."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        settings.allow_bf16_reduced_precision_reduction = before


def values(weight: PackedWeight) -> tuple[Tensor, list[tuple[slice, float]]]:
    """(V bfloat16 [d_out, d_in], output rows with the same 1 / G, each with it). V is in scratch that the next call overwrites
    if the weight is tiled; otherwise it is a temporary."""
    if weight.order != "tiles":
        return get_format(weight.format).dequantize(weight, torch.bfloat16), [(slice(0, weight.shape[0]), 1.0)]
    space = workspace(weight.device)
    out_OI = dequantize_tiles(weight, space.scratch(*weight.shape))
    alphas: list[tuple[slice, float]] = []
    stops = accumulate(weight.segments)
    for stop, count, alpha in zip(stops, weight.segments, space.alphas(weight), strict=True):
        start = stop - count
        if alphas and alphas[-1][1] == alpha:
            start = alphas.pop()[0].start
        alphas.append((slice(start, stop), alpha))
    return out_OI, alphas


def dequantize_tiles(weight: PackedWeight, out_OI: Tensor) -> Tensor:
    """V = q * s of a tiled weight, exact, into bfloat16 `out_OI` [d_out, d_in]; one pass."""
    tiles = weight.tensors["tiles"]
    row_tiles, units, _ = tiles.shape
    space = workspace(weight.device)
    blocks = min(-(-row_tiles * units * 32 // _THREADS), space.multiprocessors * _BLOCKS_A_MULTIPROCESSOR)
    params = _Params(tiles.data_ptr(), out_OI.data_ptr(), *weight.shape, units, row_tiles, SCALE_BASE)
    compiled(weight.device, "dequantize").launch(Launch(grid=blocks, block=_THREADS), params)
    return out_OI


def _start(
    y_TO: Tensor,
    bias_O: Tensor | None,
    placements: Sequence[Placement],
    shrunk: Sequence[Tensor],
    b_OR: Sequence[Tensor],
) -> bool:
    """Writes bias + scale * B h to the output, rounded; False if there is neither, and nothing was written."""
    if not placements:
        if bias_O is not None:
            y_TO.copy_(bias_O.expand_as(y_TO))
        return bias_O is not None
    covered = sum(place.rows.stop - place.rows.start for place in placements)
    if covered < y_TO.shape[1]:
        y_TO.copy_(bias_O.expand_as(y_TO)) if bias_O is not None else y_TO.zero_()
    for place, b in zip(placements, b_OR, strict=True):
        part_TO, h_TR = y_TO[:, place.rows], shrunk[place.a_index][:, place.ranks]
        if bias_O is None:
            part_TO.addmm_(h_TR, b.T, beta=0.0, alpha=place.scale)
        else:
            bias = bias_O[place.rows].to(y_TO.dtype)
            torch.addmm(bias, h_TR, b.T, alpha=place.scale, out=part_TO)
    return True
