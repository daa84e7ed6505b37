"""Log-probabilities and entropy of one block of tokens, from float32 logits.

Legend: N tokens, D hidden size, V vocabulary. With l = logits / T and p = softmax(l):

    logp = l[target] - lse(l)              d logp / dl = onehot(target) - p
    H    = lse(l) - sum p l                d H    / dl = -p (log p + H)
"""

from __future__ import annotations

import torch
from torch import Tensor

from qerl.formats import PackedWeight
from qerl.kernels.product import product
from qerl.kernels.sampling.reference import draw_token
from qerl.kernels.token_logprobs.autograd import Parts, TokenLogprobs
from qerl.kernels.token_logprobs.choices import Wanted
from qerl.kernels.token_logprobs.head import Head, factored_rows

# Most logits held at once when `chunk` is not given: 64 MiB of float32.
_CHUNK_ELEMENTS = 1 << 24


def head_logits(hidden_ND: Tensor, head: Head, bias_V: Tensor | None) -> Tensor:
    """See `qerl.kernels.token_logprobs.head_logits`."""
    if isinstance(head, Tensor):
        logits_NV = _product(hidden_ND, head.to(hidden_ND.dtype))
    else:
        wide = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        logits_NV = torch.empty(hidden_ND.shape[0], head.shape[0], dtype=wide, device=hidden_ND.device)
        for rows, values_VD, divisor_V in factored_rows(head, hidden_ND.dtype):
            part_NV = _product(hidden_ND, values_VD)
            logits_NV[:, rows] = part_NV if divisor_V is None else part_NV.div_(divisor_V)
    return logits_NV if bias_V is None else logits_NV.add_(bias_V)


def _product(hidden_ND: Tensor, values_VD: Tensor) -> Tensor:
    """hidden values^T, accumulated and returned in float32 (float64 for float64)."""
    if hidden_ND.dtype in (torch.float32, torch.float64):
        return product(hidden_ND, values_VD)
    if hidden_ND.device.type == "cuda":
        return torch.mm(hidden_ND, values_VD.T, out_dtype=torch.float32)
    return product(hidden_ND.float(), values_VD.float())


def hidden_gradient(grad_NV: Tensor, head: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Gradient to the hidden states [N, D] from that to the logits, in the logits' type; `dtype` is the hidden states'."""
    grad_ND = grad_NV.new_zeros(grad_NV.shape[0], head.shape[1])
    for rows, values_VD, divisor_V in factored_rows(head, dtype):
        part_NV = grad_NV[:, rows] if divisor_V is None else grad_NV[:, rows] / divisor_V
        grad_ND.addmm_(part_NV, values_VD.to(grad_NV.dtype))
    return grad_ND


def forward(
    hidden_ND: Tensor,
    head: Head,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperature: float,
    wanted: Wanted | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, entropy, lse), each [N]; fills `wanted`."""
    scaled_NV = head_logits(hidden_ND, head, bias_V)
    if wanted is not None:
        wanted.top_N.copy_(scaled_NV.argmax(-1))
        if wanted.uniform_N is not None and wanted.drawn_N is not None and scaled_NV.numel():
            wanted.drawn_N.copy_(draw_token(scaled_NV, wanted.uniform_N, temperature)[0])
    scaled_NV = scaled_NV.div_(temperature)
    lse_N = torch.logsumexp(scaled_NV, dim=-1)

    def logprobs(tokens_N: Tensor) -> Tensor:
        return scaled_NV.gather(1, tokens_N[:, None]).squeeze(1) - lse_N

    logp_N = logprobs(targets_N)
    if wanted is not None:
        wanted.top_logprobs_N.copy_(logprobs(wanted.top_N))
        if wanted.drawn_N is not None and wanted.drawn_logprobs_N is not None:
            wanted.drawn_logprobs_N.copy_(logprobs(wanted.drawn_N))
    mean_N = (torch.exp(scaled_NV - lse_N[:, None]) * scaled_NV).sum(-1)
    return logp_N, lse_N - mean_N, lse_N


def logits_gradient(
    hidden_ND: Tensor,
    head: Head,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperature: float,
    lse_N: Tensor,
    entropy_N: Tensor,
    grad_logp_N: Tensor | None,
    grad_entropy_N: Tensor | None,
) -> Tensor:
    """Gradient to the raw logits [N, V], from what `forward` returned; the logits are computed again."""
    logp_NV = head_logits(hidden_ND, head, bias_V).div_(temperature).sub_(lse_N[:, None])
    p_NV = torch.exp(logp_NV)
    if grad_entropy_N is None:
        grad_NV = torch.zeros_like(p_NV)
    else:
        grad_NV = logp_NV.add_(entropy_N[:, None]).mul_(p_NV).mul_(-grad_entropy_N[:, None])
    if grad_logp_N is not None:
        grad_NV -= p_NV.mul_(grad_logp_N[:, None])
        grad_NV.scatter_add_(1, targets_N[:, None], grad_logp_N[:, None])
    return grad_NV.div_(temperature)


def token_logprobs(
    hidden_ND: Tensor,
    head: Head,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperature: float,
    chunk: int | None,
    wanted: Wanted | None = None,
) -> tuple[Tensor, Tensor]:
    """See `qerl.kernels.token_logprobs.token_logprobs`."""
    if chunk is None:
        chunk = max(1, _CHUNK_ELEMENTS // head.shape[0])
    parts = Parts(forward, logits_gradient, hidden_gradient)
    return TokenLogprobs.apply(hidden_ND, head, bias_V, targets_N, temperature, chunk, parts, wanted)
