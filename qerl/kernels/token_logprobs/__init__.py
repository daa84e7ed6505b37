"""Log-probabilities of given tokens and the entropy of the distribution, without ever storing [tokens, vocabulary].

Legend: N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qerl.kernels import dispatch
from qerl.kernels.token_logprobs.choices import TokenChoices, Wanted
from qerl.kernels.token_logprobs.gate import head_gate
from qerl.kernels.token_logprobs.head import Head

__all__ = ["Head", "TokenChoices", "head_gate", "head_logits", "token_choices", "token_logprobs"]


def head_logits(hidden_ND: Tensor, head: Head, bias_V: Tensor | None = None, *, kernel: str = "auto") -> Tensor:
    """Logits of the LM head, float32 [N, V] (float64 for float64 input).

    Operands are in hidden's dtype; products are accumulated and returned in float32. A packed head is unpacked a stretch of
    rows at a time, never as a whole. The sampler and the trainer both get their logits here.

    Raises:
        KernelUnavailableError: `kernel` cannot run here.
    """
    return dispatch.load("token_logprobs", hidden_ND.device, kernel).head_logits(hidden_ND, head, bias_V)


def token_logprobs(
    hidden_ND: Tensor,
    head: Head,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    chunk: int | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / T)[target] and the entropy of softmax(logits / T), in nats.

    Args:
        hidden_ND: output of the final norm at the positions that predict the targets.
        head: LM head weight [V, D], dense or packed.
        targets_N: int64, in [0, V).
        temperature: T > 0.
        bias: added to the logits, [V].
        chunk: tokens whose logits are held at once; None leaves it to the implementation, which holds at most 16 million
            logits. The values do not depend on it beyond rounding.
        kernel: implementation by name.

    Returns:
        (logprobs [N], entropy [N]), float32 (float64 for float64 input). Both carry gradients to hidden, bias and a dense
        head; the logits are computed again in the backward pass.

    Raises:
        KernelUnavailableError: `kernel` cannot run here.
    """
    assert temperature > 0, "log-probabilities at temperature 0 are not defined"
    implementation = dispatch.load("token_logprobs", hidden_ND.device, kernel)
    return implementation.token_logprobs(hidden_ND, head, bias, targets_N, temperature, chunk)


def token_choices(
    hidden_ND: Tensor,
    head: Head,
    targets_N: Tensor,
    uniform_N: Tensor | None = None,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    chunk: int | None = None,
    kernel: str = "auto",
) -> TokenChoices:
    """`token_logprobs`, and in the same pass over the vocabulary the arg-max and a draw of each position.

    The draw is that of the sampler at the same number (`qerl.kernels.sampling.draw_token` without truncations): the cumulative
    distribution of softmax(logits / T) inverted in vocabulary order. With the numbers of the engine's answers
    (`qerl.rollout.sampler.answer_uniforms`) it tells which tokens these logits would have drawn. Implementations agree except where
    the number falls within rounding of the edge of a token.

    Args:
        uniform_N: float32 in (0, 1), one a position; None draws nothing.
        hidden_ND, head, targets_N, temperature, bias, chunk, kernel: as of `token_logprobs`.

    Returns:
        TokenChoices. Log-probs of the targets and the entropy are those of `token_logprobs` to the bit and carry gradients; the
        rest has none. A row that holds a NaN gives valid tokens and log-probs that are NaN.

    Raises:
        KernelUnavailableError: `kernel` cannot run here.
    """
    assert temperature > 0, "log-probabilities at temperature 0 are not defined"
    wide = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
    wanted = Wanted.of(len(hidden_ND), uniform_N, wide, hidden_ND.device)
    implementation = dispatch.load("token_logprobs", hidden_ND.device, kernel)
    logprobs_N, entropy_N = implementation.token_logprobs(hidden_ND, head, bias, targets_N, temperature, chunk, wanted)
    return TokenChoices(
        logprobs_N, entropy_N, wanted.top_N, wanted.top_logprobs_N, wanted.drawn_N, wanted.drawn_logprobs_N
    )
