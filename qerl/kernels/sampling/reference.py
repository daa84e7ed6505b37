"""Sampling in plain torch. Legend: B rows, V vocabulary, N blocks of the vocabulary, C tokens of a block."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from qerl.kernels.philox.reference import uniform_at

BLOCK = 128
"""Tokens per block of the two-level inversion: only the sum of each block and one block a row are summed in float64."""

SUMMED_AT_ONCE = 1 << 19
"""Weights whose blocks are summed at once: with fewer, threads wait for one another more often than they work; with many more, the float64 copy that torch
makes of them leaves the cache, and its memory goes back to the system."""

NUCLEUS_HEAD = 1024
"""Likeliest tokens among which top-p looks for its set before it sorts the whole vocabulary."""


def draw_token(logits_BV: Tensor, uniform_B: Tensor | None, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """See `qerl.kernels.sampling.draw_token`."""
    top_B1 = logits_BV.amax(-1, keepdim=True)
    if uniform_B is None:
        return logits_BV.argmax(-1), -weight_sums(logits_BV, top_B1, 1.0).sum(-1).log().float()
    sums_BN = weight_sums(logits_BV, top_B1, temperature)
    tokens_B = invert(logits_BV, top_B1, temperature, sums_BN, uniform_B)
    return tokens_B, token_logprobs(logits_BV, top_B1, temperature, tokens_B, sums_BN.sum(-1))


def truncate(
    logits_BV: Tensor, temperature: float | Tensor, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """See `qerl.kernels.sampling.truncate`."""
    weights_BV = token_weights(logits_BV, logits_BV.amax(-1, keepdim=True), temperature)
    whole_B = block_sums(weights_BV).sum(-1)
    dropped_BV = ~support(logits_BV, weights_BV, top_k, top_p, min_p)
    kept_B = block_sums(weights_BV.masked_fill_(dropped_BV, 0.0)).sum(-1)
    return logits_BV.masked_fill(dropped_BV, float("-inf")), (kept_B / whole_B).log().float()


def support(logits_BV: Tensor, weights_BV: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """bool [B, V]: the tokens that are kept, from their weights exp((logits - row maximum) / T)."""
    keep_BV = weights_BV > 0
    if 0 < top_k < logits_BV.shape[-1]:
        keep_BV &= logits_BV >= logits_BV.topk(top_k, dim=-1).values[:, -1:]
    if top_p < 1:
        keep_BV &= _nucleus(weights_BV.masked_fill(~keep_BV, 0.0), top_p)
    if min_p > 0:
        keep_BV &= weights_BV >= min_p
    return keep_BV


def _nucleus(weights_BV: Tensor, mass: float) -> Tensor:
    """bool [B, V]: the fewest likeliest tokens that reach the given share of each row's weight; of equals, the first.

    The likeliest few hundred tokens nearly always suffice, and finding them is far cheaper than sorting a vocabulary.
    """
    wanted_B1 = mass * weights_BV.sum(-1, keepdim=True, dtype=torch.float64)
    # Whether the head suffices is a question to the host, which a captured graph cannot ask.
    head = weights_BV.shape[-1] if weights_BV.is_cuda else min(NUCLEUS_HEAD, weights_BV.shape[-1])
    ordered_BH = weights_BV.topk(head, dim=-1).values
    until_BH = ordered_BH.cumsum(-1, dtype=torch.float64)
    if head < weights_BV.shape[-1] and bool((until_BH[:, -1:] < wanted_B1).any()):
        ordered_BH = weights_BV.sort(dim=-1, descending=True).values
        until_BH = ordered_BH.cumsum(-1, dtype=torch.float64)
    kept_BH = until_BH - ordered_BH < wanted_B1
    least_B1 = ordered_BH.gather(-1, kept_BH.sum(-1, keepdim=True) - 1)
    equals_B1 = (kept_BH & (ordered_BH == least_B1)).sum(-1, keepdim=True)
    equal_BV = weights_BV == least_B1
    return (weights_BV > least_B1) | (equal_BV & (equal_BV.cumsum(-1, dtype=torch.int32) <= equals_B1))


def token_weights(logits_BV: Tensor, top_B1: Tensor, temperature: float | Tensor) -> Tensor:
    """exp((logits - top) / T), float32 [B, V]."""
    gap_BV = logits_BV - top_B1
    if isinstance(temperature, Tensor):
        gap_BV.div_(temperature.float())
    elif temperature != 1:
        # By 1 it would be one more pass over the vocabulary for the same bits.
        gap_BV.div_(temperature)
    return gap_BV.exp_()


def token_logprobs(
    logits_BV: Tensor, top_B1: Tensor, temperature: float | Tensor, tokens_B: Tensor, total_B: Tensor
) -> Tensor:
    """float32 [B]: log of the weight of each row's token over the sum of its weights (float64 [B])."""
    scaled_B = (logits_BV.gather(-1, tokens_B[:, None]) - top_B1)[:, 0].double() / temperature
    return (scaled_B - total_B.log()).float()


def block_sums(weights_BV: Tensor) -> Tensor:
    """float64 [B, N]: sum of each block; the last may be a part of one."""
    padding = -weights_BV.shape[-1] % BLOCK
    if padding:
        weights_BV = functional.pad(weights_BV, (0, padding))
    return weights_BV.unflatten(-1, (-1, BLOCK)).sum(-1, dtype=torch.float64)


def weight_sums(logits_BV: Tensor, top_B1: Tensor, temperature: float | Tensor) -> Tensor:
    """float64 [B, N]: `block_sums` of the weights, which are held for a few rows at a time."""
    rows = max(1, SUMMED_AT_ONCE // logits_BV.shape[-1])
    parts = zip(logits_BV.split(rows), top_B1.split(rows), strict=True)
    return torch.cat([block_sums(token_weights(part_BV, part_B1, temperature)) for part_BV, part_B1 in parts])


def invert(
    logits_BV: Tensor, top_B1: Tensor, temperature: float | Tensor, sums_BN: Tensor, uniform_B: Tensor
) -> Tensor:
    """int64 [B]: first token whose cumulative weight exceeds uniform * total, found by block, then inside it."""
    block_B, rest_B = _first_above(sums_BN, uniform_B.double() * sums_BN.sum(-1))
    token_BC = block_B[:, None] * BLOCK + torch.arange(BLOCK, device=logits_BV.device)
    outside_BC = token_BC >= logits_BV.shape[-1]
    inside_BC = logits_BV.gather(-1, token_BC.masked_fill(outside_BC, 0)).masked_fill_(outside_BC, float("-inf"))
    return block_B * BLOCK + _first_above(token_weights(inside_BC, top_B1, temperature).double(), rest_B)[0]


def _first_above(weights_BN: Tensor, target_B: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the first positive weight whose cumulative sum exceeds the target, and what of the target is left there.

    When rounding leaves the target at or above the last sum, that is the last positive weight.
    """
    ends_BN = weights_BN.cumsum(-1)
    ends_BN = torch.where(weights_BN > 0, ends_BN, -1.0)
    reached_BN = (ends_BN > target_B[:, None]) | (ends_BN == ends_BN.amax(-1, keepdim=True))
    index_B = reached_BN.to(torch.uint8).argmax(-1)
    before_B = (ends_BN - weights_BN).gather(-1, index_B[:, None])[:, 0]
    return index_B, target_B - before_B


def keyed_uniforms(key_3: Tensor, positions_B: Tensor, sample_keys_B: Tensor) -> Tensor:
    """See `qerl.kernels.sampling.keyed_uniforms`."""
    word0, word1, rollout = key_3.tolist()
    counter = (positions_B, sample_keys_B, torch.full_like(positions_B, rollout), torch.zeros_like(positions_B))
    return uniform_at((word0, word1), counter)


def advance_rows(
    tokens_B: Tensor,
    behavior_B: Tensor,
    sampler_B: Tensor,
    *,
    last_token_R: Tensor,
    length_R: Tensor,
    count_R: Tensor,
    limit_R: Tensor,
    alive_R: Tensor,
    cursor_1: Tensor,
    eos_E: Tensor,
    tokens_WR: Tensor,
    logprobs_2WR: Tensor,
) -> None:
    """See `qerl.kernels.sampling.advance_rows`."""
    rows = len(tokens_B)
    alive_B = alive_R[:rows]
    entry_B = torch.where(alive_B > 0, tokens_B, -1)
    tokens_WR[:, :rows].index_copy_(0, cursor_1, entry_B[None].to(tokens_WR.dtype))
    for plane_WR, values_B in zip(logprobs_2WR, (behavior_B, sampler_B), strict=True):
        plane_WR[:, :rows].index_copy_(0, cursor_1, values_B[None])
    last_token_R[:rows] = torch.where(alive_B > 0, tokens_B, last_token_R[:rows])
    count_R[:rows] += alive_B
    length_R[:rows] += alive_B
    alive_B *= ~(tokens_B[:, None] == eos_E).any(-1) & (count_R[:rows] < limit_R[:rows])
    cursor_1 += 1
