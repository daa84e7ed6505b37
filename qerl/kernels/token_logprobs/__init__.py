"""Log-probabilities of given tokens and the entropy of the distribution, without ever storing [tokens, vocabulary].

Legend: N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from qerl.kernels import dispatch
from qerl.kernels.token_logprobs.gate import head_gate
from qerl.kernels.token_logprobs.head import Head

__all__ = ["Head", "head_gate", "head_logits", "token_logprobs"]


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
