"""Error feedback (GPTQ): round one input column after the other, and let the columns to come make up for each error.

For given steps, the codes minimize sum_o d_o M d_o^T (see `qerl.formats.awq`) greedily: after column j is rounded with error
e_j = (w_j - w_hat_j) / U_jj, every later column k takes w_k -= e_j U_jk. U is the upper Cholesky factor of the inverse of the damped
moments, M + damping * mean(diag M) * 1; its row j is what eliminating the columns before j leaves of that inverse.

Source: Frantar et al., GPTQ (arXiv 2210.17323), section 3.3. Here the steps are fixed beforehand, so the order of the columns is
free: those with the largest moments come first, while most columns can still make up for them.

Legend: O output rows, I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qerl.errors import FormatError
from qerl.formats.awq import row_parts
from qerl.formats.base import BlockScales, WeightFormat

DAMPING = 0.01
COLUMNS = 128
"""Columns between two updates of all that follow; the result does not depend on it but for rounding."""
_DAMPING_TRIES = 4


def feedback_factor(moments_II: Tensor, damping: float = DAMPING) -> tuple[Tensor, Tensor, float]:
    """(U float32 [I, I], order int64 [I], the damping that was used) for `compensate`.

    The damping is raised tenfold, at most three times, where the factorization fails (fewer tokens than inputs, say).

    Raises:
        FormatError: the moments cannot be factorized: they are not finite, or no moments at all.
    """
    diagonal_I = moments_II.diagonal()
    order_I = torch.argsort(diagonal_I, descending=True, stable=True)
    mean = diagonal_I.mean()
    for attempt in range(_DAMPING_TRIES):
        used = damping * 10**attempt
        upper_II = _inverse_factor(moments_II, order_I, used * mean)
        if upper_II is not None:
            return upper_II, order_I, used
    raise FormatError(
        "the second moments of the calibration inputs cannot be factorized",
        got=f"diagonal from {float(diagonal_I.min()):.3g} to {float(diagonal_I.max()):.3g}, damping up to {used:g}",
        expected="finite moments of at least some active inputs",
        remedy="Use more or other calibration text.",
    )


def _inverse_factor(moments_II: Tensor, order_I: Tensor, added: Tensor) -> Tensor | None:
    """Upper Cholesky factor of the inverse of the ordered moments plus `added` on the diagonal; None where there is none.

    Two matrices exist at once beside the moments: these are the largest tensors of a quantization.
    """
    damped_II = moments_II[order_I[:, None], order_I]
    damped_II.diagonal().add_(added)
    lower_II, failed = torch.linalg.cholesky_ex(damped_II)
    del damped_II
    if failed:
        return None
    inverse_II = torch.cholesky_inverse(lower_II)
    del lower_II
    upper_II, failed = torch.linalg.cholesky_ex(inverse_II, upper=True)
    return None if failed or not bool(torch.isfinite(upper_II).all()) else upper_II


def compensate(
    weight_OI: Tensor,
    factor: tuple[Tensor, Tensor, float],
    scales: BlockScales,
    fmt: WeightFormat,
) -> Tensor:
    """Values that `scales` can represent, float32 [O, I], chosen with error feedback.

    Args:
        weight_OI: floating point.
        factor: from `feedback_factor`.
        scales: steps, fixed.
        fmt: the format of `scales`.

    Returns:
        w_hat; `fmt.quantize_with_scales(w_hat, scales)` stores it without further error.
    """
    upper_II, order_I, _ = factor
    steps_OI = fmt.steps(scales)
    out_OI = torch.empty(weight_OI.shape, device=weight_OI.device)
    for part in row_parts(weight_OI):
        work_OI = weight_OI[part].float()[:, order_I]
        _round_columns(work_OI, upper_II, steps_OI[part][:, order_I], fmt)
        out_OI[part, order_I] = work_OI
    return out_OI


def _round_columns(work_OI: Tensor, upper_II: Tensor, steps_OI: Tensor, fmt: WeightFormat) -> None:
    """Replaces each column by its rounded values, in place, updating those behind it."""
    inputs = work_OI.shape[1]
    diagonal_I = upper_II.diagonal()
    for start in range(0, inputs, COLUMNS):
        stop = min(start + COLUMNS, inputs)
        # Columns as rows, so that each is contiguous.
        block_CO = work_OI[:, start:stop].T.contiguous()
        steps_CO = steps_OI[:, start:stop].T.contiguous()
        errors_CO = torch.empty_like(block_CO)
        for j in range(stop - start):
            rounded_O = fmt.snap(block_CO[j], steps_CO[j])
            torch.div(block_CO[j] - rounded_O, diagonal_I[start + j], out=errors_CO[j])
            block_CO[j + 1 :].addr_(upper_II[start + j, start + j + 1 : stop], errors_CO[j], alpha=-1)
            block_CO[j] = rounded_O
        work_OI[:, start:stop] = block_CO.T
        if stop < inputs:
            work_OI[:, stop:].addmm_(errors_CO.T, upper_II[start:stop, stop:], alpha=-1)
