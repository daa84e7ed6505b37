"""Scales that are quantized themselves: the second quantization of QLoRA.

    absmax = MAP[absmax_codes] * absmax_scales + absmax_offset

for the scales of one projection, N of them, in groups of 256:

    absmax_codes   uint8    [N]
    absmax_scales  float32  [ceil(N / 256)]   largest |absmax - offset| of a group
    absmax_offset  float32  [1]               mean absmax of the projection

MAP is the "dynamic" map of 256 values: in each decade [10^(i-7), 10^(i-6)], i = 0..6, the middles of 2^i equal intervals; their
negatives; 0 and 1. Equal to the byte to bitsandbytes' CPU build, which looks codes up in a table: x = (absmax - offset) / scale
is taken to the nearest of 65,536 evenly spaced numbers in [-1, 1], and the value of MAP nearest to that one is chosen; a group of
equal scales has codes 0. Where the mean of its scales overflows ours does not.

Source: QLoRA (arXiv 2305.14314), section 3; the map: Dettmers, 8-Bit Approximations (arXiv 1511.04561).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

GROUP = 256
KERNEL_SEGMENTS = 4
"""Projections that a weight can have for the CUDA kernels, at most."""
TABLE_SIZE = 65536
TABLE_STEP = (TABLE_SIZE - 1) / 2


@cache
def _map(device: torch.device) -> Tensor:
    """The 256 values in order, float32."""
    values = [torch.tensor([0.0, 1.0])]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32)
        middles = (edges[:-1] + edges[1:]) / 2.0
        scaled = 10.0 ** (i - 6) * middles
        values += [scaled, -scaled]
    return torch.cat(values).sort().values.to(device)


def quantize(absmax: Tensor, counts: Sequence[int]) -> dict[str, Tensor]:
    """The three stored tensors, projections of `counts` scales one after the other."""
    parts = [_quantize(part) for part in absmax.split(list(counts))]
    names = ("absmax_codes", "absmax_scales", "absmax_offset")
    return {key: torch.cat(column) for key, column in zip(names, zip(*parts, strict=True), strict=True)}


def offset(absmax_N: Tensor) -> Tensor:
    """The mean of the scales of a projection, float32 [1]; by way of float64 where their sum overflows."""
    mean = absmax_N.mean()
    return torch.where(torch.isfinite(mean), mean, absmax_N.double().mean().float()).reshape(1)


@cache
def table(device: torch.device) -> Tensor:
    """uint8 [65,536]: the code of each of the evenly spaced numbers k / 32767.5 - 1."""
    values = _map(torch.device("cpu"))
    x = torch.arange(TABLE_SIZE, dtype=torch.float32) / TABLE_STEP - 1
    right = torch.searchsorted(values, x).clamp_(max=values.numel() - 1)
    left = (right - 1).clamp_(min=0)
    return torch.where(values[right] - x < x - values[left], right, left).to(torch.uint8).to(device)


def _quantize(absmax_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    offset_1 = offset(absmax_N)
    count = absmax_N.numel()
    groups = torch.nn.functional.pad(absmax_N - offset_1, (0, -count % GROUP)).view(-1, GROUP)
    largest = groups.abs().amax(1)
    x = (groups * (1 / largest)[:, None]).clamp_(-1, 1)
    # What is no number, of a scale that is none or in a group of equal scales, must have a place in the table all the same.
    place = ((x + 1) * TABLE_STEP + 0.5).floor().nan_to_num_(0.0).long()
    codes = table(absmax_N.device)[place]
    codes.masked_fill_((largest == 0)[:, None], 0)
    return codes.view(-1)[:count], largest, offset_1


def dequantize(tensors: Mapping[str, Tensor], counts: Sequence[int]) -> Tensor:
    """float32 scales of all projections, one after the other."""
    codes, scales = tensors["absmax_codes"], tensors["absmax_scales"]
    values = _map(codes.device).index_select(0, codes.int())
    groups = [-(-count // GROUP) for count in counts]
    parts = [
        part * scale.repeat_interleave(GROUP)[: part.numel()] + offset
        for part, scale, offset in zip(
            values.split(list(counts)), scales.split(groups), tensors["absmax_offset"], strict=True
        )
    ]
    return torch.cat(parts)


def kernel_groups(tensors: Mapping[str, Tensor], segments: Sequence[int], blocks: int) -> Tensor:
    """What the CUDA kernels read beside `absmax_codes`, of projections of so many rows, each of `blocks` blocks: float32 and, first, int32,

    4 stops of segments, the last for those that there are not; 4 numbers that, added to row * blocks, give 256 times the first group of
    the segment for its first row; the 256 values of MAP; scale and offset of each group, and zeros for one more, which may be read
    """
    scales, offsets = tensors["absmax_scales"], tensors["absmax_offset"]
    counts = [-(-rows * blocks // GROUP) for rows in segments]
    stops = list(accumulate(segments))
    firsts = accumulate(counts[:-1], initial=0)
    starts = [GROUP * group - blocks * (stop - rows) for group, stop, rows in zip(firsts, stops, segments, strict=True)]
    fill = KERNEL_SEGMENTS - len(segments)
    numbers = torch.tensor([*stops, *stops[-1:] * fill, *starts, *starts[-1:] * fill], dtype=torch.int32)
    repeats = torch.tensor(counts, device=scales.device)
    offset_G = torch.repeat_interleave(offsets, repeats, output_size=len(scales))
    pairs = torch.stack((scales, offset_G), dim=1).view(-1)
    return torch.cat((numbers.view(torch.float32).to(scales.device), _map(scales.device), pairs, pairs.new_zeros(2)))


def from_kernel_groups(groups: Tensor, segments: Sequence[int], blocks: int) -> dict[str, Tensor]:
    """`absmax_scales` and `absmax_offset` again."""
    scales_G, offset_G = (
        groups[2 * KERNEL_SEGMENTS + 256 : -2].view(-1, 2).T.clone(memory_format=torch.contiguous_format)
    )
    firsts = list(accumulate((-(-rows * blocks // GROUP) for rows in segments[:-1]), initial=0))
    return {"absmax_scales": scales_G.clone(), "absmax_offset": offset_G[firsts]}


def nbytes(count: int) -> int:
    """Bytes that `count` scales of a projection take."""
    return count + 4 * -(-count // GROUP) + 4
