"""Arg-max and draw of the pass over the vocabulary: against float64, against the sampler, and the kernels against the reference."""

import numpy as np
import pytest
import torch
import triton_cpu  # noqa: F401 - prepares the interpreter, before any kernel module
from op_cases import random

from qerl.formats import get_format
from qerl.kernels.token_logprobs import draw, head_logits, token_choices, token_logprobs
from qerl.kernels.token_logprobs import reference as plain
from qerl.kernels.token_logprobs import triton as tiled
from qerl.kernels.token_logprobs.choices import Wanted
from qerl.records import SamplingSpec
from qerl.rollout.sampler import answer_uniforms, choose

N, D, V = 24, 16, 300


def inputs(dtype=torch.float64):
    hidden, head = random(N, D, dtype=dtype), random(V, D, seed=1, dtype=dtype)
    return hidden, head, torch.arange(N) * 7 % V


def uniforms(count: int) -> torch.Tensor:
    """Keyed ones, the smallest and the largest among them."""
    u = answer_uniforms(SamplingSpec(seed=3), torch.arange(count), torch.zeros(count, dtype=torch.int64), 1)[:, 0]
    u[0], u[1] = 2.0**-24, 1 - 2.0**-24
    return u


def oracle(logits_NV: torch.Tensor, uniform_N: torch.Tensor, temperature: float) -> list[int]:
    """First token whose cumulative share exceeds the number, in float64 and one token at a time."""
    found = []
    for row, u in zip(logits_NV.double().numpy(), uniform_N.double().tolist(), strict=True):
        weights = np.exp((row - row.max()) / temperature)
        found.append(int(np.searchsorted(np.cumsum(weights), u * weights.sum(), side="right")))
    return found


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("chunk", [None, 7])
def test_choices_equal_those_of_float64_logits(temperature, chunk):
    hidden, head, targets = inputs()
    logits, u = hidden @ head.T, uniforms(N)
    found = token_choices(hidden, head, targets, u, temperature=temperature, chunk=chunk)
    expected = torch.log_softmax(logits / temperature, -1)
    rows = torch.arange(N)
    assert found.top_N.tolist() == [int(np.argmax(row)) for row in logits.numpy()]
    assert found.drawn_N.tolist() == oracle(logits, u, temperature)
    for logprobs, tokens in (
        (found.logprobs_N, targets),
        (found.top_logprobs_N, found.top_N),
        (found.drawn_logprobs_N, found.drawn_N),
    ):
        torch.testing.assert_close(logprobs, expected[rows, tokens], rtol=1e-12, atol=1e-12)


def test_the_draw_is_the_samplers_at_its_own_numbers():
    hidden, head, targets = inputs(torch.float32)
    spec = SamplingSpec(temperature=0.8, seed=5)
    u = answer_uniforms(spec, torch.arange(N), torch.arange(N) * 3, 1)[:, 0]
    chosen = choose(head_logits(hidden, head), spec, u)
    found = token_choices(hidden, head, targets, u, temperature=spec.temperature)
    assert torch.equal(found.drawn_N, chosen.tokens_B)
    torch.testing.assert_close(found.drawn_logprobs_N, chosen.behavior_logprobs_B, rtol=1e-5, atol=1e-6)


def test_without_a_number_nothing_is_drawn_and_no_tokens_give_no_choices():
    hidden, head, targets = inputs(torch.float32)
    found = token_choices(hidden, head, targets)
    assert found.drawn_N is None
    assert found.drawn_logprobs_N is None
    none = token_choices(hidden[:0], head, targets[:0], torch.zeros(0))
    assert [value.shape for value in none] == [(0,)] * 6


def kernels(head, bias=None, count=N, width=D, temperature=1.0, **options):
    """(what the Triton kernels find, the float64 reference, logits float64) of the same inputs."""
    hidden, targets, u = random(count, width), torch.arange(count) * 7 % head.shape[0], uniforms(count)
    results = []
    for module, dtype in ((tiled, torch.float32), (plain, torch.float64)):
        wanted = Wanted.of(count, u, dtype, hidden.device)
        given = head.to(dtype) if isinstance(head, torch.Tensor) else head
        given_bias = None if bias is None else bias.to(dtype)
        both = module.token_logprobs(hidden.to(dtype), given, given_bias, targets, temperature, None, wanted)
        results.append((both, wanted))
    wide = head.double() if isinstance(head, torch.Tensor) else head
    return *results, plain.head_logits(hidden.double(), wide, None if bias is None else bias.double())


def assert_valid_draws(found: Wanted, logits_NV: torch.Tensor, temperature: float) -> None:
    """The number lies in the interval of the token, up to rounding."""
    p_NV = torch.softmax(logits_NV / temperature, -1)
    rows = torch.arange(len(p_NV))
    end_N = p_NV.cumsum(-1)[rows, found.drawn_N]
    start_N = end_N - p_NV[rows, found.drawn_N]
    u_N = found.uniform_N.double()
    assert (p_NV[rows, found.drawn_N] > 0).all()
    assert ((start_N - 1e-6 <= u_N) & (u_N <= end_N + 1e-6)).all()


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiled, "TILE_ROWS", 64)
    monkeypatch.setattr(tiled, "tile_tokens", lambda tokens, width: 8)
    monkeypatch.setattr(draw, "PART", 16)


@pytest.mark.interpret
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("form", "count", "vocabulary", "temperature"),
    [("dense", 3, 150, 1.0), ("bias", 9, 129, 0.7), ("nvfp4", 17, 70, 1.3)],
)
def test_kernels_choose_as_the_reference_does(form, count, vocabulary, temperature):
    dense = 2 * random(vocabulary, 32, seed=1) * torch.linspace(0.1, 3.0, vocabulary)[:, None]
    head = get_format("nvfp4").quantize(dense) if form == "nvfp4" else dense
    bias = random(vocabulary, seed=2) if form == "bias" else None
    (both, found), (expected_both, expected), logits = kernels(head, bias, count, 32, temperature)
    # A log-prob is the difference of two numbers as large as the logits.
    limit = 2e-7 * float(logits.abs().max()) / temperature + 1e-6
    assert (both[0] - expected_both[0]).abs().max() < limit
    assert torch.equal(found.top_N, expected.top_N)
    assert_valid_draws(found, logits, temperature)
    same = found.drawn_N == expected.drawn_N
    assert same.float().mean() > 0.95
    for ours, theirs in (
        (found.top_logprobs_N, expected.top_logprobs_N),
        (found.drawn_logprobs_N[same], expected.drawn_logprobs_N[same]),
    ):
        assert (ours - theirs).abs().max() < limit


@pytest.mark.interpret
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_of_equal_logits_the_lowest_token_is_the_arg_max(temperature):
    """Equals in one tile, in two, everywhere; and two logits that differ but are equal divided by the temperature."""
    head = torch.zeros(150, 4)
    head[[20, 40], 0] = 1.0
    head[[63, 64, 149], 1] = 1.0
    close = torch.tensor(1.0)
    head[3, 3], head[100, 3] = close, torch.nextafter(close, torch.tensor(2.0))
    hidden = torch.eye(4)
    wanted = Wanted.of(4, None, torch.float32, hidden.device)
    tiled.token_logprobs(hidden, head, None, torch.zeros(4, dtype=torch.int64), temperature, None, wanted)
    assert wanted.top_N.tolist() == [20, 63, 0, 100]


@pytest.mark.interpret
@pytest.mark.usefixtures("small_tiles")
def test_choices_leave_what_is_measured_and_its_gradients_as_they_are():
    head, targets, u = random(150, D, seed=1), torch.arange(3), uniforms(3)
    results = []
    for wanted in (None, Wanted.of(3, None, torch.float32, head.device), Wanted.of(3, u, torch.float32, head.device)):
        hidden = random(3, D).requires_grad_()
        logp, entropy = tiled.token_logprobs(hidden, head, None, targets, 0.9, None, wanted)
        results.append((logp, entropy, torch.autograd.grad(logp.sum(), hidden)[0]))
        if wanted is not None:
            here = wanted.top_N == targets
            assert torch.equal(wanted.top_logprobs_N[here], logp[here])
    assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))


@pytest.mark.interpret
@pytest.mark.usefixtures("small_tiles")
def test_a_nan_gives_valid_tokens_and_log_probs_that_are_nan():
    head, hidden = random(150, D, seed=1), random(3, D)
    hidden[1, 3] = float("nan")
    for module in (tiled, plain):
        wanted = Wanted.of(3, torch.full((3,), 0.5), torch.float32, head.device)
        logp, _ = module.token_logprobs(hidden, head, None, torch.arange(3), 1.0, None, wanted)
        for logprobs, tokens in ((wanted.top_logprobs_N, wanted.top_N), (wanted.drawn_logprobs_N, wanted.drawn_N)):
            assert logprobs.isnan().tolist() == [False, True, False]
            assert ((tokens >= 0) & (tokens < 150)).all()
        assert logp.isnan().tolist() == [False, True, False]


def test_no_more_than_a_chunk_of_logits_is_made_for_the_choices_too():
    hidden, head, targets = inputs(torch.float32)
    alone = token_logprobs(hidden, head, targets, chunk=4)
    found = token_choices(hidden, head, targets, uniforms(N), chunk=4)
    assert torch.equal(found.logprobs_N, alone[0])
    assert torch.equal(found.entropy_N, alone[1])
