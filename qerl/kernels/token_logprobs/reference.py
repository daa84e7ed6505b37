"""Log-probabilities and entropy of one block of tokens, from float32 logits.

Legend: N tokens, D hidden size, V vocabulary. With l = logits / T and p = softmax(l):

    logp = l[target] - lse(l)              d logp / dl = onehot(target) - p
    H    = lse(l) - sum p l                d H    / dl = -p (log p + H)
"""

from __future__ import annotations

import torch
from torch import Tensor


def head_logits(hidden_ND: Tensor, head_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """See `qerl.kernels.token_logprobs.head_logits`."""
    if hidden_ND.dtype in (torch.float32, torch.float64):
        logits_NV = hidden_ND @ head_VD.to(hidden_ND.dtype).T
    elif hidden_ND.device.type == "cuda":
        logits_NV = torch.mm(hidden_ND, head_VD.to(hidden_ND.dtype).T, out_dtype=torch.float32)
    else:
        logits_NV = hidden_ND.float() @ head_VD.to(hidden_ND.dtype).float().T
    return logits_NV if bias_V is None else logits_NV.add_(bias_V)


def forward(
    hidden_ND: Tensor, head_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, entropy, lse), each [N]."""
    scaled_NV = head_logits(hidden_ND, head_VD, bias_V).div_(temperature)
    lse_N = torch.logsumexp(scaled_NV, dim=-1)
    logp_N = scaled_NV.gather(1, targets_N[:, None]).squeeze(1) - lse_N
    mean_N = (torch.exp(scaled_NV - lse_N[:, None]) * scaled_NV).sum(-1)
    return logp_N, lse_N - mean_N, lse_N


def logits_gradient(
    hidden_ND: Tensor,
    head_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperature: float,
    lse_N: Tensor,
    entropy_N: Tensor,
    grad_logp_N: Tensor | None,
    grad_entropy_N: Tensor | None,
) -> Tensor:
    """Gradient to the raw logits [N, V], from what `forward` returned; the logits are computed again."""
    logp_NV = head_logits(hidden_ND, head_VD, bias_V).div_(temperature).sub_(lse_N[:, None])
    p_NV = torch.exp(logp_NV)
    if grad_entropy_N is None:
        grad_NV = torch.zeros_like(p_NV)
    else:
        grad_NV = logp_NV.add_(entropy_N[:, None]).mul_(p_NV).mul_(-grad_entropy_N[:, None])
    if grad_logp_N is not None:
        grad_NV -= p_NV.mul_(grad_logp_N[:, None])
        grad_NV.scatter_add_(1, targets_N[:, None], grad_logp_N[:, None])
    return grad_NV.div_(temperature)
