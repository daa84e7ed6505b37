"""Log-probs and entropy: known answers, float64 oracle, gradients, and what is kept in memory."""

import pytest
import torch

from qerl.kernels.token_logprobs import head_logits, token_logprobs
from qerl.kernels.token_logprobs.tiles import tile_tokens

N, D, V = 9, 6, 23


def inputs(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, head, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in [(N, D), (V, D), (V,)]
    )
    return hidden, head, bias, torch.randint(0, V, (N,), generator=generator)


def of_logits(logits: list[float], target: int = 0, temperature: float = 1.0):
    """Feed logits as they are: identity head, float64."""
    hidden = torch.tensor([logits], dtype=torch.float64)
    return token_logprobs(
        hidden, torch.eye(len(logits), dtype=torch.float64), torch.tensor([target]), temperature=temperature
    )


@pytest.mark.parametrize(("first", "entropy"), [(2.0, 0.524), (2.5, 0.386), (1.5, 0.680)])
def test_entropy_of_known_logits_in_nats(first, entropy):
    assert float(of_logits([first, 0.0, -1.0])[1]) == pytest.approx(entropy, abs=5e-4)


def test_entropy_of_uniform_and_of_certain_distributions():
    assert float(of_logits([3.0] * 8)[1]) == pytest.approx(2.0794415416798357, abs=1e-14)
    assert float(of_logits([0.0, 800.0])[1]) == 0.0


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_equal_a_float64_log_softmax(temperature, with_bias):
    hidden, head, bias, targets = inputs()
    bias = bias if with_bias else None
    logits = hidden @ head.T + (bias if with_bias else 0.0)
    expected = torch.log_softmax(logits / temperature, -1)
    logp, entropy = token_logprobs(hidden, head, targets, temperature=temperature, bias=bias)
    torch.testing.assert_close(logp, expected[torch.arange(N), targets], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-6)])
def test_low_precision_operands_give_float32_results(dtype, tolerance):
    """Products of bfloat16 numbers are exact in float32, so only the summation rounds."""
    hidden, head, bias, targets = inputs(dtype)
    logp, entropy = token_logprobs(hidden, head, targets, bias=bias.float())
    exact = token_logprobs(hidden.double(), head.double(), targets, bias=bias.double())
    assert logp.dtype == entropy.dtype == head_logits(hidden, head).dtype == torch.float32
    torch.testing.assert_close((logp.double(), entropy.double()), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk", [1, 2, 4, 100])
def test_the_chunk_changes_nothing_but_rounding(chunk):
    results = []
    for size in (chunk, None):
        hidden, head, _, targets = inputs()
        hidden.requires_grad_()
        head.requires_grad_()
        logp, entropy = token_logprobs(hidden, head, targets, chunk=size)
        (logp.sum() + 0.3 * entropy.square().sum()).backward()
        results.append((logp, entropy, hidden.grad, head.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


def test_gradients_through_both_outputs_match_finite_differences():
    hidden, head, bias, targets = inputs()
    tensors = [t.requires_grad_() for t in (hidden, head, bias)]
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_logprobs(h, w, targets, temperature=0.7, bias=b, chunk=4), tensors
    )


@pytest.mark.parametrize("output", [0, 1])
def test_gradients_through_one_output_match_finite_differences(output):
    hidden, head, _, targets = inputs()
    assert torch.autograd.gradcheck(
        lambda h: token_logprobs(h, head, targets, temperature=1.3, chunk=4)[output], hidden.requires_grad_()
    )


def test_the_entropy_gradient_is_minus_p_times_log_p_plus_h():
    logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    eye = torch.eye(3, dtype=torch.float64)
    entropy = token_logprobs(logits, eye, torch.tensor([0]))[1]
    (gradient,) = torch.autograd.grad(entropy, logits)
    p = torch.softmax(logits.detach(), -1)
    torch.testing.assert_close(gradient, -p * (p.log() + entropy.detach()))
    step = 1e-6
    for index in range(3):
        shift = step * eye[index]
        up, down = (float(token_logprobs(logits.detach() + s, eye, torch.tensor([0]))[1]) for s in (shift, -shift))
        assert float(gradient[0, index]) == pytest.approx((up - down) / (2 * step), abs=1e-9)


def test_gradients_equal_autograd_through_log_softmax():
    hidden, head, _, targets = inputs(torch.float32)
    hidden.requires_grad_()
    head.requires_grad_()
    weights = torch.linspace(-1, 2, N)
    logp, _ = token_logprobs(hidden, head, targets, temperature=0.9, chunk=4)
    ours = torch.autograd.grad(logp @ weights, (hidden, head))
    plain = torch.log_softmax(hidden @ head.T / 0.9, -1)[torch.arange(N), targets]
    torch.testing.assert_close(ours, torch.autograd.grad(plain @ weights, (hidden, head)))


def test_nothing_of_vocabulary_size_is_kept_for_the_backward_pass():
    kept = []
    hidden, head, _, targets = inputs(torch.float32)
    hidden.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        token_logprobs(hidden, head, targets, chunk=4)
    assert sorted(tuple(t.shape) for t in kept) == sorted([(N, D), (V, D), (N,), (N,), (N,)])


def test_no_more_than_a_chunk_of_logits_is_made_at_a_time():
    """Every tensor made on the way, forward and backward, is watched. [D, V] is the head, transposed."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (V,) and tensor.shape[0] != D:
                    largest = max(largest, tensor.shape[0])
            return out

    hidden, head, _, targets = inputs(torch.float32)
    hidden.requires_grad_()
    with Watch():
        logp, entropy = token_logprobs(hidden, head, targets, chunk=2)
        (logp + entropy).sum().backward()
    assert largest == 2


def test_a_frozen_head_gets_no_gradient_work():
    hidden, head, _, targets = inputs(torch.float32)
    token_logprobs(hidden.requires_grad_(), head, targets)[0].sum().backward()
    assert hidden.grad is not None
    assert head.grad is None


def test_no_tokens_give_no_values():
    _, head, _, _ = inputs(torch.float32)
    logp, entropy = token_logprobs(torch.zeros(0, D), head, torch.zeros(0, dtype=torch.int64))
    assert logp.shape == entropy.shape == (0,)


def test_temperature_zero_is_refused():
    hidden, head, _, targets = inputs()
    with pytest.raises(AssertionError, match="temperature 0"):
        token_logprobs(hidden, head, targets, temperature=0.0)


@pytest.mark.parametrize(
    ("tokens", "width", "expected"),
    [
        (8192, 3584, 1024),
        (300, 64, 1024),
        (4096, 896, 2048),
        (65536, 896, 4096),
        (65536, 1536, 2048),
        (10**6, 64, 4096),
    ],
)
def test_tiles_of_narrow_models_are_larger_in_large_passes(tokens, width, expected):
    assert tile_tokens(tokens, width) == expected
