"""Arg-max and draws of the pass over the vocabulary on a real device: those of the logits in float64, and nothing of it in the pass without them."""

import pytest
import torch
from op_cases import random

from qerl.formats import dequantize, get_format
from qerl.kernels.token_logprobs import token_choices, token_logprobs
from qerl.records import SamplingSpec
from qerl.rollout.sampler import answer_uniforms

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
DEVICE = "cuda"


def exact_logits(hidden, dense):
    """(float64 logits, a bound on what a product with float32 sums makes of them, for each row).

    An addition rounds by at most 2^-24 of a partial sum, and that is at most the sum S of |x w|; D such errors, which do not know of one another,
    add up to sqrt(D) 2^-24 S. Matrix units cut off where additions round, once for 16 products: D / 16 errors of one sign, of 2^-23 of sums that are
    the logits' size and not S, 1 / sqrt(D) of it: the same order, and smaller.
    """
    x, w = hidden.double(), dense.double()
    return x @ w.T, w.shape[1] ** 0.5 * 2.0**-24 * (x.abs() @ w.abs().T).amax(-1)


@pytest.mark.parametrize("form", ["bf16", "nvfp4", "fp8"])
@pytest.mark.parametrize(
    ("tokens", "vocabulary", "width", "temperature"),
    [(1, 151936, 896, 1.0), (2100, 4999, 896, 0.7), (300, 32064, 3584, 1.0)],
)
def test_choices_are_those_of_the_logits(form, tokens, vocabulary, width, temperature):
    """Up to rounding: the edges of 32,064 tokens are 3e-5 apart on the average, so that no share of draws that are equal is promised."""
    hidden = random(tokens, width, device=DEVICE, dtype=torch.bfloat16)
    dense = random(vocabulary, width, seed=1, device=DEVICE, dtype=torch.bfloat16) * (4 / width**0.5)
    head = dense
    if form != "bf16":
        packed = get_format(form).quantize(dense)
        head, dense = get_format(form).for_device(packed), dequantize(packed, torch.float64)
    targets, keys = torch.arange(tokens, device=DEVICE) % vocabulary, torch.arange(tokens, device=DEVICE)
    u = answer_uniforms(SamplingSpec(), keys, 0 * keys, 1)[:, 0]
    u[0] = 2.0**-24
    found = token_choices(hidden, head, targets, u, temperature=temperature)
    alone = token_logprobs(hidden, head, targets, temperature=temperature)
    assert torch.equal(found.logprobs_N, alone[0])
    assert torch.equal(found.entropy_N, alone[1])
    again = token_choices(hidden, head, targets, u, temperature=temperature)
    assert all(torch.equal(*pair) for pair in zip(found, again, strict=True)), "the same input, the same bits"

    logits, error_N = exact_logits(hidden, dense)
    rows = torch.arange(tokens, device=DEVICE)
    assert (logits.amax(-1) - logits[rows, found.top_N] <= 2 * error_N).all()
    # A weight exp(l / T - m) is off by a factor of at most e^eps: by its logit, by three roundings of numbers as large as logits, and by those of
    # exp and of the sum of 128 of them. The odds of "up to this token" are then off by e^(2 eps), its probability by tanh(eps / 2) < eps / 2.
    eps_N = error_N / temperature + 2.0**-24 * (3 * logits.abs().amax(-1) / temperature + 128 + 4)
    logp = torch.log_softmax(logits / temperature, -1)
    end_N, share_N = logp.exp().cumsum(-1)[rows, found.drawn_N], logp[rows, found.drawn_N].exp()
    assert ((end_N - share_N - eps_N / 2 <= u.double()) & (u.double() <= end_N + eps_N / 2)).all()
    for tokens_N, told_N in ((found.drawn_N, found.drawn_logprobs_N), (found.top_N, found.top_logprobs_N)):
        assert ((told_N.double() - logp[rows, tokens_N]).abs() <= 2 * eps_N).all()
    # The bound tells neighbours apart: most tokens that are drawn are wider.
    assert tokens == 1 or (share_N > 2 * eps_N).double().mean() > 0.5


def test_of_equal_logits_the_lowest_token_is_the_arg_max():
    head = torch.zeros(20000, 64, device=DEVICE, dtype=torch.bfloat16)
    head[[20, 40], 0] = 1.0
    head[[8191, 8192, 19999], 1] = 1.0
    hidden = torch.eye(64, device=DEVICE, dtype=torch.bfloat16)[:3]
    found = token_choices(hidden, head, torch.zeros(3, dtype=torch.int64, device=DEVICE))
    assert found.top_N.tolist() == [20, 8191, 0]
