"""RMSNorm with noise: the identity that makes it noise on weights, exact switching off, and gradients."""

import pytest
import torch

from qerl.kernels.rms_norm import rms_norm


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("seed", range(50))
def test_noise_equals_scaling_the_rows_of_every_projection_that_reads_it(seed):
    """h_z W = h diag(1 + z / w) W, for w != 0: noise on the scale is shared, multiplicative noise on W's rows."""
    tokens, channels, outputs = 1 + seed % 5, 3 + seed, 7
    x, w, z, projection = (
        random(*shape, seed=4 * seed + i, dtype=torch.float64)
        for i, shape in enumerate([(tokens, channels), (channels,), (channels,), (channels, outputs)])
    )
    w = torch.where(w.abs() < 0.1, w.sign() * 0.1 + w, w)
    noisy = rms_norm(x, w, 1e-6, noise=0.05 * z) @ projection
    clean = rms_norm(x, w, 1e-6) @ (torch.diag(1 + 0.05 * z / w) @ projection)
    torch.testing.assert_close(noisy, clean, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_zero_noise_has_the_bits_of_no_noise(dtype):
    x, w = random(6, 64, dtype=dtype), random(64, seed=1)
    plain = rms_norm(x, w, 1e-6)
    assert torch.equal(rms_norm(x, w, 1e-6, noise=torch.zeros(64)), plain)
    assert torch.equal(rms_norm(x, w, 1e-6, noise=torch.zeros(6, 64)), plain)


def test_zero_noise_has_the_gradient_bits_of_no_noise():
    grads = []
    for noise in (None, torch.zeros(16)):
        x, w = random(5, 16).requires_grad_(), random(16, seed=1).requires_grad_()
        rms_norm(x, w, 1e-6, noise=noise).square().sum().backward()
        grads.append((x.grad, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_one_draw_a_token_equals_the_draws_one_by_one():
    x, w, z = random(4, 32), random(32, seed=1), 0.1 * random(4, 32, seed=2)
    rows = [rms_norm(x[i : i + 1], w, 1e-6, noise=z[i]) for i in range(4)]
    assert torch.equal(rms_norm(x, w, 1e-6, noise=z), torch.cat(rows))


def test_arithmetic_is_float32_and_rounded_once():
    x, w, z = random(8, 96).bfloat16(), random(96, seed=1), 1e-3 * random(96, seed=2)
    exact = x.double() / torch.sqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * (w.double() + z.double())
    once = rms_norm(x, w, 1e-5, noise=z)
    assert once.dtype == torch.bfloat16
    # Half a unit in the eighth and last bit, and a little for float32.
    assert ((once.double() - exact).abs() <= exact.abs() * 2**-8 * (1 + 1e-4)).all()
    assert (once == exact.bfloat16()).double().mean() > 0.99


def test_noise_below_the_resolution_of_bfloat16_still_counts():
    x, w = random(4, 64).bfloat16(), torch.full((64,), 1.5)
    z = torch.full((64,), 1e-3)
    assert not torch.equal(rms_norm(x, w, 1e-6, noise=z), rms_norm(x, w, 1e-6))
    assert torch.equal((w + z).bfloat16(), w.bfloat16()), "which rounding w + z to bfloat16 would have lost"


@pytest.mark.parametrize("noise_shape", [None, (12,), (3, 4, 12)])
def test_gradients_match_finite_differences(noise_shape):
    x = random(3, 4, 12, dtype=torch.float64).requires_grad_()
    w = random(12, seed=1, dtype=torch.float64).requires_grad_()
    noise = None if noise_shape is None else random(*noise_shape, seed=2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3, noise=noise), (x, w))


def test_values_and_gradients_equal_torch_rms_norm():
    x, w = random(7, 48).requires_grad_(), random(48, seed=1).requires_grad_()
    upstream = random(7, 48, seed=2)
    ours = torch.autograd.grad(rms_norm(x, w, 1e-5), (x, w), upstream)
    theirs = torch.autograd.grad(torch.nn.functional.rms_norm(x, (48,), w, eps=1e-5), (x, w), upstream)
    torch.testing.assert_close(rms_norm(x, w, 1e-5), torch.nn.functional.rms_norm(x, (48,), w, eps=1e-5))
    torch.testing.assert_close(ours, theirs)


def test_backward_keeps_the_input_and_one_number_a_token():
    kept = []
    x, w = random(64, 256).bfloat16().requires_grad_(), random(256, seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rms_norm(x, w, 1e-6, noise=torch.zeros(256))
    assert sorted(t.numel() * t.element_size() for t in kept) == [64 * 4, 256 * 4, 256 * 4, 64 * 256 * 2]
