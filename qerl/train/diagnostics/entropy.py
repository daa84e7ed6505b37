"""Entropies with their definition, and what noise adds to them: pure functions of logits and log-probs.

Shape legend: N contexts, V vocabulary, M noise draws, S answers.

At one context (prompt and answer so far) the next token O has, under noise draw z, the distribution p_z. Then

* conditional entropy ``E_z[H(O|z)]``: entropy first, mean over draws second;
* mixture entropy ``H(O)``: distributions are averaged over draws first, entropy second;
* their difference ``I(O;Z)``, the mutual information: how much noise states change what is said, in nats. Noise that
  only flattens every p_z alike raises both and leaves I at 0.

With M draws the plain mixture entropy is too low (by a share 1/M of I when noise is weak). The jackknife takes that term
out: ``M H_M - (M - 1) mean_m H_(M without m)``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qerl.records import SamplingSpec
from qerl.rollout.sampler import support


def distribution_entropies(logits_NV: Tensor, sampling: SamplingSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Entropies of one policy's next token under three definitions.

    Args:
        logits_NV: float32.
        sampling: temperature and truncations of the sampler. Temperature 0 (greedy) counts as 1 in the second.

    Returns:
        (raw_N, tempered_N, sampler_N), float64, nats: of softmax(logits); of softmax(logits / T) with full support; of
        what is left of that after top-k, top-p and min-p, renormalized (0 when greedy).
    """
    raw_N = entropy(torch.log_softmax(logits_NV, dim=-1))
    temperature = sampling.temperature or 1.0
    tempered_N = raw_N
    if temperature != 1.0:
        tempered_N = entropy(torch.log_softmax(logits_NV / temperature, dim=-1))
    if sampling.temperature == 0:
        return raw_N, tempered_N, torch.zeros_like(raw_N)
    if not sampling.truncated_support:
        return raw_N, tempered_N, tempered_N
    weights_NV = ((logits_NV - logits_NV.amax(-1, keepdim=True)) / temperature).exp()
    kept_NV = support(logits_NV, weights_NV, sampling)
    truncated_NV = (logits_NV / temperature).masked_fill(~kept_NV, -math.inf)
    return raw_N, tempered_N, entropy(torch.log_softmax(truncated_NV, dim=-1))


def entropy(logprobs_NV: Tensor) -> Tensor:
    """-sum p log p over the last dimension, float64, nats; tokens of probability 0 count 0."""
    products_NV = logprobs_NV.exp() * logprobs_NV.clamp(min=-1e4)
    return -products_NV.sum(-1, dtype=torch.float64)


def noise_entropies(logprobs_MNV: Tensor) -> tuple[Tensor, Tensor]:
    """Conditional and mixture entropy of each context over M noise draws.

    Args:
        logprobs_MNV: log p_z of every draw, float32, M >= 2.

    Returns:
        (conditional_N, mixture_N), float64, nats; the mixture with the jackknife's correction. mixture - conditional
        estimates I(O;Z), and may fall below 0 by its error.
    """
    draws = len(logprobs_MNV)
    assert draws >= 2, "a mixture needs at least two draws"
    conditional_N = torch.stack([entropy(logprobs_NV) for logprobs_NV in logprobs_MNV]).mean(0)
    probs_MNV = logprobs_MNV.exp()
    total_NV = probs_MNV.sum(0)
    mixture_N = entropy((total_NV / draws).log())
    without_MN = torch.stack([entropy(((total_NV - p_NV).clamp(min=0) / (draws - 1)).log()) for p_NV in probs_MNV])
    return conditional_N, draws * mixture_N - (draws - 1) * without_MN.mean(0)


def information_bounds(own_S: Tensor, draws_MS: Tensor) -> tuple[float, float]:
    """Bounds of I(O;Z) for whole answers O, in nats.

    Answers are drawn under a noise z_0; M further draws score them. With a(m) = log p_(z_m)(o) the two means over
    answers are, in expectation, a lower bound (z_0 counted among the draws, at most log(M + 1)) and an upper bound (z_0
    left out) of I(O;Z), and meet as M grows: the nested bounds of Foster et al., arXiv 1911.05546.

    Args:
        own_S: log p_(z_0)(o) of each answer, the sum over its tokens.
        draws_MS: log p_(z_m)(o), M >= 1.

    Returns:
        (low, high).
    """
    own_S, draws_MS = own_S.double(), draws_MS.double()
    count = len(draws_MS)
    all_S = torch.logsumexp(torch.cat((own_S[None], draws_MS)), dim=0) - math.log(count + 1)
    others_S = torch.logsumexp(draws_MS, dim=0) - math.log(count)
    return float((own_S - all_S).mean()), float((own_S - others_S).mean())
