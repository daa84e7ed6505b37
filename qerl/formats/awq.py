"""Activation-aware searches on one weight: channel scales that are folded away, and the clipping of blocks.

Both minimize the error that quantizing leaves in the layer's output on calibration inputs X [T, I],

    E |x (w_hat - w)^T|^2 = sum_o d_o M d_o^T,     d = w_hat - w,   M = X^T X / T,

which the second moments M give exactly for all T tokens at once, so that no activation needs to be kept.

* Channel scales (`search_channel_scales`): s_i = (E|x_i|)^a, normalized; the layer computes (x / s)(w s)^T, of which only w s is
  quantized. Channels with large activations get a finer grid inside their block. Source: Lin et al., AWQ (arXiv
  2306.00978), section 3.2. a = 0 is among the candidates, so the search is never worse than not scaling.
* Clipping (`search_clips`): each block's scale is that of the block times a ratio. Below 1, its largest elements saturate and the
  others get a finer grid; above 1, the maximum falls on a lower code (4 instead of 6, say). The error of a block is
  d_b M_bb d_b^T, with the moments of its own inputs. A ratio of 1 is among the candidates.

Legend: O output rows, I inputs, B blocks of a row, K inputs of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qerl.formats.base import BlockScales, WeightFormat

EXPONENT_STEPS = (0.2, 0.1, 0.05)
"""The grid for a: all multiples of the first below 1, then the neighbors of the best so far at each finer step."""
RATIOS = (1.0, 0.9375, 0.875, 0.8125, 0.75, 0.6875, 0.625, 0.5625, 0.5, 1.0625, 1.125, 1.1875, 1.25, 1.375, 1.5, 2.0)
"""Candidates for the ratio of a block's scale to the one that its largest magnitude calls for."""

# Rows are worked through in parts of about this many elements; a multiple of 64 rows, so that blocks of a flattened
# matrix are not cut.
PART_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 25}
_ROW_MULTIPLE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelScales:
    """What `search_channel_scales` found."""

    scales_I: Tensor
    """float32 [I], positive; largest times smallest is 1."""
    exponent: float
    error: float
    """Output error, relative to the mean square of the output."""
    plain_error: float
    """The same without scaling."""


def second_moments(x_TI: Tensor, total: Tensor) -> None:
    """Add X^T X of a batch to `total`, float32 [I, I], in place; products are exact and sums float32."""
    if x_TI.device.type == "cuda" and x_TI.dtype in (torch.bfloat16, torch.float16):
        total += torch.mm(x_TI.T, x_TI, out_dtype=torch.float32)
    else:
        wide_TI = x_TI.float()
        total.addmm_(wide_TI.T, wide_TI)


def output_error(delta_OI: Tensor, moments_II: Tensor) -> Tensor:
    """sum_o d_o M d_o^T, a float64 scalar."""
    return (delta_OI @ moments_II).mul_(delta_OI).sum(dtype=torch.float64)


def relative_output_error(weight_OI: Tensor, w_hat_OI: Tensor, moments_II: Tensor) -> float:
    """Output error of w_hat over the mean square of the output of w; 0 if there is no output."""
    error = torch.zeros((), dtype=torch.float64, device=weight_OI.device)
    size = torch.zeros_like(error)
    for part in row_parts(weight_OI):
        dense_OI = weight_OI[part].float()
        error += output_error(w_hat_OI[part] - dense_OI, moments_II)
        size += output_error(dense_OI, moments_II)
    return float(error / size) if size > 0 else 0.0


def row_parts(weight_OI: Tensor) -> Iterator[slice]:
    """Slices of rows that bound the temporaries of a search."""
    rows, columns = weight_OI.shape
    elements = PART_ELEMENTS["cuda" if weight_OI.device.type == "cuda" else "cpu"]
    step = max(_ROW_MULTIPLE, elements // columns // _ROW_MULTIPLE * _ROW_MULTIPLE)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def search_channel_scales(
    weight_OI: Tensor,
    moments_II: Tensor,
    magnitudes_I: Tensor,
    fmt: WeightFormat,
    *,
    rounding: str = "ct",
    method: str = "rtn",
    steps: tuple[float, ...] = EXPONENT_STEPS,
) -> ChannelScales:
    """Search over a, with `method` as the quantizer inside.

    Args:
        weight_OI: floating point, rows of all projections that read the same input.
        moments_II: M, float32.
        magnitudes_I: E|x_i|, float32; equal entries get equal scales (which is how shared channels are tied).
        fmt, rounding, method: how the scaled weight is quantized.
        steps: coarse to fine; 0 is always tried.
    """
    output = sum(float(output_error(weight_OI[part].float(), moments_II)) for part in row_parts(weight_OI))
    errors: dict[float, float] = {}

    def attempt(exponent: float) -> None:
        scales_I = channel_scales(magnitudes_I, exponent)
        errors[exponent] = _scaled_error(weight_OI, scales_I, moments_II, fmt, rounding, method)

    for index in range(round(1 / steps[0])):
        attempt(round(index * steps[0], 6))
    for step in steps[1:]:
        best = min(errors, key=errors.__getitem__)
        for exponent in (round(best - step, 6), round(best + step, 6)):
            if 0 <= exponent < 1 and exponent not in errors:
                attempt(exponent)
    best = min(errors, key=errors.__getitem__)
    size = output if output > 0 else 1.0
    scales_I = channel_scales(magnitudes_I, best)
    return ChannelScales(scales_I=scales_I, exponent=best, error=errors[best] / size, plain_error=errors[0.0] / size)


def channel_scales(magnitudes_I: Tensor, exponent: float) -> Tensor:
    """(E|x_i|)^a over the geometric mean of its ends, float32 [I]. A channel that is never active counts as the least active one."""
    active = magnitudes_I > 0
    if exponent == 0.0 or not bool(active.any()):
        return torch.ones_like(magnitudes_I, dtype=torch.float32)
    # No channel counts as less than 1e-4 of the largest: scales stay within a range that every format holds.
    floor = torch.maximum(magnitudes_I[active].min(), 1e-4 * magnitudes_I.max())
    powers_I = magnitudes_I.float().clamp(min=floor).pow(exponent)
    return powers_I / (powers_I.max() * powers_I.min()).sqrt()


def _scaled_error(
    weight_OI: Tensor, scales_I: Tensor, moments_II: Tensor, fmt: WeightFormat, rounding: str, method: str
) -> float:
    """Output error of quantizing w s and dividing by s again."""
    columns_I = weight_OI.abs().amax(0).float() * scales_I
    whole = fmt.block_scales(columns_I[None], method="rtn", rounding=rounding)
    error = torch.zeros((), dtype=torch.float64, device=weight_OI.device)
    for part in row_parts(weight_OI):
        dense_OI = weight_OI[part].float()
        scaled_OI = dense_OI * scales_I
        scales = fmt.block_scales(scaled_OI, method=method, rounding=rounding, shared=whole)
        error += output_error(fmt.snap(scaled_OI, fmt.steps(scales)).div_(scales_I).sub_(dense_OI), moments_II)
    return float(error)


def search_clips(
    weight_OI: Tensor,
    moments_II: Tensor,
    scales: BlockScales,
    fmt: WeightFormat,
    ratios: tuple[float, ...] = RATIOS,
) -> tuple[BlockScales, Tensor]:
    """Choose the scale of each block by the output error it leaves.

    Args:
        weight_OI: floating point.
        moments_II: M, float32.
        scales: scales of the weight under `rtn` or a search; their tensor-wide part is kept.
        fmt: the format of `scales`.
        ratios: candidates; 1 is always tried.

    Returns:
        (scales, ratios float32 [O, B]) with `scales == block_scales(weight * ratio of its block)`. Where the format's blocks
        straddle rows (NF4 with inputs that are no multiple of 64) nothing is searched: B is 1 and all ratios are 1.
    """
    width = fmt.column_block(weight_OI.shape[1])
    if width != min(fmt.block, weight_OI.shape[1]):
        return scales, torch.ones(weight_OI.shape[0], 1, device=weight_OI.device)
    # Rows are searched apart from the fused parts they belong to, which share what is tensor-wide.
    wide = {key: tensor[:1] if key in fmt.per_segment else tensor for key, tensor in scales.tensors.items()}
    shared = replace(scales, tensors=wide)
    moments_BKK = diagonal_blocks(moments_II, width)
    ratios_OB = torch.ones(weight_OI.shape[0], moments_BKK.shape[0], device=weight_OI.device)
    for part in row_parts(weight_OI):
        dense_OI = weight_OI[part].float()
        least_OB: Tensor | None = None
        for ratio in dict.fromkeys((1.0, *ratios)):
            tried = fmt.block_scales(dense_OI * ratio, rounding=scales.rounding, shared=shared)
            delta_OI = fmt.snap(dense_OI, fmt.steps(tried)).sub_(dense_OI)
            error_OB = _block_errors(delta_OI, moments_BKK)
            if least_OB is None:
                least_OB = error_OB
                continue
            better_OB = error_OB < least_OB
            least_OB = torch.where(better_OB, error_OB, least_OB)
            ratios_OB[part].masked_fill_(better_OB, ratio)
    spread_OI = ratios_OB.repeat_interleave(width, dim=1)[:, : weight_OI.shape[1]]
    stretched_OI = spread_OI.mul_(weight_OI)
    chosen = fmt.block_scales(stretched_OI, rounding=scales.rounding, segments=scales.segments, shared=scales)
    return chosen, ratios_OB


def diagonal_blocks(moments_II: Tensor, width: int) -> Tensor:
    """The blocks [B, K, K] on the diagonal of [I, I], padded with zeros."""
    inputs = moments_II.shape[0]
    padded_II = torch.nn.functional.pad(moments_II, (0, -inputs % width, 0, -inputs % width))
    blocks = padded_II.shape[0] // width
    tiles_BKBK = padded_II.view(blocks, width, blocks, width)
    index_B = torch.arange(blocks, device=moments_II.device)
    return tiles_BKBK[index_B, :, index_B]


def _block_errors(delta_OI: Tensor, moments_BKK: Tensor) -> Tensor:
    """d_b M_bb d_b^T of every block, float32 [O, B]."""
    blocks, width, _ = moments_BKK.shape
    padded = torch.nn.functional.pad(delta_OI, (0, blocks * width - delta_OI.shape[1]))
    delta_BOK = padded.view(-1, blocks, width).transpose(0, 1)
    return torch.bmm(delta_BOK, moments_BKK).mul_(delta_BOK).sum(-1).T
