"""What quantizing did to the model as a whole: its next-token distributions before and after, on the same text.

With p the distribution of the plain model and q that of the quantized one, at every scored token:

    KL(p, q) = sum p (log p - log q),   entropy = -sum p log p,   perplexity = exp(mean -log p[token]),   all in nats

Legend: N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qerl.kernels.token_logprobs import head_logits
from qerl.quantize.streams import Stream
from qerl.quantize.texts import TokenSequence

# Logits of this many tokens exist at once, for both models.
_TOKENS = {"cpu": 256, "cuda": 2048}

Head = Callable[[Tensor], Tensor]
"""Hidden states [N, D] that leave the last layer -> float32 logits [N, V]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFigures:
    """One value a scored token, float32 [N]."""

    kl: Tensor
    same_top: Tensor
    plain_entropy: Tensor
    entropy: Tensor
    plain_nll: Tensor
    nll: Tensor


def make_head(final_norm: Callable[[Tensor], Tensor], head_VD: Tensor) -> Head:
    """The last norm and the LM head."""
    return lambda x_ND: head_logits(final_norm(x_ND), head_VD)


@torch.no_grad()
def compare(plain: Stream, quantized: Stream, sequences: Sequence[TokenSequence], head: Head) -> dict[str, Any]:
    """Compare two streams of the same sequences that have passed the last layer.

    Returns:
        JSON values: means over tokens of all figures, the standard error of the mean KL over sequences, and how many sequences have
        a higher mean entropy after quantizing.
    """
    parts: list[TokenFigures] = []
    lengths: list[int] = []
    position = 0
    for (plain_TD, _), (quantized_TD, _), batch in zip(plain, quantized, plain.batches, strict=True):
        chosen = sequences[position : position + len(batch.lengths)]
        position += len(batch.lengths)
        index, count = _predictors(chosen)
        lengths += count
        targets_N = batch.tokens_T[index + 1].to(plain_TD.device)
        index = index.to(plain_TD.device)
        step = _TOKENS["cuda" if plain_TD.device.type == "cuda" else "cpu"]
        for start in range(0, index.numel(), step):
            part = index[start : start + step]
            parts.append(_figures(head(plain_TD[part]), head(quantized_TD[part]), targets_N[start : start + step]))
    joined = {
        name: torch.cat([getattr(part, name) for part in parts]).double().cpu() for name in TokenFigures.__slots__
    }
    return _summary(joined, lengths)


def _predictors(sequences: Sequence[TokenSequence]) -> tuple[Tensor, list[int]]:
    """(index in the packed batch of the position that predicts each scored token, scored tokens a sequence)."""
    index: list[int] = []
    count: list[int] = []
    start = 0
    for sequence in sequences:
        scored = range(start + sequence.first - 1, start + len(sequence.ids) - 1)
        index += scored
        count.append(len(scored))
        start += len(sequence.ids)
    return torch.tensor(index, dtype=torch.int64), count


def _figures(plain_NV: Tensor, quantized_NV: Tensor, targets_N: Tensor) -> TokenFigures:
    same_top = plain_NV.argmax(-1) == quantized_NV.argmax(-1)
    p_NV, q_NV = plain_NV.log_softmax(-1), quantized_NV.log_softmax(-1)
    plain_nll, nll = (-logs.gather(1, targets_N[:, None]).squeeze(1) for logs in (p_NV, q_NV))
    entropy = -(q_NV.exp() * q_NV).sum(-1)
    probability_NV = p_NV.exp()
    plain_entropy = -(probability_NV * p_NV).sum(-1)
    kl = probability_NV.mul_(p_NV.sub_(q_NV)).sum(-1)
    return TokenFigures(
        kl=kl, same_top=same_top.float(), plain_entropy=plain_entropy, entropy=entropy, plain_nll=plain_nll, nll=nll
    )


def _summary(values: dict[str, Tensor], lengths: list[int]) -> dict[str, Any]:
    means = {name: float(value.mean()) for name, value in values.items()}
    change = values["entropy"] - values["plain_entropy"]
    per_sequence = [float(part.mean()) for part in change.split(lengths)]
    kl_per_sequence = torch.tensor([float(part.sum()) for part in values["kl"].split(lengths)], dtype=torch.float64)
    return {
        "tokens": sum(lengths),
        "sequences": len(lengths),
        "kl": means["kl"],
        "kl_standard_error": _ratio_error(kl_per_sequence, torch.tensor(lengths, dtype=torch.float64)),
        "top1_agreement": means["same_top"],
        "plain_perplexity": math.exp(means["plain_nll"]),
        "perplexity": math.exp(means["nll"]),
        "plain_entropy": means["plain_entropy"],
        "entropy": means["entropy"],
        "entropy_change": means["entropy"] / means["plain_entropy"] - 1 if means["plain_entropy"] > 0 else None,
        "entropy_rises": sum(value > 0 for value in per_sequence),
        "entropy_falls": sum(value < 0 for value in per_sequence),
        "entropy_change_per_sequence": per_sequence,
        "mean_abs_logprob_change": float((values["nll"] - values["plain_nll"]).abs().mean()),
    }


def _ratio_error(sums: Tensor, counts: Tensor) -> float | None:
    """Standard error of sum(sums) / sum(counts) over independent sequences; None for a single one."""
    n = sums.numel()
    if n < 2:
        return None
    residual = sums - sums.sum() / counts.sum() * counts
    return float((residual.square().sum() * n / (n - 1)).sqrt() / counts.sum())
