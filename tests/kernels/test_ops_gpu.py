"""The kernels on a real device: against float64, bit for bit where that is promised, outputs poisoned before they are written."""

import pytest
import torch
from hard_tensors import CASES
from op_cases import STREAM, head_bias, head_norms, keyed, noises, random, rotation

from qerl.kernels import philox
from qerl.kernels.activation import silu_mul
from qerl.kernels.attention import KeySpans, packed_attention
from qerl.kernels.cached_attention import CacheRows, cached_attention
from qerl.kernels.philox import triton as philox_triton
from qerl.kernels.quantize import mxfp4, quantize
from qerl.kernels.quantize import triton as quantize_triton
from qerl.kernels.rms_norm import TableNoise, add_rms_norm, noise_values, rms_norm
from qerl.kernels.rope import HeadNorms, rope
from qerl.kernels.token_logprobs import token_logprobs
from qerl.kernels.token_logprobs.tiles import TILE_ROWS, tile_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
DEVICE = "cuda"


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """|found - exact| / |exact|; NaN if anything is."""
    return float((found.detach().double() - exact.detach().double()).norm() / exact.detach().double().norm())


def ulps(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Most representable numbers between two bfloat16 tensors."""
    ordered = []
    for value in (found, expected):
        bits = value.detach().contiguous().view(torch.int16).int()
        ordered.append(torch.where(bits < 0, -(bits & 0x7FFF), bits))
    assert found.isfinite().all()
    return int((ordered[0] - ordered[1]).abs().max())


def test_words_are_bit_equal_and_normals_within_2e_6():
    c0 = torch.arange(1 << 16, device=DEVICE)
    c1 = torch.tensor([[1], [(1 << 32) - 1]], device=DEVICE)
    assert torch.equal(
        philox.uniform_at(*STREAM, c0, c1, 2, 3).cpu(), philox.uniform_at(*STREAM, c0.cpu(), c1.cpu(), 2, 3)
    )
    rows = torch.arange(4096, device=DEVICE)
    found = philox.normal_rows(*STREAM, 4099, c1=rows, c2=7, c3=1)
    exact = philox.normal_rows(*STREAM, 4099, c1=rows, c2=7, c3=1, kernel="reference")
    worst = float((found - exact).abs().max())
    print(f"normals: largest difference of {found.numel()} from float64: {worst:.2e}")
    assert worst < 2e-6
    assert torch.equal(found[7], philox.normal(*STREAM, 4099, c1=7, c2=7, c3=1, device=DEVICE))


def test_normals_of_a_row_are_as_many_as_the_layout_gate_asks_for():
    """8,193 rows of 4,864 inputs: more programs than a launch's second dimension has."""
    count = 8193 * 4864
    found = philox.normal(*STREAM, count, device=DEVICE)
    worst = max(
        float((mine - exact).abs().max())
        for mine, exact in zip(
            found.split(1 << 23),
            philox.normal(*STREAM, count, device=DEVICE, kernel="reference").split(1 << 23),
            strict=True,
        )
    )
    assert worst < 2e-6


@pytest.mark.parametrize(
    ("tokens", "width", "terms", "dtype"),
    [
        (1, 3584, torch.bfloat16, torch.bfloat16),
        (1000, 5120, torch.float32, torch.bfloat16),
        (63, 200, torch.float32, torch.bfloat16),
        (17, 896, torch.float32, torch.float32),
    ],
)
def test_the_norm_in_every_form_of_noise(tokens, width, terms, dtype):
    x, residual, grad_stream = (random(tokens, width, seed=s, device=DEVICE, dtype=terms) for s in (0, 1, 3))
    grad, grad_stream = random(tokens, width, seed=2, device=DEVICE, dtype=dtype), grad_stream
    limit = 1e-6 if dtype == torch.float32 else 4e-3
    for name, noise in noises(tokens, width, DEVICE):
        leaves = [
            x.clone().requires_grad_(),
            residual.clone().requires_grad_(),
            random(width, seed=4, device=DEVICE).requires_grad_(),
        ]
        h, stream = add_rms_norm(*leaves, 1e-6, noise, dtype=dtype)
        assert torch.equal(stream, residual + x), name
        found = torch.autograd.grad((h, stream), leaves, (grad, grad_stream))
        wide = [stream.detach().double().requires_grad_(), leaves[2].detach().double().requires_grad_()]
        z = noise_values(noise)
        exact = rms_norm(wide[0], wide[1], 1e-6, None if z is None else z.expand_as(x), kernel="reference")
        expected = torch.autograd.grad(exact, wide, grad.double())
        assert error(h, exact) < limit, name
        assert torch.equal(found[0], found[1])
        assert error(found[0], expected[0] + grad_stream.double()) < limit, name
        assert error(found[2], expected[1]) < 2e-6, name
        again = torch.autograd.grad(add_rms_norm(*leaves, 1e-6, noise, dtype=dtype), leaves, (grad, grad_stream))
        assert all(torch.equal(*pair) for pair in zip(found, again, strict=True)), "the same input, the same bits"
        assert torch.equal(rms_norm(stream.detach(), leaves[2], 1e-6, noise, dtype=dtype), h), name


def test_no_noise_has_the_bits_of_zero_noise_and_a_row_those_it_has_alone():
    x, weight = random(33, 3584, device=DEVICE, dtype=torch.bfloat16), random(3584, seed=1, device=DEVICE)
    plain = rms_norm(x, weight, 1e-6)
    for noise in (torch.zeros(3584, device=DEVICE), keyed(33, 3584, DEVICE, spread=torch.zeros(1, device=DEVICE))):
        assert torch.equal(rms_norm(x, weight, 1e-6, noise), plain)
    assert all(torch.equal(rms_norm(x[i : i + 1], weight, 1e-6), plain[i : i + 1]) for i in range(0, 33, 8))


@pytest.mark.parametrize("spread", [torch.tensor([0.05]), 0.05 * torch.rand(3584)])
def test_draws_in_registers_have_the_bits_of_draws_in_memory(spread):
    x, weight = random(9, 3584, device=DEVICE, dtype=torch.bfloat16), random(3584, seed=1, device=DEVICE)
    noise = keyed(9, 3584, DEVICE, spread=spread.to(DEVICE), c1_R=torch.arange(9, device=DEVICE) << 12)
    assert torch.equal(rms_norm(x, weight, 1e-6, noise), rms_norm(x, weight, 1e-6, noise.z()))


def test_a_captured_step_follows_new_keys_and_lengths():
    tokens, width = 6, 512
    x, residual = (random(tokens, width, seed=s, device=DEVICE, dtype=torch.bfloat16) for s in (0, 1))
    weight, noise = random(width, seed=2, device=DEVICE), keyed(tokens, width, DEVICE)
    qkv, tables = random(tokens, 6 * 64, seed=3, device=DEVICE, dtype=torch.bfloat16), rotation(32, 64, DEVICE)
    rows = CacheRows(torch.arange(tokens, device=DEVICE), 32)
    caches = [torch.zeros(tokens, 32, 1, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]

    def step(noise, caches):
        h, stream = add_rms_norm(x, residual, weight, 1e-6, noise)
        turns = tuple(table[rows.lengths_B] for table in tables)
        return h, stream, silu_mul(h), cached_attention(qkv, turns, 4, 1, *caches, rows, 0.1)

    with torch.no_grad():
        step(noise, caches)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(noise, caches)
        for tensor, change in ((noise.c2_R, 100), (noise.c3_1, 1), (rows.lengths_B, 9), (noise.key_2, 3)):
            tensor += change
        noise.spread.mul_(2)
        for cache in caches:
            cache.zero_()
        graph.replay()
        fresh = [torch.zeros_like(cache) for cache in caches]
        expected = step(
            keyed(tokens, width, DEVICE, key_2=noise.key_2, c2_R=noise.c2_R, c3_1=noise.c3_1, spread=noise.spread),
            fresh,
        )
    assert all(torch.equal(*pair) for pair in zip((*captured, *caches), (*expected, *fresh), strict=True))


@pytest.mark.parametrize("form", ["none", "one draw", "a row a token"])
def test_a_step_whose_norms_read_early_follows_its_tables(form):
    """Norms behind one another in a graph, each beginning before the one in front has ended; what they read early changes between replays."""
    tokens, width = 64, 3584
    x, residual = (random(tokens, width, seed=s, device=DEVICE, dtype=torch.bfloat16) for s in (0, 1))
    weight, z = random(width, seed=2, device=DEVICE), 0.1 * random(tokens, width, seed=3, device=DEVICE)
    noise = {"none": None, "one draw": z[0], "a row a token": TableNoise(z_RD=z)}[form]

    def step():
        h, stream = x, residual
        for _ in range(8):
            h, stream = add_rms_norm(h, stream, weight, 1e-6, noise)
        return h, stream

    with torch.no_grad():
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        for seed in range(3):
            z.copy_(0.1 * random(tokens, width, seed=10 + seed, device=DEVICE))
            weight.copy_(random(width, seed=20 + seed, device=DEVICE))
            graph.replay()
            assert all(torch.equal(*pair) for pair in zip(found, step(), strict=True))


@pytest.mark.parametrize("rows", [9000, 2])
def test_rows_of_a_program_change_no_bits(rows, monkeypatch):
    counters = {"c1": torch.arange(rows, device=DEVICE), "c2": 7, "c3": 1}
    alone = philox.normal_rows(*STREAM, 1030, **counters)
    monkeypatch.setattr(philox_triton, "_TOGETHER", 1)
    assert torch.equal(philox.normal_rows(*STREAM, 1030, **counters), alone)


@pytest.mark.parametrize(("tokens", "width"), [(1, 18944), (3, 129), (1000, 4864)])
def test_the_activation(tokens, width):
    gate_up, grad = (
        random(tokens, 2 * width, device=DEVICE, dtype=torch.bfloat16),
        random(tokens, width, seed=1, device=DEVICE),
    )
    results = []
    for kernel in ("auto", "reference"):
        leaf = (3 * gate_up).requires_grad_()
        output = silu_mul(leaf, kernel=kernel)
        results.append((output, *torch.autograd.grad(output, leaf, grad.bfloat16())))
    for found, expected in zip(*results, strict=True):
        # silu(gate) may be rounded to the neighbor, which the second rounding can double.
        assert ulps(found, expected) <= 2
        assert (found == expected).float().mean() > 0.99


@pytest.mark.parametrize("make", [*CASES.values(), lambda: 1e-38 * random(16, 40), lambda: random(1000, 3584)])
def test_mxfp4_in_one_pass_has_the_bytes_of_the_format(make):
    for weight in (make().to(DEVICE), make().to(DEVICE, torch.bfloat16)):
        expected = quantize(weight, "mxfp4", kernel="reference")
        found, bad = mxfp4.rounded(weight, expected.segments)
        assert not bad
        for name, tensor in expected.tensors.items():
            assert torch.equal(found.tensors[name], tensor), name


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(28, 4, 128), (14, 2, 64), (3, 1, 80)])
@pytest.mark.parametrize("form", ["plain", "norms", "bias"])
def test_the_rotation(heads, kv_heads, size, form):
    tokens = 61
    tables, positions = rotation(500, size, DEVICE), (torch.arange(tokens) * 8).to(DEVICE)
    norms = head_norms(tokens, size, DEVICE) if form == "norms" else None
    bias = head_bias(heads, kv_heads, size, DEVICE, torch.bfloat16) if form == "bias" else None
    results = []
    for kernel in ("auto", "reference"):
        qkv = random(tokens, (heads + 2 * kv_heads) * size, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        outputs = rope(qkv, positions, *tables, heads, kv_heads, norms=norms, bias=bias, kernel=kernel)
        grads = [random(*output.shape, seed=i, device=DEVICE, dtype=torch.bfloat16) for i, output in enumerate(outputs)]
        results.append((*outputs, torch.autograd.grad(outputs, qkv, grads)[0]))
    for found, expected in zip(*results, strict=True):
        assert error(found, expected) < (5e-3 if form == "norms" else 1e-9)
    assert torch.equal(results[0][2], results[1][2])


def test_trained_scales_of_head_norms_get_their_gradient():
    tokens, heads, kv_heads, size = 9, 4, 2, 64
    tables = rotation(tokens, size, DEVICE)
    results = []
    for kernel in ("auto", "reference"):
        qkv = random(tokens, (heads + 2 * kv_heads) * size, device=DEVICE).requires_grad_()
        scales = [random(size, seed=s, device=DEVICE).requires_grad_() for s in (1, 2)]
        norms = HeadNorms(
            q_weight_d=scales[0], k_weight_d=scales[1], eps=1e-6, q_noise=0.1 * random(size, device=DEVICE)
        )
        outputs = rope(qkv, None, *tables, heads, kv_heads, norms=norms, kernel=kernel)
        loss = sum((output * random(*output.shape, seed=3, device=DEVICE)).sum() for output in outputs)
        results.append((*outputs, *torch.autograd.grad(loss, [qkv, *scales])))
    assert all(error(*pair) < 1e-6 for pair in zip(*results, strict=True))


@pytest.mark.parametrize(("tokens", "vocabulary", "width"), [(1, 151936, 896), (2100, 4999, 896), (300, 32064, 3584)])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_log_probs_and_the_gradient_to_the_hidden_states(tokens, vocabulary, width, with_entropy):
    """Gradient against float64; half of the targets are the most likely token."""
    hidden = random(tokens, width, device=DEVICE, dtype=torch.bfloat16)
    head = random(vocabulary, width, seed=1, device=DEVICE, dtype=torch.bfloat16) * (6 / width**0.5)
    targets = torch.arange(tokens, device=DEVICE) * 7 % vocabulary
    targets[::2] = (hidden[::2].float() @ head.float().T).argmax(-1)
    grad_logp, grad_entropy = random(tokens, seed=3, device=DEVICE), 0.1 * random(tokens, seed=4, device=DEVICE)
    results = {}
    for kernel, dtype in (("auto", torch.bfloat16), ("reference", torch.bfloat16), ("exact", torch.float64)):
        leaf = hidden.to(dtype).requires_grad_()
        name = "reference" if kernel == "exact" else kernel
        logp, entropy = token_logprobs(leaf, head.to(dtype), targets, temperature=0.9, kernel=name)
        loss = (logp * grad_logp).sum() + ((entropy * grad_entropy).sum() if with_entropy else 0)
        results[kernel] = (logp, entropy, *torch.autograd.grad(loss, leaf))
    exact = results.pop("exact")
    for kernel, found in results.items():
        print(f"{kernel}: gradient error {error(found[2], exact[2]):.2e}", end="; ")
        # Tensor cores cut off instead of rounding when they add, so all logits shrink a little, the more the wider the model:
        # measured 3.3e-6 to 4.4e-6 at width 3584. A log-prob changes by its logit's distance from the mean logit (log p + H) times
        # that, an entropy by the variance of the logits times that.
        shrunk = 5e-6 * (exact[0] + exact[1]).abs()
        assert ((found[0] - exact[0]).abs() < 2e-5 + 1e-5 * exact[0].abs() + shrunk).all(), kernel
        assert ((found[1] - exact[1]).abs() < 1e-3).all(), kernel
        assert error(found[2], exact[2]) < 5e-3
    for found, expected in zip(results["auto"][:2], results["reference"][:2], strict=True):
        assert (found - expected).abs().max() < 1e-4


def test_the_gradients_to_a_dense_head_and_its_bias():
    hidden, head = random(130, 64, device=DEVICE), random(5000, 64, seed=1, device=DEVICE)
    bias, targets = random(5000, seed=2, device=DEVICE), torch.arange(130, device=DEVICE)
    results = []
    for kernel, dtype in (("auto", torch.float32), ("reference", torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (hidden, head, bias)]
        logp, entropy = token_logprobs(leaves[0], leaves[1], targets, bias=leaves[2], kernel=kernel)
        results.append((logp, entropy, *torch.autograd.grad(logp.sum() + 0.3 * entropy.sum(), leaves)))
    assert all(error(*pair) < 1e-5 for pair in zip(*results, strict=True))


def test_log_probs_hold_a_few_tiles_and_no_more():
    hidden = random(8192, 1024, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    head = random(65536, 1024, seed=1, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logp, _ = token_logprobs(hidden, head, torch.arange(8192, device=DEVICE))
    logp.sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    print(f"peak {peak / 2**20:.0f} MiB for {8192 * 65536 * 4 / 2**20:.0f} MiB of logits")
    # A tile in float32 and as probabilities, and what else there is for a token.
    assert peak < 6 * tile_tokens(8192, 1024) * TILE_ROWS + 72 * 2**20


@pytest.mark.parametrize("make", [*CASES.values(), lambda: 1e-38 * random(16, 40), lambda: random(1000, 3584)])
def test_quantized_weights_have_the_bytes_of_the_format(make):
    for weight in (make().to(DEVICE), make().to(DEVICE, torch.bfloat16)):
        found, expected = (quantize(weight, "nvfp4", kernel=kernel) for kernel in ("auto", "reference"))
        reach_1 = weight.float().abs().amax().reshape(1)
        known, _ = quantize_triton.rounded(weight, (len(weight),), reach_1=reach_1)
        for name, tensor in expected.tensors.items():
            for one in (found, known):
                assert torch.equal(one.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(28, 4, 128), (14, 2, 64), (8, 8, 96)])
@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ((1, 63, 136, 577, 223), None),
        ((30, 2070, 1, 59), None),
        ((100, 300, 512, 7), (100, 400, 612, 107)),
        ((128, 1, 2900, 40), (128, 129, 3028, 168)),
    ],
)
def test_packed_attention(heads, kv_heads, size, lengths, counts):
    """Of like sequences, of one that is given a call of its own, and of answers that go on from a prompt."""
    bounds, key_bounds = (torch.tensor([0, *sizes], device=DEVICE).cumsum(0) for sizes in (lengths, counts or lengths))
    keys = None if counts is None else KeySpans(cu_keys_S1=key_bounds, lengths=counts)
    inputs = [
        random(tokens, n, size, seed=i, device=DEVICE, dtype=torch.bfloat16)
        for i, (tokens, n) in enumerate(
            ((sum(lengths), heads), (int(key_bounds[-1]), kv_heads), (int(key_bounds[-1]), kv_heads))
        )
    ]
    grad = random(sum(lengths), heads, size, seed=5, device=DEVICE, dtype=torch.bfloat16)
    results = []
    for kernel, dtype in (("flash", torch.bfloat16), ("flash", torch.bfloat16), ("reference", torch.float32)):
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        output = packed_attention(*leaves, bounds, size**-0.5, keys=keys, kernel=kernel)
        results.append((output, *torch.autograd.grad(output, leaves, grad.to(dtype))))
    for found, again, exact in zip(*results, strict=True):
        assert torch.equal(found, again)
        assert error(found, exact) < 6e-3
