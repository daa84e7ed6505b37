"""Choosing the next token: temperature, top-k, top-p, min-p, and the log-probs of the token that was chosen.

Order of the transforms (as in vLLM and transformers): temperature first; top-k keeps every token at least as likely as
the k-th (so ties may keep more than k); top-p, on what top-k left, renormalized, keeps the smallest set of likeliest
tokens whose mass reaches p, the one that crosses p included, equally likely tokens by lowest index; min-p drops tokens
less than min_p times as likely as the likeliest.

A token is drawn by inverting the cumulative distribution in vocabulary order at a uniform number that the caller keys
by (seed, stream, rollout, sample, position). Nothing here depends on the other rows of the batch.

Shape legend: B sequences, V vocabulary, W answer positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qerl.config.section import MIN_TEMPERATURE
from qerl.errors import ConfigError
from qerl.kernels.philox import uniform_at
from qerl.kernels.sampling import draw_token, reference, truncate
from qerl.records import SamplingSpec


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
        (
            "temperature",
            spec.temperature == 0 or spec.temperature >= MIN_TEMPERATURE,
            f"0 (greedy), or {MIN_TEMPERATURE:g} and more",
        ),
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
    kept_BV, share_B = truncate(logits_BV, temperature, top_k=spec.top_k, top_p=spec.top_p, min_p=spec.min_p)
    tokens_B, sampler_B = draw_token(kept_BV, uniform_B, temperature)
    return Chosen(tokens_B, sampler_B + share_B, sampler_B)


def support(logits_BV: Tensor, weights_BV: Tensor, spec: SamplingSpec) -> Tensor:
    """bool [B, V]: the tokens that top-k, top-p and min-p keep; the likeliest token is always among them.

    Args:
        logits_BV: float32.
        weights_BV: float32, exp((logits - row maximum) / T), so 1 for the likeliest token.
        spec: the truncations.
    """
    return reference.support(logits_BV, weights_BV, spec.top_k, spec.top_p, spec.min_p)
