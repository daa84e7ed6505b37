# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""silu(gate) * up in one pass over memory. Legend: T tokens, F width of the MLP, X = 2 F. Float64 goes to the reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.activation import reference
from qerl.kernels.overlap import begin, overlap
from qerl.kernels.sizes import ceil_div
from qerl.kernels.types import as_rows

_BLOCK, _WARPS = 1024, 4


def forward(gate_up_TX: Tensor) -> Tensor:
    """See `qerl.kernels.activation.silu_mul`."""
    if gate_up_TX.dtype == torch.float64:
        return reference.forward(gate_up_TX)
    width = gate_up_TX.shape[-1] // 2
    gate_up = as_rows(gate_up_TX, 2 * width)
    result = torch.empty(*gate_up_TX.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    if result.numel():
        _silu[(len(gate_up), ceil_div(width, _BLOCK))](
            gate_up,
            result,
            width,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=False,
            **overlap(gate_up.device),
        )
    return result


def backward(grad_TF: Tensor, gate_up_TX: Tensor) -> Tensor:
    """Gradient [T, 2 F]; see the reference."""
    if gate_up_TX.dtype == torch.float64:
        return reference.backward(grad_TF, gate_up_TX)
    width = grad_TF.shape[-1]
    gate_up = gate_up_TX.reshape(-1, 2 * width).contiguous()
    result = torch.empty(gate_up_TX.shape, dtype=gate_up.dtype, device=gate_up.device)
    if result.numel():
        _silu_gradient[(len(gate_up), ceil_div(width, _BLOCK))](
            grad_TF.contiguous(), gate_up, result, width, BLOCK=_BLOCK, num_warps=_WARPS, enable_fp_fusion=False
        )
    return result


@triton.jit
def _silu(gate_up, result, width, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    source = gate_up + row * 2 * width + columns
    gate = tl.load(source, mask=inside, other=0.0)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(result + row * width + columns, (silu * up).to(gate.dtype), mask=inside)


@triton.jit
def _silu_gradient(grad, gate_up, result, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    places = row * 2 * width + columns
    gate = tl.load(gate_up + places, mask=inside, other=0.0)
    up = tl.load(gate_up + places + width, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(grad + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-wide))
    silu = (wide * sigmoid).to(gate.dtype).to(tl.float32)
    dsilu = (dy * up).to(gate.dtype).to(tl.float32)
    dgate = dsilu * sigmoid * (1.0 + wide * (1.0 - sigmoid))
    tl.store(result + places, dgate.to(gate.dtype), mask=inside)
    tl.store(result + places + width, (dy * silu).to(gate.dtype), mask=inside)
