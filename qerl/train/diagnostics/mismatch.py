"""Why two log-probs of one sampled token differ: one cause at a time.

Shape legend: N answer tokens.

From the sampler to the updated trainer, each step changes one thing:

========== ============================ =====================================
cause      tokens are drawn from        compared with
========== ============================ =====================================
truncation sampler (top-k, top-p, min-p) engine, full support
kernel     engine                       trainer, same noise
noise      trainer, same noise          trainer, no noise
staleness  trainer before the updates   trainer after them, same noise
========== ============================ =====================================
"""

from __future__ import annotations

import torch
from torch import Tensor

CAUSES = ("truncation", "kernel", "noise", "staleness")


def mismatch(cause: str, first_N: Tensor, second_N: Tensor) -> dict[str, float]:
    """Metrics ``mismatch/{cause}/...`` of two log-probs of the same tokens.

    Args:
        cause: one of :data:`CAUSES`.
        first_N: log-probs under the policy that the tokens were drawn from.
        second_N: log-probs under the other.

    Returns:
        With w = exp(second - first): ``kl`` of first against second a token (mean of w - 1 - log w, Schulman's k3, whose
        expectation needs E[w] = 1; for truncation, where E[w] is the kept mass, the plain mean of -log w),
        ``max_abs_logp_difference``, ``mean_abs_prob_difference`` of the chosen tokens, and ``effective_sample_size``
        (sum w)^2 / (n sum w^2).
    """
    assert cause in CAUSES, cause
    first_N, second_N = first_N.double(), second_N.double()
    difference_N = second_N - first_N
    weight_N = difference_N.exp()
    kl_N = -difference_N if cause == "truncation" else weight_N - 1.0 - difference_N
    values = {
        "kl": kl_N.mean(),
        "max_abs_logp_difference": difference_N.abs().max(),
        "mean_abs_prob_difference": (second_N.exp() - first_N.exp()).abs().mean(),
        "effective_sample_size": weight_N.sum() ** 2 / (weight_N.numel() * (weight_N**2).sum()),
    }
    return {f"mismatch/{cause}/{name}": float(value) for name, value in values.items()}


def kept_mass(behavior_N: Tensor, sampler_N: Tensor) -> float:
    """Mean probability that the truncations leave, exp(behavior - sampler); 1 when they are off."""
    return float(torch.exp(behavior_N.double() - sampler_N.double()).mean())


def drawn_differently(first_N: Tensor, second_N: Tensor) -> float:
    """Share of the positions whose two tokens, drawn at one uniform number, differ.

    Of two distributions it is at least their distance |p - q|_1 / 2 in expectation, and 0 if they are equal; where probability moves
    between tokens that are far apart in the vocabulary it is more.
    """
    return float((first_N != second_N).double().mean())
