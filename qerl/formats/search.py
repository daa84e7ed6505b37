"""Choosing the scale of each block by the squared error that it leaves.

Legend: N blocks, K elements of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def squared_error(w_NK: Tensor, w_hat_NK: Tensor, importance_NK: Tensor | None = None) -> Tensor:
    """Sum over each block of importance * (w_hat - w)^2, float32 [N]; overwrites `w_hat_NK`."""
    error_NK = w_hat_NK.sub_(w_NK).square_()
    if importance_NK is not None:
        error_NK.mul_(importance_NK)
    return error_NK.sum(-1)


def least_error(
    w_NK: Tensor,
    candidates: Iterable[Tensor],
    round_trip: Callable[[Tensor, Tensor], Tensor],
    importance_NK: Tensor | None = None,
) -> Tensor:
    """For each block the candidate that leaves the least squared error; the earlier one of equals.

    Args:
        w_NK: blocks, float32 [..., K].
        candidates: tensors [...] with one scale a block, in whatever form it is stored; the first is the one to beat.
        round_trip: (w_NK, candidate) -> the values that would be stored, float32 [..., K], a new tensor.
        importance_NK: weights of the squared errors, broadcast to w_NK.

    Returns:
        [...], in the dtype of the candidates.
    """
    best: Tensor | None = None
    least: Tensor | None = None
    for candidate in candidates:
        error = squared_error(w_NK, round_trip(w_NK, candidate), importance_NK)
        if best is None or least is None:
            best, least = candidate, error
            continue
        better = error < least
        best = torch.where(better, candidate, best)
        least = torch.where(better, error, least)
    assert best is not None, "there is at least one candidate"
    return best
