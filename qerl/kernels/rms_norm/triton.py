# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""RMSNorm with residual add and noise in one pass over memory. Legend: T tokens, R draws, D channels.

A tile is a few whole rows, in registers. Its shape depends on D alone, so a row's bits do not depend on the rows beside it. A
program takes several tiles where there are many tokens: what all tokens share (w, or w + z) is then read once a program.
Float64 input (tests) goes to the reference.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.overlap import launch_next, overlap, wait
from qerl.kernels.philox.device import normal_rows_tile
from qerl.kernels.rms_norm import reference
from qerl.kernels.rms_norm.noise import KeyedNoise, NormNoise, TableNoise, noise_values
from qerl.kernels.sizes import ceil_div, power_of_2
from qerl.kernels.types import as_rows

# Elements a warp: 16 bytes of bfloat16 a thread.
_A_WARP = 256
# Warps of the programs that add up the gradient of w; each program owns a stretch of rows, and their sums are added in a fixed order.
_SUMMING_WARPS = 4096
# Most tiles of a program otherwise, and how many programs there must be for that.
_TILES, _PROGRAMS = 8, 1024
# Numbers that change from pass to pass, or from norm to norm, and that no access to memory is made wider by: kernels are compiled once for all of their values.
_OF_THE_PASS = ["count", "c1", "c1_stride", "c2_stride"]
# Draws are made once for all tokens that share one, and not in registers, where there are this many tokens a draw.
_SHARED = 2


def prepare(noise: NormNoise | None, x_TD: Tensor) -> tuple[Tensor | None, NormNoise | None]:
    """Noise as (tensor to keep for the backward pass, record to keep)."""
    if x_TD.dtype == torch.float64:
        return noise_values(noise), None
    return (noise, None) if noise is None or isinstance(noise, Tensor) else (None, noise)


def forward(
    x_TD: Tensor, weight_D: Tensor, eps: float, noise: NormNoise | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(h in `dtype`, inverse root mean square [T, 1])."""
    if x_TD.dtype == torch.float64:
        return reference.forward(x_TD, weight_D, eps, noise_values(noise), dtype)
    h, _, inverse_T1 = _launch_forward(x_TD, None, weight_D, eps, noise, dtype)
    return h, inverse_T1


def add_forward(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, noise: NormNoise | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(h in `dtype`, stream, inverse root mean square of the stream)."""
    if x_TD.dtype == torch.float64:
        return reference.add_forward(x_TD, residual_TD, weight_D, eps, noise_values(noise), dtype)
    h_TD, stream_TD, inverse_T1 = _launch_forward(x_TD, residual_TD, weight_D, eps, noise, dtype)
    assert stream_TD is not None
    return h_TD, stream_TD, inverse_T1


def backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    weight_D: Tensor,
    inverse_T1: Tensor,
    noise: NormNoise | None,
    grad_stream_TD: Tensor | None = None,
    *,
    needs_weight: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """See the reference."""
    if x_TD.dtype == torch.float64:
        z = noise_values(noise)
        return reference.backward(grad_TD, x_TD, weight_D, inverse_T1, z, grad_stream_TD, needs_weight=needs_weight)
    width = x_TD.shape[-1]
    x, grad = as_rows(x_TD, width), as_rows(grad_TD, width)
    stream = None if grad_stream_TD is None else as_rows(grad_stream_TD, width)
    rows_a_tile, block, warps = _tile(width)
    tiles = ceil_div(len(x), rows_a_tile)
    tiles_a_program = ceil_div(tiles, _SUMMING_WARPS // warps) if needs_weight else _tiles_a_program(tiles)
    programs = ceil_div(tiles, tiles_a_program) if tiles else 0
    grad_x = torch.empty_like(x)
    partial = torch.zeros(programs if needs_weight else 0, width, dtype=torch.float32, device=x.device)
    given = _NoiseArguments(noise, len(x))
    if programs:
        _backward[(programs,)](
            grad,
            x,
            weight_D,
            inverse_T1,
            stream,
            *given.pointers,
            grad_x,
            partial,
            len(x),
            tiles_a_program,
            **given.flags,
            ADD=stream is not None,
            NEEDS_WEIGHT=needs_weight,
            D=width,
            ROWS=rows_a_tile,
            BLOCK=block,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    grad_weight = partial.sum(0).to(weight_D.dtype) if needs_weight else None
    return grad_x.view(x_TD.shape), grad_weight


def _launch_forward(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    noise: NormNoise | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:
    width = x_TD.shape[-1]
    x, residual = as_rows(x_TD, width), None if residual_TD is None else as_rows(residual_TD, width)
    rows_a_tile, block, warps = _tile(width)
    h = torch.empty_like(x, dtype=dtype)
    stream = None if residual is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    inverse = torch.empty(*x_TD.shape[:-1], 1, dtype=torch.float32, device=x.device)
    given = _NO_NOISE if noise is None else _NoiseArguments(noise, len(x))
    tiles = ceil_div(len(x), rows_a_tile)
    tiles_a_program = _tiles_a_program(tiles)
    # Programs of one tile read w, and z where it lies in memory for the whole step, before the kernel in front of them has ended: nothing that lets
    # the next kernel come before its own end may write these.
    early = tiles_a_program == 1
    if tiles:
        _forward[(ceil_div(tiles, tiles_a_program),)](
            x,
            residual,
            weight_D,
            *given.pointers,
            h,
            stream,
            inverse,
            len(x),
            eps,
            tiles_a_program,
            **given.flags,
            EARLY=early,
            AHEAD=given.flags["SHARED"] or (early and given.in_rows),
            ADD=residual is not None,
            D=width,
            ROWS=rows_a_tile,
            BLOCK=block,
            num_warps=warps,
            enable_fp_fusion=False,
            **overlap(x.device),
        )
    if x is not x_TD:
        h, stream = h.view(x_TD.shape), None if stream is None else stream.view(x_TD.shape)
    return h, stream, inverse


@cache
def _tile(width: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a tile."""
    block = power_of_2(width)
    rows = max(1, 512 // block)
    return rows, block, min(max(rows * block // _A_WARP, 1), 16)


def _tiles_a_program(tiles: int) -> int:
    return min(max(tiles // _PROGRAMS, 1), _TILES)


class _NoiseArguments:
    """What the kernels are told of the noise: pointers (with strides) and compile-time flags."""

    def __init__(self, noise: NormNoise | None, tokens: int):
        if isinstance(noise, KeyedNoise) and noise.rows_T is not None and tokens >= _SHARED * len(noise.c2_R):
            noise = noise.table()
        table: tuple[Any, ...] = (None, 0)
        keyed: tuple[Any, ...] = (None, 0, None, 0, None, 0, None, None)
        of_tokens: tuple[Any, ...] = (None, None)
        spreads = False
        if isinstance(noise, Tensor):
            width = noise.shape[-1]
            table = (noise.reshape(-1, width).contiguous(), width if noise.dim() > 1 else 0)
        elif isinstance(noise, TableNoise):
            apart = noise.rows_T is not None or len(noise.z_RD) > 1
            table = (noise.z_RD.contiguous(), noise.z_RD.shape[1] if apart else 0)
            of_tokens = (noise.rows_T, noise.noisy_T)
        elif isinstance(noise, KeyedNoise):
            spreads = len(noise.spread) > 1
            stride1, stride2 = (0 if c is None or len(c) == 1 else 1 for c in (noise.c1_R, noise.c2_R))
            keyed = (noise.key_2, noise.c1, noise.c1_R, stride1, noise.c2_R, stride2, noise.c3_1, noise.spread)
            of_tokens = (noise.rows_T, noise.noisy_T)
        self.pointers = (*table, *keyed, *of_tokens)
        source = 2 if keyed[0] is not None else 1 if table[0] is not None else 0
        shared = source == 0 or (source == 1 and table[1] == 0 and of_tokens[1] is None)
        self.in_rows = source == 1 and all(tensor is None for tensor in of_tokens)
        """Whether z of token t is row t of a table, or the only one."""
        self.flags: dict[str, Any] = {"SOURCE": source, "SPREADS": spreads, "SHARED": shared}


_NO_NOISE = _NoiseArguments(None, 0)


@triton.jit
def _scale(
    w,
    table,
    table_stride,
    key,
    c1,
    c1_R,
    c1_stride,
    c2_R,
    c2_stride,
    c3_1,
    spread,
    rows_T,
    noisy_T,
    tokens,
    inside,
    SOURCE: tl.constexpr,
    SPREADS: tl.constexpr,
    SHARED: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """w + z of the given tokens (int64 [ROWS]), float32 [ROWS, BLOCK] or, where all tokens share it, [1, BLOCK] as w is."""
    columns = tl.arange(0, BLOCK)
    if SOURCE == 0:
        return w
    elif SHARED:
        return w + tl.load(table + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
    else:
        draw = tokens
        if rows_T is not None:
            draw = tl.load(rows_T + tokens, mask=inside, other=0)
        if SOURCE == 1:
            mask = inside[:, None] & (columns < D)[None, :]
            z = tl.load(table + draw[:, None] * table_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        else:
            word1 = tl.zeros((ROWS,), tl.int64) + c1
            if c1_R is not None:
                word1 += tl.load(c1_R + draw * c1_stride, mask=inside, other=0)
            word2 = tl.load(c2_R + draw * c2_stride, mask=inside, other=0)
            k0, k1 = tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32)
            word3 = tl.load(c3_1).to(tl.uint32)
            z = normal_rows_tile(k0, k1, word1.to(tl.uint32), word2.to(tl.uint32), word3, 0, ROWS, BLOCK)
            if SPREADS:
                z = z * tl.load(spread + columns, mask=columns < D, other=0.0)[None, :]
            else:
                z = z * tl.load(spread)
        if noisy_T is not None:
            z = z * tl.load(noisy_T + tokens, mask=inside, other=0).to(tl.float32)[:, None]
        return w + z


# Alone in a program, a tile is in no loop.
@triton.jit(do_not_specialize=_OF_THE_PASS, do_not_specialize_on_alignment=["tiles_a_program"])
def _forward(
    x,
    residual,
    weight,
    table,
    table_stride,
    key,
    c1,
    c1_R,
    c1_stride,
    c2_R,
    c2_stride,
    c3_1,
    spread,
    rows_T,
    noisy_T,
    h,
    stream,
    inverse,
    count,
    eps,
    tiles_a_program,
    SOURCE: tl.constexpr,
    SPREADS: tl.constexpr,
    SHARED: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
    ADD: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    launch_next(OVERLAP)
    if not EARLY:
        wait(OVERLAP)
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    w = tl.load(weight + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
    if AHEAD:
        tokens = program * ROWS + tl.arange(0, ROWS)
        inside = tokens < count
        scale = _scale(
            w, table, table_stride, key, c1, c1_R, c1_stride, c2_R, c2_stride, c3_1, spread, rows_T, noisy_T, tokens,
            inside, SOURCE, SPREADS, SHARED, D, ROWS, BLOCK,
        )  # fmt: skip
    if EARLY:
        wait(OVERLAP)
    for tile in range(tiles_a_program):
        tokens = (program * tiles_a_program + tile) * ROWS + tl.arange(0, ROWS)
        inside = tokens < count
        mask = inside[:, None] & (columns < D)[None, :]
        places = tokens[:, None] * D + columns[None, :]
        wide = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
        # Read, or drawn, before the sum of squares is waited for.
        if not AHEAD:
            scale = _scale(
                w, table, table_stride, key, c1, c1_R, c1_stride, c2_R, c2_stride, c3_1, spread, rows_T, noisy_T, tokens,
                inside, SOURCE, SPREADS, SHARED, D, ROWS, BLOCK,
            )  # fmt: skip
        if ADD:
            total = (tl.load(residual + places, mask=mask, other=0.0).to(tl.float32) + wide).to(stream.dtype.element_ty)
            tl.store(stream + places, total, mask=mask)
            wide = total.to(tl.float32)
        mean = tl.sum(wide * wide, axis=1) / D
        r = 1.0 / tl.sqrt_rn(mean + eps)
        tl.store(h + places, (wide * r[:, None] * scale).to(h.dtype.element_ty), mask=mask)
        tl.store(inverse + tokens, r, mask=inside)


@triton.jit(do_not_specialize=[*_OF_THE_PASS, "tiles_a_program"])
def _backward(
    grad,
    x,
    weight,
    inverse,
    grad_stream,
    table,
    table_stride,
    key,
    c1,
    c1_R,
    c1_stride,
    c2_R,
    c2_stride,
    c3_1,
    spread,
    rows_T,
    noisy_T,
    grad_x,
    partial,
    count,
    tiles_a_program,
    SOURCE: tl.constexpr,
    SPREADS: tl.constexpr,
    SHARED: tl.constexpr,
    ADD: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    w = tl.load(weight + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
    if SHARED:
        tokens = program * ROWS + tl.arange(0, ROWS)
        inside = tokens < count
        scale = _scale(
            w, table, table_stride, key, c1, c1_R, c1_stride, c2_R, c2_stride, c3_1, spread, rows_T, noisy_T, tokens,
            inside, SOURCE, SPREADS, SHARED, D, ROWS, BLOCK,
        )  # fmt: skip
    for tile in range(tiles_a_program):
        tokens = (program * tiles_a_program + tile) * ROWS + tl.arange(0, ROWS)
        inside = tokens < count
        mask = inside[:, None] & (columns < D)[None, :]
        places = tokens[:, None] * D + columns[None, :]
        value = tl.load(x + places, mask=mask, other=0.0)
        dh = tl.load(grad + places, mask=mask, other=0.0).to(tl.float32)
        r = tl.load(inverse + tokens, mask=inside, other=0.0)[:, None]
        u = value.to(tl.float32) * r
        if not SHARED:
            scale = _scale(
                w, table, table_stride, key, c1, c1_R, c1_stride, c2_R, c2_stride, c3_1, spread, rows_T, noisy_T, tokens,
                inside, SOURCE, SPREADS, SHARED, D, ROWS, BLOCK,
            )  # fmt: skip
        du = dh * scale
        dx = r * (du - u * (tl.sum(du * u, axis=1) / D)[:, None])
        if ADD:
            dx += tl.load(grad_stream + places, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x + places, dx.to(value.dtype), mask=mask)
        if NEEDS_WEIGHT:
            sums += tl.sum(dh * u, axis=0)
    if NEEDS_WEIGHT:
        tl.store(partial + program * D + columns, sums, mask=columns < D)
