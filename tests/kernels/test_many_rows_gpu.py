"""65,536 rows at a 7B's widths, where elements are more than 32 bits count: rows at the ends, around every 2^30th element, and some between, against float64.

The tests take several GB each, so one process at a time runs them.
"""

import fcntl
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fp4_builders import adapters_of, cuda, exact_product
from op_cases import head_norms, keyed, random, rotation

from qerl.formats import dequantize, get_format
from qerl.kernels.activation import silu_mul
from qerl.kernels.fp4_linear import fp4_linear
from qerl.kernels.rms_norm import TableNoise, add_rms_norm, noise_values, rms_norm
from qerl.kernels.rope import rope
from qerl.kernels.token_logprobs import token_choices

pytestmark = pytest.mark.gpu

ROWS, HIDDEN, MLP, HEADS, KV_HEADS, SIZE = 65536, 3584, 18944, 28, 4, 128
GROUPS = {"q k v": (3584, 512, 512), "gate up": (MLP, MLP)}
DEVICE = "cuda"
FREE = 40e9


@pytest.fixture(autouse=True)
def alone():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with (Path(tempfile.gettempdir()) / "qerl_many_rows.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if torch.cuda.mem_get_info()[0] < FREE:
            pytest.skip(f"needs {FREE / 1e9:.0f} GB of free memory")
        yield
        torch.cuda.empty_cache()


def rows_of(width: int) -> torch.Tensor:
    """Rows on both sides of each 2^30th element of [ROWS, width], the ends, and some between."""
    edges = [place // width + side for place in range(1 << 30, ROWS * width, 1 << 30) for side in (0, 1)]
    between = torch.randint(0, ROWS, (8,), generator=torch.Generator().manual_seed(width)).tolist()
    return torch.tensor(sorted({0, 1, ROWS - 1, *between, *(edge for edge in edges if edge < ROWS)}), device=DEVICE)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Of the worst row: |found - exact| / |exact|; NaN if anything is."""
    found, exact = (t.double().flatten(1) for t in (found, exact))
    return float(((found - exact).norm(dim=1) / exact.norm(dim=1)).max())


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rank", [0, 32])
def test_a_layer_and_its_gradients(group, rank):
    segments, width = GROUPS[group], sum(GROUPS[group])
    weight = get_format("nvfp4").quantize(cuda(width, HIDDEN, scale=0.05), segments=segments)
    tiled, dense_OI = get_format("nvfp4").for_device(weight), dequantize(weight, torch.float64)
    parts = adapters_of(segments, HIDDEN, rank) if rank else []
    bias = cuda(width, seed=9)
    x, upstream = cuda(ROWS, HIDDEN, seed=5).requires_grad_(), cuda(ROWS, width, seed=6)
    leaves = [x, *([parts[0].a_RI, *(part.b_OR for part in parts)] if parts else [])]
    _, *adapters = [leaf.requires_grad_() for leaf in leaves]
    fresh = [replace(part, a_RI=adapters[0], b_OR=b) for part, b in zip(parts, adapters[1:], strict=True)]
    y = fp4_linear(x, tiled, bias, fresh)
    assert not y.isnan().any()
    rows = rows_of(width)
    with torch.no_grad():
        assert error(y[rows], exact_product(x[rows], dense_OI, bias, fresh)) < 3.5e-3
    grad_x, *grad_adapters = torch.autograd.grad(y, leaves, upstream)
    del y
    with torch.no_grad():
        exact = upstream[rows].double() @ dense_OI
        for part in fresh:
            a = part.a_RI[part.rank_start : part.rank_start + rank].double()
            exact += part.scale * (upstream[rows, part.start : part.stop].double() @ part.b_OR.double()) @ a
        assert error(grad_x[rows], exact) < 6e-3
        for part, grad in zip(fresh, grad_adapters[1:], strict=True):
            # The gradient of some rows of B, of which each is a sum over all tokens.
            some = torch.arange(0, part.stop - part.start, 501, device=DEVICE)
            h = (x.double() @ part.a_RI[part.rank_start : part.rank_start + rank].double().T).bfloat16().double()
            exact = part.scale * upstream[:, part.start + some].double().T @ h
            assert error(grad[some], exact) < 6e-3
        if parts:
            assert grad_adapters[0].isfinite().all() and grad_adapters[0].abs().amax(1).min() > 0


def test_the_norm_in_its_forms_of_noise():
    x, residual, grad = (cuda(ROWS, HIDDEN, seed=seed) for seed in range(3))
    weight, rows = random(HIDDEN, seed=4, device=DEVICE), rows_of(HIDDEN)
    samples = torch.arange(ROWS, device=DEVICE) // 256
    forms = {
        "none": None,
        "table": TableNoise(z_RD=0.1 * random(256, HIDDEN, seed=5, device=DEVICE), rows_T=samples),
        "keys of tokens": keyed(ROWS, HIDDEN, DEVICE, c1_R=torch.arange(ROWS, device=DEVICE) << 12),
        "keys of samples": keyed(256, HIDDEN, DEVICE, rows_T=samples),
    }
    for name, noise in forms.items():
        leaf = x.clone().requires_grad_()
        h, stream = add_rms_norm(leaf, residual, weight, 1e-6, noise)
        found = torch.autograd.grad(h, leaf, grad)[0]
        assert torch.equal(stream[rows], residual[rows] + x[rows]), name
        assert not h.isnan().any() and not found.isnan().any(), name
        z = noise_values(noise)
        wide = stream[rows].detach().double().requires_grad_()
        exact = rms_norm(wide, weight.double(), 1e-6, None if z is None else z[rows], kernel="reference")
        assert error(h[rows].detach(), exact.detach()) < 4e-3, name
        assert error(found[rows], torch.autograd.grad(exact, wide, grad[rows].double())[0]) < 4e-3, name


def test_the_activation():
    gate_up, grad = cuda(ROWS, 2 * MLP).requires_grad_(), cuda(ROWS, MLP, seed=1)
    rows = rows_of(2 * MLP)
    output = silu_mul(gate_up)
    found = torch.autograd.grad(output, gate_up, grad)[0]
    wide = gate_up[rows].detach().double().requires_grad_()
    exact = silu_mul(wide, kernel="reference")
    assert not output.isnan().any() and not found.isnan().any()
    assert error(output[rows].detach(), exact.detach()) < 6e-3
    assert error(found[rows], torch.autograd.grad(exact, wide, grad[rows].double())[0]) < 8e-3


@pytest.mark.parametrize("norms", [False, True])
def test_the_rotation(norms):
    """With heads of a model whose q k v has more than 2^31 elements."""
    heads, kv_heads = 240, 16
    width = (heads + 2 * kv_heads) * SIZE
    qkv, positions = cuda(ROWS, width).requires_grad_(), torch.arange(ROWS, device=DEVICE)
    tables, rows = rotation(ROWS, SIZE, DEVICE), rows_of(width)
    given = replace(head_norms(1, SIZE, DEVICE), k_noise=None) if norms else None
    outputs = rope(qkv, positions, *tables, heads, kv_heads, norms=given)
    grads = [torch.ones_like(output) * 0.5 for output in outputs]
    found = torch.autograd.grad(outputs, qkv, grads)[0]
    leaf = qkv[rows].detach().requires_grad_()
    expected = rope(leaf, positions[rows], *tables, heads, kv_heads, norms=given, kernel="reference")
    for output, one in zip(outputs, expected, strict=True):
        assert error(output[rows].detach(), one.detach()) < (5e-3 if norms else 1e-9)
    exact = torch.autograd.grad(expected, leaf, [grad[rows] for grad in grads])[0]
    assert error(found[rows], exact) < (5e-3 if norms else 1e-9)


def test_log_probs_and_choices():
    """Of 1e10 logits, tiles of which are held at a time."""
    vocabulary = 152064
    hidden, head = cuda(ROWS, HIDDEN).requires_grad_(), cuda(vocabulary, HIDDEN, seed=1, scale=3 / HIDDEN**0.5)
    targets = torch.arange(ROWS, device=DEVICE) * 7 % vocabulary
    u = torch.rand(ROWS, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)).clamp_(2.0**-24, 1 - 2.0**-24)
    found = token_choices(hidden, head, targets, u)
    gradient = torch.autograd.grad(found.logprobs_N.sum(), hidden)[0]
    rows = rows_of(vocabulary)
    leaf = hidden[rows].detach().double().requires_grad_()
    log_p = torch.log_softmax(leaf @ head.double().T, -1)
    at = torch.arange(len(rows), device=DEVICE)
    exact = log_p[at, targets[rows]]
    assert (found.logprobs_N[rows].detach() - exact.detach()).abs().max() < 4e-4
    assert error(gradient[rows], torch.autograd.grad(exact.sum(), leaf)[0]) < 8e-3
    log_p = log_p.detach()
    assert (log_p.amax(-1) - log_p[at, found.top_N[rows]]).max() < 2e-4
    end = log_p.exp().cumsum(-1)[at, found.drawn_N[rows]]
    share = log_p.exp()[at, found.drawn_N[rows]]
    assert ((end - share - 5e-5 <= u[rows]) & (u[rows] <= end + 5e-5)).all()
    assert ((found.drawn_N >= 0) & (found.drawn_N < vocabulary)).all()
