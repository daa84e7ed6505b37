"""Arg-max and draws of the pass over the vocabulary on a real device: the same tokens as the sampler, and nothing of it in the pass without them."""

import pytest
import torch
from op_cases import random

from qerl.formats import get_format
from qerl.kernels.sampling import draw_token
from qerl.kernels.token_logprobs import head_logits, token_choices, token_logprobs
from qerl.records import SamplingSpec
from qerl.rollout.sampler import answer_uniforms

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
DEVICE = "cuda"


@pytest.mark.parametrize("form", ["bf16", "nvfp4", "fp8"])
@pytest.mark.parametrize(
    ("tokens", "vocabulary", "width", "temperature"),
    [(1, 151936, 896, 1.0), (2100, 4999, 896, 0.7), (300, 32064, 3584, 1.0)],
)
def test_choices_are_those_of_the_logits(form, tokens, vocabulary, width, temperature):
    hidden = random(tokens, width, device=DEVICE, dtype=torch.bfloat16)
    head = random(vocabulary, width, seed=1, device=DEVICE, dtype=torch.bfloat16) * (4 / width**0.5)
    if form != "bf16":
        head = get_format(form).for_device(get_format(form).quantize(head))
    targets, keys = torch.arange(tokens, device=DEVICE) % vocabulary, torch.arange(tokens, device=DEVICE)
    u = answer_uniforms(SamplingSpec(), keys, 0 * keys, 1)[:, 0]
    u[0] = 2.0**-24
    found = token_choices(hidden, head, targets, u, temperature=temperature)
    alone = token_logprobs(hidden, head, targets, temperature=temperature)
    assert torch.equal(found.logprobs_N, alone[0])
    assert torch.equal(found.entropy_N, alone[1])
    again = token_choices(hidden, head, targets, u, temperature=temperature)
    assert all(torch.equal(*pair) for pair in zip(found, again, strict=True)), "the same input, the same bits"
    # Logits of another product may be rounded otherwise.
    logits = head_logits(hidden, head)
    tops, drawn = (draw_token(logits, numbers, temperature)[0] for numbers in (None, u))
    assert (found.top_N == tops).float().mean() > 0.995
    assert (found.drawn_N == drawn).float().mean() > 0.995
    p_NV = torch.softmax(logits.double() / temperature, -1)
    rows = torch.arange(tokens, device=DEVICE)
    end_N = p_NV.cumsum(-1)[rows, found.drawn_N]
    share_N = p_NV[rows, found.drawn_N]
    assert ((end_N - share_N - 2e-5 <= u.double()) & (u.double() <= end_N + 2e-5)).all()
    assert (found.drawn_logprobs_N.double() - share_N.log()).abs().max() < 2e-4
    assert (found.top_logprobs_N.double() - p_NV[rows, found.top_N].log()).abs().max() < 2e-4
    assert ((logits.max(-1).values - logits[rows, found.top_N]) < 1e-4).all()


def test_of_equal_logits_the_lowest_token_is_the_arg_max():
    head = torch.zeros(20000, 64, device=DEVICE, dtype=torch.bfloat16)
    head[[20, 40], 0] = 1.0
    head[[8191, 8192, 19999], 1] = 1.0
    hidden = torch.eye(64, device=DEVICE, dtype=torch.bfloat16)[:3]
    found = token_choices(hidden, head, torch.zeros(3, dtype=torch.int64, device=DEVICE))
    assert found.top_N.tolist() == [20, 8191, 0]
