# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""A token drawn from each row of logits that is never stored: by the sums of its parts, then by the logits of one part.

Legend: M tokens of a block, D hidden size, v rows of the head in a tile, P parts, C rows of the head in a part.

The rule is that of `qerl.kernels.sampling`: the cumulative distribution is inverted in vocabulary order at a uniform number. The pass over a tile
leaves the sum of exp(l - m) over every 128 of its rows, and m. When all tiles are done their sums, brought to one m in float64, tell the part that
holds the token, and its 128 logits are formed once more, by a product of float32 sums, when the tiles are walked over again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.sampling.triton import first_above
from qerl.kernels.sizes import ceil_div, power_of_2
from qerl.kernels.token_logprobs.choices import Wanted
from qerl.kernels.token_logprobs.device import completed, tempered

PART = 128
"""Rows of the head whose p are summed together."""
_WIDTH, _WARPS = 256, 16
"""Channels of a step of a program that forms logits anew, and its warps. Of a tile's tokens few draw in it, some dozens of a 7B, so that nothing hides a program's
way to memory but what it asks for at a time."""


class Draw:
    """What one block of tokens keeps for its draws: 4 bytes for every `PART` logits.

    Args:
        wanted: views of the block's tokens, with uniform numbers.
        tiles: rows of the head in each tile.
    """

    def __init__(self, wanted: Wanted, tiles: list[slice]):
        assert wanted.uniform_N is not None and wanted.drawn_N is not None and wanted.drawn_logprobs_N is not None
        self.uniform_M = wanted.uniform_N.contiguous()
        self.drawn_M, self.logprobs_M = wanted.drawn_N, wanted.drawn_logprobs_N
        count, device = len(self.uniform_M), self.uniform_M.device
        self.tiles, self.lanes = len(tiles), ceil_div(max(rows.stop - rows.start for rows in tiles), PART)
        # The last tile may have fewer parts; what it does not have weighs nothing.
        self.parts_MP = torch.zeros(count, self.tiles * self.lanes, dtype=torch.float32, device=device)
        self.references_Mt = torch.empty(count, self.tiles, dtype=torch.float32, device=device)
        self.part_M = torch.empty(count, dtype=torch.int64, device=device)
        self.rest_M = torch.empty(count, dtype=torch.float64, device=device)

    def choose_parts(self, sums_4M: Tensor) -> None:
        """After the last tile: the part of each token's draw."""
        pick_part[(len(self.uniform_M),)](
            self.parts_MP,
            self.references_Mt,
            sums_4M,
            self.uniform_M,
            self.part_M,
            self.rest_M,
            self.tiles,
            self.lanes,
            PADDED=power_of_2(self.tiles * self.lanes),
            num_warps=4,
        )

    def resolve(
        self,
        tile: int,
        rows: slice,
        hidden_MD: Tensor,
        values_vD: Tensor,
        divisor_v: Tensor | None,
        bias_v: Tensor | None,
        sums_4M: Tensor,
        lse_M: Tensor,
        temperature: float,
    ) -> None:
        """The draws whose parts lie in a tile."""
        width = hidden_MD.shape[1]
        pick_token[(len(self.uniform_M),)](
            hidden_MD,
            values_vD,
            divisor_v,
            bias_v,
            sums_4M,
            lse_M,
            self.part_M,
            self.rest_M,
            self.drawn_M,
            self.logprobs_M,
            tile,
            self.lanes,
            rows.start,
            len(values_vD),
            width,
            temperature,
            UNIT=temperature == 1.0,
            PART=PART,
            WIDTH=min(power_of_2(width), _WIDTH),
            num_warps=_WARPS,
        )


@triton.jit
def pick_part(parts, references, sums, uniform, chosen, rest, tiles, lanes, PADDED: tl.constexpr):
    """One token: the part in which the cumulative sum passes uniform * total, and what of that is left there, relative to the last m."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, PADDED)
    inside = index < tiles * lanes
    reference = tl.load(references + row * tiles + index // lanes, mask=inside, other=-float("inf"))
    scale = tl.exp((reference - tl.load(sums + row)).to(tl.float64))
    weight = tl.load(parts + row * tiles * lanes + index, mask=inside, other=0.0).to(tl.float64) * scale
    total = tl.sum(weight, 0)
    part, left = first_above(weight, index, tl.load(uniform + row).to(tl.float64) * total, PADDED)
    tl.store(chosen + row, tl.minimum(part, tiles * lanes - 1).to(tl.int64))
    tl.store(rest + row, left)


@triton.jit(do_not_specialize=["tile", "lanes", "start", "count"])
def pick_token(
    hidden,
    values,
    divisor,
    bias,
    sums,
    lse,
    chosen,
    rest,
    drawn,
    logprobs,
    tile,
    lanes,
    start,
    count,
    width,
    temperature,
    UNIT: tl.constexpr,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One token whose part lies in this tile: the logits of the part, and the token of them."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.load(chosen + row)
    if part // lanes == tile:
        lane = tl.arange(0, PART)
        columns = (part % lanes) * PART + lane
        inside = columns < count
        channels = tl.arange(0, WIDTH)
        value = tl.zeros((PART,), tl.float32)
        for first in range(0, width, WIDTH):
            within = first + channels < width
            x = tl.load(hidden + row * width + first + channels, mask=within, other=0.0).to(tl.float32)
            places = columns[:, None] * width + first + channels[None, :]
            w = tl.load(values + places, mask=inside[:, None] & within[None, :], other=0.0).to(tl.float32)
            value += tl.sum(w * x[None, :], axis=1)
        scaled = tempered(completed(value, divisor, bias, columns, inside), temperature, UNIT)
        weight = tl.exp(scaled - tl.load(sums + row)).to(tl.float64)
        found, _ = first_above(weight, lane, tl.load(rest + row), PART)
        found = tl.minimum(found, count - 1 - (part % lanes) * PART)
        logit = tl.sum(tl.where(lane == found, scaled, 0.0), axis=0)
        tl.store(drawn + row, start + (part % lanes) * PART + found)
        tl.store(logprobs + row, logit - tl.load(lse + row))
