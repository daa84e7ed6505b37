"""The Triton kernels of norm, activation, rotation, draws and log-probs in the interpreter, against the references."""

from dataclasses import replace

import pytest
import torch
import triton_cpu  # noqa: F401 - prepares the interpreter, before any kernel module
from op_cases import STREAM, head_bias, head_norms, keyed, noises, random, rotation
from triton_cpu import triton

from qerl.formats import get_format
from qerl.kernels import philox
from qerl.kernels.activation import reference as activation_reference
from qerl.kernels.activation import triton as activation_triton
from qerl.kernels.philox import triton as philox_triton
from qerl.kernels.rms_norm import TableNoise, noise_values
from qerl.kernels.rms_norm import reference as norm_reference
from qerl.kernels.rms_norm import triton as norm_triton
from qerl.kernels.rope import CachePlaces
from qerl.kernels.rope import reference as rope_reference
from qerl.kernels.rope import triton as rope_triton
from qerl.kernels.token_logprobs import reference as logprobs_reference
from qerl.kernels.token_logprobs import triton as logprobs_triton

pytestmark = pytest.mark.interpret

KEY = philox.stream_key(*STREAM)


def test_words_are_bit_equal():
    c0, c1 = torch.tensor([0, 1, 7, (1 << 32) - 1]), torch.tensor([[10], [(1 << 32) - 1]])
    found = philox_triton.uniform_at(KEY, (c0, c1, torch.tensor(2), torch.tensor(1 << 31)))
    assert torch.equal(found, philox.uniform_at(*STREAM, c0, c1, 2, 1 << 31))


@pytest.mark.parametrize("n", [1, 3, 130])
def test_normals_agree_with_float64_within_2e_6(n):
    c1 = torch.tensor([0, 5, (1 << 32) - 1])
    found = philox_triton.normal_rows(KEY, n, c1, 9, 3)
    assert (found - philox.normal_rows(*STREAM, n, c1=c1, c2=9, c3=3)).abs().max() < 2e-6


def test_many_normals_agree_with_float64_within_2e_6(monkeypatch):
    n = 1 << 17
    monkeypatch.setattr(philox_triton, "_BLOCK", n)
    error = philox_triton.normal_rows(KEY, n, torch.tensor([4]), 9, 3)[0] - philox.normal(*STREAM, n, c1=4, c2=9, c3=3)
    assert error.abs().max() < 1e-6


def test_rows_of_a_program_change_no_bits(monkeypatch):
    monkeypatch.setattr(philox_triton, "_MANY", 0)
    c1, c2 = torch.tensor([0, 5, (1 << 32) - 1, 7, 8]), torch.arange(5)
    found = []
    for rows in (1, 4):
        monkeypatch.setattr(philox_triton, "_TOGETHER", rows)
        found += [
            philox_triton.normal_rows(KEY, 130, c1, c2, torch.tensor([3])),
            philox_triton.normal_rows(KEY, 6, 1, 2, c1),
        ]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert (found[2] - philox.normal_rows(*STREAM, 130, c1=c1, c2=c2, c3=3)).abs().max() < 2e-6


@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (5, 200), (3, 1030)])
def test_the_norm_in_every_form_of_noise(tokens, width):
    x, residual, grad, grad_stream = (random(tokens, width, seed=seed) for seed in range(4))
    weight = random(width, seed=4)
    for name, noise in noises(tokens, width):
        z = noise_values(noise)
        h, stream, inverse = norm_triton.add_forward(x, residual, weight, 1e-6, noise, x.dtype)
        assert torch.equal(stream, residual + x)
        expected = norm_reference.add_forward(x, residual, weight, 1e-6, z, x.dtype)
        found = (h, inverse, *norm_triton.backward(grad, stream, weight, inverse, noise, grad_stream))
        backward = norm_reference.backward(grad, stream, weight, expected[2], z, grad_stream)
        torch.testing.assert_close(found, (expected[0], expected[2], *backward), rtol=1e-5, atol=5e-6, msg=name)
        alone = norm_triton.forward(stream, weight, 1e-6, noise, x.dtype)
        assert torch.equal(alone[0], h), name
        without = norm_triton.backward(grad, stream, weight, inverse, noise, needs_weight=False)
        assert without[1] is None
        plain = norm_reference.backward(grad, stream, weight, expected[2], z)[0]
        torch.testing.assert_close(without[0], plain, rtol=1e-5, atol=5e-6, msg=name)


def test_the_stream_has_the_wider_type_of_its_terms():
    x, residual, weight = random(5, 200), random(5, 200, seed=1).bfloat16(), random(200, seed=2)
    for terms in ((x, residual), (residual, x), (x, x)):
        h, stream, inverse = norm_triton.add_forward(*terms, weight, 1e-6, None, torch.bfloat16)
        assert torch.equal(stream, terms[1].float() + terms[0].float())
        expected, r = norm_triton.forward(stream, weight, 1e-6, None, torch.float32)
        # The interpreter cuts float32 off to bfloat16, where a device rounds.
        assert h.dtype == torch.bfloat16
        torch.testing.assert_close(h.float(), expected, rtol=2**-7, atol=0)
        assert torch.equal(inverse, r)


def test_a_norm_that_reads_a_table_has_the_bits_of_one_that_draws_it():
    """Draws of many norms at once, as tables of decode steps are filled, and a row a token."""
    x, residual, weight, spread = random(5, 200), random(5, 200, seed=1), random(200, seed=2), 0.3 * random(200, seed=3)
    keys = torch.tensor([7, 1, 9, (1 << 32) - 1, 0])
    for noise in (keyed(5, 200, c2_R=keys), keyed(5, 200, c2_R=keys, spread=spread.abs())):
        names = torch.tensor([12, noise.c1, 3]).unsqueeze(1).expand(-1, 5).reshape(-1)
        unit = philox_triton.normal_rows(noise.key_2, 200, names, keys.repeat(3), noise.c3_1)
        table = TableNoise(z_RD=unit.view(3, 5, 200)[1] * noise.spread)
        drawn, read = (norm_triton.add_forward(x, residual, weight, 1e-6, given, x.dtype) for given in (noise, table))
        assert torch.equal(drawn[0], read[0])
        assert not torch.equal(read[0], norm_triton.add_forward(x, residual, weight, 1e-6, None, x.dtype)[0])


def test_no_noise_has_the_bits_of_zero_noise():
    x, weight = random(2, 70), random(70, seed=1)
    plain = norm_triton.forward(x, weight, 1e-6, None, x.dtype)[0]
    silent = (torch.zeros(70), torch.zeros(2, 70), keyed(2, 70, spread=torch.zeros(1)))
    assert all(torch.equal(norm_triton.forward(x, weight, 1e-6, noise, x.dtype)[0], plain) for noise in silent)


def test_a_norm_of_heads_has_three_dimensions():
    x, weight = random(2, 3, 24), random(24, seed=1)
    found, inverse = norm_triton.forward(x, weight, 1e-6, None, x.dtype)
    torch.testing.assert_close((found, inverse), norm_reference.forward(x, weight, 1e-6, None, x.dtype))
    gradients = (f.backward(x, x, weight, inverse, None) for f in (norm_triton, norm_reference))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (3, 1100)])
def test_the_activation(tokens, width):
    gate_up, grad = 3 * random(tokens, 2 * width), random(tokens, width, seed=1)
    torch.testing.assert_close(activation_triton.forward(gate_up), activation_reference.forward(gate_up))
    torch.testing.assert_close(activation_triton.backward(grad, gate_up), activation_reference.backward(grad, gate_up))


@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "size"), [(3, 4, 2, 8), (2, 7, 1, 12), (1, 14, 2, 64)])
@pytest.mark.parametrize("form", ["plain", "norms", "bias"])
def test_the_rotation(tokens, heads, kv_heads, size, form):
    shape, norms = (heads, kv_heads), head_norms(tokens, size) if form == "norms" else None
    bias = head_bias(heads, kv_heads, size) if form == "bias" else None
    tables, positions = rotation(20, size), torch.tensor([19, 0, 3])[:tokens]
    results = []
    for kernel in (rope_triton, rope_reference):
        qkv = random(tokens, (heads + 2 * kv_heads) * size).requires_grad_()
        outputs = kernel.rope(qkv, positions, *tables, *shape, norms, bias)
        torch.autograd.backward(outputs, [random(*output.shape, seed=i) for i, output in enumerate(outputs)])
        results.append((*outputs, qkv.grad))
    torch.testing.assert_close(*results, rtol=1e-5, atol=3e-6)
    if form == "plain":
        assert torch.equal(results[0][0], results[1][0]), "no fused multiply-add"


@pytest.mark.parametrize("form", ["plain", "norms", "bias"])
def test_the_rotation_of_float32_into_float16(form):
    tokens, heads, kv_heads, size = 3, 7, 1, 12
    norms = head_norms(tokens, size) if form == "norms" else None
    bias = head_bias(heads, kv_heads, size) if form == "bias" else None
    tables, results = rotation(tokens, size), []
    for kernel in (rope_triton, rope_reference):
        qkv = random(tokens, (heads + 2 * kv_heads) * size).requires_grad_()
        outputs = kernel.rope(qkv, None, *tables, heads, kv_heads, norms, bias, torch.float16)
        assert all(output.dtype == torch.float16 for output in outputs)
        grads = [random(*output.shape, seed=i).half() for i, output in enumerate(outputs)]
        results.append((*(output.float() for output in outputs), *torch.autograd.grad(outputs, qkv, grads)))
    assert results[0][3].dtype == torch.float32
    # Sums in another order may fall on the other side of the middle of two float16 numbers.
    torch.testing.assert_close(results[0][:3], results[1][:3], rtol=2**-10, atol=3e-6)
    assert all((one != other).float().mean() < 0.02 for one, other in zip(*(r[:3] for r in results), strict=True))
    torch.testing.assert_close(results[0][3], results[1][3], rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("form", ["plain", "bias"])
def test_rotated_keys_and_values_are_stored_in_a_cache_as_they_are_returned(form):
    """Tokens 1 and 2 go to a further place each; the rest of the cache stays what it was."""
    tokens, heads, kv_heads, size = 4, 7, 2, 12
    bias, tables = head_bias(heads, kv_heads, size) if form == "bias" else None, rotation(tokens, size)
    source_M, place_M = torch.tensor([0, 1, 2, 3, 2, 1]), torch.tensor([7, 0, 3, 14, 9, 6])
    qkv = random(tokens, (heads + 2 * kv_heads) * size)
    with torch.no_grad():
        for kernel in (rope_triton, rope_reference):
            slabs = [random(5, 3, kv_heads, size, seed=seed).half() for seed in (5, 6)]
            expected = [slab.clone() for slab in slabs]
            stored = CachePlaces(k_PLKd=slabs[0], v_PLKd=slabs[1], source_M=source_M, place_M=place_M)
            plain = kernel.rope(qkv, None, *tables, heads, kv_heads, None, bias, torch.float16)
            found = kernel.rope(qkv, None, *tables, heads, kv_heads, None, bias, torch.float16, stored)
            assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))
            for slab, values in zip(expected, plain[1:], strict=True):
                for source, place in zip(source_M.tolist(), place_M.tolist(), strict=True):
                    slab[place // 3, place % 3] = values[source]
            assert all(torch.equal(*pair) for pair in zip(slabs, expected, strict=True))


def test_trained_scales_of_head_norms_get_their_gradient(monkeypatch):
    """Their norm is then a step of its own (here the reference, since a CPU tensor cannot ask for the Triton kernel)."""
    monkeypatch.setattr(
        rope_triton, "head_norm", lambda *given, kernel: rope_reference.head_norm(*given, kernel="reference")
    )
    tables, given, results = rotation(3, 8), head_norms(3, 8), []
    for kernel in (rope_triton, rope_reference):
        scales = [given.q_weight_d.clone().requires_grad_(), given.k_weight_d.clone().requires_grad_()]
        norms = replace(given, q_weight_d=scales[0], k_weight_d=scales[1])
        qkv = random(3, 48).requires_grad_()
        outputs = kernel.rope(qkv, None, *tables, 4, 1, norms)
        results.append(torch.autograd.grad([output.square().sum() for output in outputs], [qkv, *scales]))
    torch.testing.assert_close(*results)


def test_a_table_with_a_row_a_token_needs_no_positions():
    tables, qkv, positions = rotation(9, 8), random(3, 32), torch.tensor([8, 1, 1])
    rows = [table[positions] for table in tables]
    by_position = rope_triton.rope(qkv, positions, *tables, 2, 1, None)
    by_token = rope_triton.rope(qkv, None, *rows, 2, 1, None)
    assert all(torch.equal(*pair) for pair in zip(by_position, by_token, strict=True))


WANTED = ("logprobs", "both", "head and bias", "packed")


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(logprobs_triton, "TILE_ROWS", 64)
    monkeypatch.setattr(logprobs_triton, "tile_tokens", lambda tokens, width: 64)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("tokens", "vocabulary", "temperature", "wanted"),
    [
        *((*shape, wanted) for shape in ((3, 150, 1.0), (70, 129, 0.7)) for wanted in WANTED),
        *(
            (130, 70, 1.3, wanted) for wanted in ("head and bias", "packed")
        ),  # what has every gradient, and of a packed head
    ],
)
def test_log_probs_and_gradients(wanted, tokens, vocabulary, temperature):
    """Against the reference in float64. The head is large, so that some tokens are almost certain and maxima rise late."""
    width = 32
    dense, targets = 2 * random(vocabulary, width, seed=1), torch.arange(tokens) * 7 % vocabulary
    dense *= torch.linspace(0.1, 3.0, vocabulary)[:, None]
    head = get_format("nvfp4").quantize(dense) if wanted == "packed" else dense
    bias = random(vocabulary, seed=2) if wanted == "head and bias" else None
    grad_logp, grad_entropy = random(tokens, seed=3), random(tokens, seed=4)
    results = []
    for kernel, dtype in ((logprobs_triton, torch.float32), (logprobs_reference, torch.float64)):
        hidden = random(tokens, width).to(dtype).requires_grad_()
        given = head if wanted == "packed" else head.to(dtype).requires_grad_(wanted == "head and bias")
        given_bias = None if bias is None else bias.to(dtype).requires_grad_()
        logp, entropy = kernel.token_logprobs(hidden, given, given_bias, targets, temperature, None)
        loss = (logp * grad_logp).sum() + (0 if wanted == "logprobs" else (entropy * grad_entropy).sum())
        leaves = [
            hidden,
            *(leaf for leaf in (given, given_bias) if isinstance(leaf, torch.Tensor) and leaf.requires_grad),
        ]
        results.append([t.detach().double() for t in (logp, entropy, *torch.autograd.grad(loss, leaves))])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.usefixtures("small_tiles")
def test_the_backward_of_log_probs_alone_forms_no_logits(monkeypatch):
    hidden, head = random(4, 16).requires_grad_(), random(100, 16, seed=1)
    logp, _ = logprobs_triton.token_logprobs(hidden, head, None, torch.arange(4), 1.0, None)

    def no_product(*_, **__):
        raise AssertionError("a product in the backward pass")

    monkeypatch.setattr(logprobs_triton, "_product", no_product)
    logp.sum().backward()
    assert hidden.grad.abs().max() > 0


def test_blocks_cover_everything_once():
    for tokens in (1, 63, 64, 2048, 2049, 5000):
        parts = list(logprobs_triton._blocks(tokens, 2048))
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(tokens))
        assert max(part.stop - part.start for part in parts) <= 2048


def test_the_interpreter_is_what_runs_here():
    assert triton.knobs.runtime.interpret
