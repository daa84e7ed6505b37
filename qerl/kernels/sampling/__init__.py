"""Drawing a token a row from logits, the numbers that decide it, and the books of the rows: what follows the LM head.

Legend: B rows, V vocabulary, W steps of a window, R rows of the window.
"""

from __future__ import annotations

from torch import Tensor

from qerl.kernels import dispatch
from qerl.kernels.sampling.reference import BLOCK

__all__ = ["BLOCK", "advance_rows", "draw_token", "keyed_uniforms", "truncate"]


def draw_token(
    logits_BV: Tensor, uniform_B: Tensor | None, temperature: float | Tensor, *, kernel: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Invert the cumulative distribution of softmax(logits / T), in vocabulary order, at a uniform number a row.

    The sum of each block of ``BLOCK`` tokens decides the block, and the tokens of that block the token; sums of blocks are in
    float64. Implementations agree except where the uniform number falls within rounding of the edge of a token.

    Args:
        logits_BV: float32; -inf marks impossible tokens, which are never drawn. Unchanged.
        uniform_B: float32 in (0, 1); None for the arg-max (the lowest index of equals).
        temperature: T > 0; a float64 tensor [1] where it must be read on the device. Not used without ``uniform_B``.
        kernel: implementation by name.

    Returns:
        (tokens int64 [B], float32 [B]: log softmax(logits / T)[token], of T = 1 for the arg-max). A row that holds a NaN
        gives a NaN.

    Raises:
        KernelUnavailableError: `kernel` cannot run here.
    """
    return dispatch.load("sampling", logits_BV.device, kernel).draw_token(logits_BV, uniform_B, temperature)


def truncate(
    logits_BV: Tensor,
    temperature: float | Tensor,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Make tokens impossible that the truncations drop, in this order, each on what the one before it left.

    Args:
        logits_BV: float32; -inf marks impossible tokens. Unchanged.
        temperature: T > 0; a float64 tensor [1] where it must be read on the device.
        top_k: keep every token at least as likely as the k-th; 0 for all.
        top_p: keep the fewest likeliest tokens whose share reaches p, the one that crosses it included; of equals, those of lowest index.
        min_p: drop tokens less than so many times as likely as the likeliest.
        kernel: implementation by name.

    Returns:
        (logits with -inf in the place of dropped ones, float32 [B]: log of the share of softmax(logits / T) that was kept).

    Raises:
        KernelUnavailableError: `kernel` cannot run here.
    """
    implementation = dispatch.load("sampling", logits_BV.device, kernel)
    return implementation.truncate(logits_BV, temperature, top_k, top_p, min_p)


def keyed_uniforms(key_3: Tensor, positions_B: Tensor, sample_keys_B: Tensor, *, kernel: str = "auto") -> Tensor:
    """``philox.uniform_at`` with the key in device memory: float32 [B] in (0, 1), equal bit for bit.

    Args:
        key_3: int64: the two key words of seed and stream, and the counter word of the rollout.
        positions_B: int64, counter word 0.
        sample_keys_B: int64, counter word 1.
        kernel: implementation by name.
    """
    return dispatch.load("sampling", key_3.device, kernel).keyed_uniforms(key_3, positions_B, sample_keys_B)


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
    kernel: str = "auto",
) -> None:
    """Enter one step's tokens in the books of the first B rows, in place.

    A row that is alive gets its token as ``last_token``, one more token and position, and an entry in line ``cursor`` of the
    window; it dies with a token of ``eos_E`` or with its last allowed token. Nothing of a dead row changes, and its entry is
    -1. Then the cursor moves on.

    Args:
        tokens_B: int64.
        behavior_B, sampler_B: float32, log-probs untruncated and under the sampler.
        last_token_R, length_R, count_R, limit_R: int64; limit is the most tokens of the answer.
        alive_R: int64, 0 or 1.
        cursor_1: int64 [1], in [0, W).
        eos_E: int64.
        tokens_WR: int32.
        logprobs_2WR: float32 [2, W, R].
        kernel: implementation by name.
    """
    dispatch.load("sampling", tokens_B.device, kernel).advance_rows(
        tokens_B,
        behavior_B,
        sampler_B,
        last_token_R=last_token_R,
        length_R=length_R,
        count_R=count_R,
        limit_R=limit_R,
        alive_R=alive_R,
        cursor_1=cursor_1,
        eos_E=eos_E,
        tokens_WR=tokens_WR,
        logprobs_2WR=logprobs_2WR,
    )
