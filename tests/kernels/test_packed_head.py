"""A packed LM head: logits, log-probs and gradients against the dense product, unpacked a stretch of rows at a time."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from qerl.errors import LayoutGateError
from qerl.formats import dequantize, get_format
from qerl.kernels import dispatch
from qerl.kernels.fp4_linear import fp4_linear
from qerl.kernels.token_logprobs import gate, head_gate, head_logits, reference, token_logprobs
from qerl.kernels.token_logprobs import head as head_module

TOKENS, HIDDEN, VOCABULARY = 7, 40, 90
FORMATS = ("fp8", "nvfp4", "bf16", "mxfp4")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch):
    """Three stretches, the last one shorter."""
    monkeypatch.setattr(head_module, "STRETCH_ELEMENTS", 32 * HIDDEN)


def packed_head(name: str):
    return get_format(name).quantize(random(VOCABULARY, HIDDEN, seed=1, dtype=torch.float32))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_equal_the_dense_product(name, dtype):
    head, hidden, bias = packed_head(name), random(TOKENS, HIDDEN, dtype=dtype), random(VOCABULARY, seed=2, dtype=dtype)
    logits = head_logits(hidden, head, bias)
    assert logits.dtype == dtype
    exact = hidden.double() @ dequantize(head, torch.float64).T + bias.double()
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=2e-5 if dtype == torch.float32 else 1e-6)


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_bfloat16_activations_meet_weights_that_are_not_rounded_again(name):
    head, hidden = packed_head(name), random(TOKENS, HIDDEN, dtype=torch.bfloat16)
    exact = hidden.double() @ dequantize(head, torch.float64).T
    torch.testing.assert_close(head_logits(hidden, head).double(), exact, rtol=1e-5, atol=2e-5)


def test_an_fp8_head_in_tiles_is_the_same_head():
    fmt, head = get_format("fp8"), packed_head("fp8")
    tiled, hidden = fmt.tiled(head), random(TOKENS, HIDDEN, dtype=torch.bfloat16)
    assert tiled.order == "tiles"
    assert torch.equal(head_logits(hidden, tiled), head_logits(hidden, head))
    assert torch.equal(fp4_linear(hidden, tiled), fp4_linear(hidden, head))
    targets = torch.arange(TOKENS)
    assert torch.equal(token_logprobs(hidden, tiled, targets)[0], token_logprobs(hidden, head, targets)[0])


@pytest.mark.parametrize("name", FORMATS)
def test_log_probs_and_entropy_equal_those_of_the_dense_head(name):
    head, hidden = packed_head(name), random(TOKENS, HIDDEN)
    targets = torch.arange(TOKENS)
    ours = token_logprobs(hidden, head, targets, temperature=0.7, chunk=3)
    theirs = token_logprobs(hidden, dequantize(head, torch.float64), targets, temperature=0.7)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_gradients_match_finite_differences(name):
    head, targets = packed_head(name), torch.arange(TOKENS)
    hidden, bias = random(TOKENS, HIDDEN).requires_grad_(), random(VOCABULARY, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda h, b: token_logprobs(h, head, targets, temperature=1.3, bias=b, chunk=4), (hidden, bias)
    )


def test_bfloat16_gradients_stay_near_float64():
    head, targets = packed_head("nvfp4"), torch.arange(TOKENS)
    grads = []
    for dtype in (torch.bfloat16, torch.float64):
        hidden = random(TOKENS, HIDDEN, dtype=torch.bfloat16).to(dtype).requires_grad_()
        logprobs, entropy = token_logprobs(hidden, head, targets)
        grads.append(torch.autograd.grad(logprobs.sum() + entropy.sum(), hidden)[0])
    assert (grads[0].double() - grads[1]).norm() < 0.01 * grads[1].norm()


def test_no_more_than_a_stretch_is_ever_unpacked(monkeypatch):
    unpacked = []
    fmt = get_format("nvfp4")
    original = type(fmt).factored

    def spy(self, packed, dtype):
        unpacked.append(packed.shape[0])
        return original(self, packed, dtype)

    monkeypatch.setattr(type(fmt), "factored", spy)
    monkeypatch.setattr(type(fmt), "dequantize", None)
    hidden = random(TOKENS, HIDDEN).requires_grad_()
    token_logprobs(hidden, packed_head("nvfp4"), torch.arange(TOKENS))[0].sum().backward()
    assert unpacked == [32, 32, 26] * 3, "the logits, the logits again, and the gradient"


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_passes_what_is_sound_and_stops_a_misread_head(name, dtype):
    head = packed_head(name)
    head_gate(head, dtype=dtype)
    head_gate(head, dtype=dtype, dense_VD=dequantize(head, dtype))
    key = "codes" if name == "fp8" else "packed"
    misread = replace(
        head,
        tensors={**head.tensors, key: head.tensors[key].view(torch.uint8).roll(1, 0).view(head.tensors[key].dtype)},
    )
    with pytest.raises(LayoutGateError, match=f"'lm_head': the reference kernel disagrees.*{name}"):
        head_gate(head, dtype=dtype, dense_VD=dequantize(misread, dtype))


@pytest.mark.parametrize("fault", [None, "many tokens", "unpacked rows"])
def test_the_gate_looks_at_every_kernel_that_a_number_of_tokens_takes(monkeypatch, fault):
    """On a device few tokens, more of them, and training's passes are multiplied by different kernels."""
    head, sound = packed_head("fp8"), reference.head_logits

    def device_logits(hidden_ND, head, bias_V):
        logits_NV = sound(hidden_ND, head, bias_V)
        return logits_NV.roll(1, 1) if fault == "many tokens" and len(hidden_ND) > 16 else logits_NV

    def unpacked_logits(hidden_ND, head, bias_V):
        logits_NV = sound(hidden_ND, head, bias_V)
        return logits_NV.roll(1, 1) if fault == "unpacked rows" else logits_NV

    monkeypatch.setattr(gate, "_reading", lambda device: (8, 100))
    device, load = SimpleNamespace(head_logits=device_logits), dispatch.load
    monkeypatch.setattr(dispatch, "load", lambda op, *others: device if op == "token_logprobs" else load(op, *others))
    monkeypatch.setattr(reference, "head_logits", unpacked_logits)
    with nullcontext() if fault is None else pytest.raises(LayoutGateError, match="'lm_head'"):
        head_gate(head)
