# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Keyed draws on the GPU in one launch each. Legend: R rows, n normals a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.random import philox_impl

from qerl.kernels.philox.device import normal_rows_tile, uniform_of
from qerl.kernels.philox.reference import Key
from qerl.kernels.sizes import ceil_div, power_of_2

_BLOCK, _WARPS = 512, 4
# Rows of a program where there are many: its key, and the steps of the key from round to round, serve so many blocks of a thread.
_TOGETHER = 4
# Programs of one row from which several rows a program still fill a device.
_MANY = 8192


def normal_rows(key: Key, n: int, c1: Tensor | int, c2: Tensor | int, c3: Tensor | int) -> Tensor:
    """See `qerl.kernels.philox.normal_rows_of`."""
    device = next(c.device for c in (c1, c2, c3) if isinstance(c, Tensor))
    key_2 = _on_device(key, device)
    counters = [c if isinstance(c, Tensor) else torch.full((1,), c, device=device) for c in (c1, c2, c3)]
    rows = max(map(len, counters))
    result_Rn = torch.empty(rows, n, dtype=torch.float32, device=device)
    strides = [c.stride(0) if len(c) == rows and rows > 1 else 0 for c in counters]
    block = min(_BLOCK, power_of_2(max(n, 4)))
    together = _TOGETHER if rows * ceil_div(n, block) >= _MANY else 1
    if result_Rn.numel():
        # One dimension: a second one ends at 65,535, which 8,193 rows of 4,864 numbers are beyond.
        _normal_rows[(ceil_div(rows, together) * ceil_div(n, block),)](
            key_2,
            *counters,
            *strides,
            result_Rn,
            rows,
            n,
            ROWS=together,
            BLOCK=block,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
    return result_Rn


def uniform_at(key: Key, counter: tuple[Tensor, ...]) -> Tensor:
    """See `qerl.kernels.philox.uniform_at`; the four counters broadcast."""
    c0, c1, c2, c3 = (c.contiguous() for c in torch.broadcast_tensors(*counter))
    key_2 = _on_device(key, c0.device)
    result = torch.empty(c0.shape, dtype=torch.float32, device=key_2.device)
    if result.numel():
        _uniform_at[(ceil_div(result.numel(), _BLOCK),)](
            key_2, c0, c1, c2, c3, result, result.numel(), BLOCK=_BLOCK, num_warps=_WARPS
        )
    return result


def _on_device(key: Key, device: torch.device) -> Tensor:
    """int64 [2]."""
    if isinstance(key, Tensor):
        return key
    first, second = key
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.stack((first.reshape(()), second.reshape(())))
    return torch.tensor(key, device=device)


@triton.jit(do_not_specialize=["stride1", "stride2", "stride3", "rows"])
def _normal_rows(key, c1, c2, c3, stride1, stride2, stride3, result, rows, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row_blocks = tl.cdiv(rows, ROWS)
    row = (tl.program_id(0) % row_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.program_id(0) // row_blocks * BLOCK
    z = normal_rows_tile(
        tl.load(key).to(tl.uint32),
        tl.load(key + 1).to(tl.uint32),
        tl.load(c1 + row * stride1, mask=inside, other=0).to(tl.uint32),
        tl.load(c2 + row * stride2, mask=inside, other=0).to(tl.uint32),
        tl.load(c3 + row * stride3, mask=inside, other=0).to(tl.uint32)[:, None],
        column // 4,
        ROWS,
        BLOCK,
    )
    columns = column + tl.arange(0, BLOCK)
    tl.store(result + row[:, None] * n + columns[None, :], z, mask=inside[:, None] & (columns < n)[None, :])


@triton.jit(do_not_specialize=["count"])
def _uniform_at(key, c0, c1, c2, c3, result, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    w0, _, _, _ = philox_impl(
        tl.load(c0 + places, mask=inside, other=0).to(tl.uint32),
        tl.load(c1 + places, mask=inside, other=0).to(tl.uint32),
        tl.load(c2 + places, mask=inside, other=0).to(tl.uint32),
        tl.load(c3 + places, mask=inside, other=0).to(tl.uint32),
        tl.load(key).to(tl.uint32),
        tl.load(key + 1).to(tl.uint32),
    )
    tl.store(result + places, uniform_of(w0), mask=inside)
