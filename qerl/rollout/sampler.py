"""Choosing the next token: temperature, top-k, top-p, min-p, and the log-probs of the token that was chosen.

Order of the transforms (as in vLLM and transformers): temperature first; top-k keeps every token at least as likely as
the k-th (so ties may keep more than k); top-p, on what top-k left, renormalized, keeps the smallest set of likeliest
tokens whose mass reaches p, the one that crosses p included, equally likely tokens by lowest index; min-p drops tokens
less than min_p times as likely as the likeliest.

A token is drawn by inverting the cumulative distribution in vocabulary order at a uniform number that the caller keys
by (seed, stream, rollout, sample, position). Nothing here depends on the other rows of the batch.

Shape legend: B sequences, V vocabulary, N blocks of the vocabulary, W answer positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qerl.errors import ConfigError
from qerl.kernels.philox import uniform_at
from qerl.kernels.sampling import draw_token
from qerl.kernels.sampling.reference import block_sums, invert, token_logprobs, token_weights
from qerl.records import SamplingSpec

NUCLEUS_HEAD = 1024
"""Likeliest tokens among which top-p looks for its set before it sorts the whole vocabulary."""


class Chosen(NamedTuple):
    """The tokens of one step."""

    tokens_B: Tensor
    """int64 [B]."""
    behavior_logprobs_B: Tensor
    """float32 [B]: log softmax(logits / T)[token], untruncated; of T = 1 when greedy."""
    sampler_logprobs_B: Tensor
    """float32 [B]: the same renormalized over the tokens that the truncations keep; 0 when greedy."""


def check_sampling(spec: SamplingSpec) -> None:
    """Raise ConfigError, by the setting's name, for a value that has no meaning."""
    rules = (
        ("temperature", spec.temperature >= 0, "0 (greedy) or more"),
        ("top_p", 0 < spec.top_p <= 1, "more than 0 and at most 1 (1 is off)"),
        ("top_k", spec.top_k >= 0, "0 (off) or more"),
        ("min_p", 0 <= spec.min_p <= 1, "0 (off) to 1"),
        ("max_new_tokens", spec.max_new_tokens >= 1, "1 or more"),
    )
    for name, holds, expected in rules:
        if not holds:
            raise ConfigError(f"sampling setting {name} is out of range", got=getattr(spec, name), expected=expected)


def answer_uniforms(spec: SamplingSpec, sample_keys_B: Tensor, positions_B: Tensor, width: int) -> Tensor:
    """The random numbers of the next ``width`` answer tokens of each sequence.

    Args:
        spec: names seed, stream and rollout.
        sample_keys_B: int64 [B].
        positions_B: int64 [B], index of the next answer token (0 for the first).
        width: how many positions.

    Returns:
        float32 [B, W] in (0, 1); element [b, i] belongs to answer token positions_B[b] + i, whenever it is drawn.
    """
    positions_BW = positions_B[:, None] + torch.arange(width, device=positions_B.device)
    return uniform_at(spec.seed, spec.stream, positions_BW, sample_keys_B[:, None], spec.rollout, 0)


def choose(
    logits_BV: Tensor, spec: SamplingSpec, uniform_B: Tensor | None, temperature: float | Tensor | None = None
) -> Chosen:
    """Choose one token a row.

    Args:
        logits_BV: float32 [B, V]; -inf marks impossible tokens.
        spec: temperature and truncations. Temperature 0 takes the arg-max (the lowest index of equals).
        uniform_B: float32 [B] in (0, 1); None will do when greedy.
        temperature: ``spec.temperature`` in device memory (float64 [1]), where one captured graph serves all; that of ``spec``
            when not given.

    Returns:
        Chosen. A token of probability 0 is never chosen, whatever the uniform number. Rows that hold a NaN give NaN
        log-probs (the engine reports them).
    """
    temperature = spec.temperature if temperature is None else temperature
    if spec.temperature == 0:
        tokens_B, behavior_B = draw_token(logits_BV, None, 1.0 if isinstance(temperature, float) else temperature)
        return Chosen(tokens_B, behavior_B, torch.zeros_like(behavior_B))
    assert uniform_B is not None
    if not spec.truncated_support:
        tokens_B, behavior_B = draw_token(logits_BV, uniform_B, temperature)
        return Chosen(tokens_B, behavior_B, behavior_B)
    top_B1 = logits_BV.amax(-1, keepdim=True)
    weights_BV = token_weights(logits_BV, top_B1, temperature)
    total_B = block_sums(weights_BV).sum(-1)
    weights_BV = weights_BV.masked_fill_(~support(logits_BV, weights_BV, spec), 0.0)
    sums_BN = block_sums(weights_BV)
    tokens_B = invert(weights_BV, sums_BN, uniform_B)
    behavior_B, sampler_B = (
        token_logprobs(logits_BV, top_B1, temperature, tokens_B, whole_B) for whole_B in (total_B, sums_BN.sum(-1))
    )
    return Chosen(tokens_B, behavior_B, sampler_B)


def support(logits_BV: Tensor, weights_BV: Tensor, spec: SamplingSpec) -> Tensor:
    """bool [B, V]: the tokens that top-k, top-p and min-p keep; the likeliest token is always among them.

    Args:
        logits_BV: float32.
        weights_BV: float32, exp((logits - row maximum) / T), so 1 for the likeliest token.
        spec: the truncations.
    """
    keep_BV = weights_BV > 0
    if 0 < spec.top_k < logits_BV.shape[-1]:
        keep_BV &= logits_BV >= logits_BV.topk(spec.top_k, dim=-1).values[:, -1:]
    if spec.top_p < 1:
        keep_BV &= _nucleus(weights_BV.masked_fill(~keep_BV, 0.0), spec.top_p)
    if spec.min_p > 0:
        keep_BV &= weights_BV >= spec.min_p
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
