"""A packed LM head on a CUDA device: logits of few and of many tokens, log-probs and their gradient, against float64."""

import pytest
import torch

from qerl.formats import dequantize, get_format
from qerl.kernels.token_logprobs import head as head_module
from qerl.kernels.token_logprobs import head_gate, head_logits, token_logprobs

pytestmark = pytest.mark.gpu

# Tensor cores cut off when they add.
FLOAT32_SUMS = 6.0e-6


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, device="cuda")).bfloat16()


def packed_head(name: str, shape: tuple[int, int], segments: tuple[int, ...] | None = None):
    """`+natural` or `+tiles` behind the name: in this order, whichever the device has by default."""
    name, _, order = name.partition("+")
    fmt = get_format(name)
    packed = fmt.quantize(normal(*shape, seed=1, scale=0.05), segments=segments)
    if order == "natural":
        return packed
    return fmt.tiled(packed) if order else fmt.for_device(packed)


@pytest.mark.parametrize("name", ["fp8+natural", "fp8+tiles", "nvfp4", "mxfp4", "bf16"])
@pytest.mark.parametrize("shape", [(5003, 896), (1000, 100), (20000, 3584)])
def test_logits_of_any_number_of_tokens(name, shape):
    head = packed_head(name, shape)
    exact_VD = dequantize(head, torch.float64)
    bias = torch.randn(shape[0], device="cuda")
    for tokens in (1, 5, 16, 17, 64, 100, 257, 600):
        hidden = normal(tokens, shape[1], seed=tokens)
        logits = head_logits(hidden, head, bias)
        reference = hidden.double() @ exact_VD.T + bias.double()
        assert logits.dtype == torch.float32
        assert float((logits.double() - reference).norm() / reference.norm()) < FLOAT32_SUMS, tokens
        assert torch.equal(logits, head_logits(hidden, head, bias))


@pytest.mark.parametrize("name", ["fp8+natural", "fp8+tiles", "nvfp4"])
def test_a_captured_graph_makes_the_same_logits(name):
    head = packed_head(name, (5003, 896))
    for tokens in (3, 40, 200):
        hidden = normal(tokens, 896, seed=tokens)
        expected = head_logits(hidden, head)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = head_logits(hidden, head)
        logits.fill_(torch.nan)
        graph.replay()
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("name", ["fp8+natural", "fp8+tiles", "nvfp4"])
def test_log_probs_and_gradient_of_tiles_of_a_packed_head(name, monkeypatch):
    monkeypatch.setattr(head_module, "STRETCH_ELEMENTS", 2000 * 896)
    head = packed_head(name, (5003, 896))
    hidden = normal(300, 896).requires_grad_()
    targets = torch.arange(300, device="cuda") * 16
    logp, entropy = token_logprobs(hidden, head, targets)
    (gradient,) = torch.autograd.grad(logp.sum(), hidden)
    wide = hidden.detach().double().requires_grad_()
    exact_logp, exact_entropy = token_logprobs(wide, dequantize(head, torch.float64), targets)
    (exact_gradient,) = torch.autograd.grad(exact_logp.sum(), wide)
    torch.testing.assert_close(logp.double(), exact_logp, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(entropy.double(), exact_entropy, rtol=2e-5, atol=2e-5)
    assert float((gradient.double() - exact_gradient).norm() / exact_gradient.norm()) < 4e-3


def test_segments_of_a_tiled_head_have_their_own_global_scales():
    fmt = get_format("nvfp4")
    parts = [fmt.quantize(normal(rows, 256, seed=rows, scale=s)) for rows, s in ((400, 1.0), (24, 29.0), (700, 0.01))]
    head = fmt.for_device(fmt.join(parts))
    exact_VD = dequantize(head, torch.float64)
    for tokens in (4, 200):
        hidden = normal(tokens, 256)
        reference = hidden.double() @ exact_VD.T
        off = (head_logits(hidden, head).double() - reference).abs()
        assert (off <= 2e-6 * (hidden.double().abs() @ exact_VD.abs().T)).all()


@pytest.mark.parametrize("name", ["fp8+natural", "fp8+tiles", "nvfp4"])
def test_the_gate_passes_a_packed_head(name):
    head = packed_head(name, (3000, 896))
    for tokens in (8, 100, None):
        assert head_gate(head, dtype=torch.bfloat16, tokens=tokens) < 1e-4
