"""The norm with the residual added in it, and noise as a record: the bits of the parts done one by one."""

import pytest
import torch

from qerl.kernels import philox
from qerl.kernels.rms_norm import KeyedNoise, TableNoise, add_rms_norm, rms_norm

TOKENS, WIDTH = 6, 24
KEY = philox.stream_key(5, "noise")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def keyed(draws: int = TOKENS, **changes) -> KeyedNoise:
    given = {
        "key_2": torch.tensor(KEY),
        "width": WIDTH,
        "c1": 33,
        "c2_R": torch.arange(draws) + 7,
        "c3_1": torch.tensor([2]),
        "spread": torch.tensor([0.05]),
    }
    return KeyedNoise(**given | changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("both_used", [True, False])
def test_the_sum_and_the_norm_equal_the_two_steps(dtype, both_used):
    w, upstream_h, upstream_s = random(WIDTH, seed=2), random(TOKENS, WIDTH, seed=3), random(TOKENS, WIDTH, seed=4)
    results = []
    for fused in (True, False):
        x, residual = (random(TOKENS, WIDTH, seed=seed).to(dtype).requires_grad_() for seed in (0, 1))
        weight = w.clone().requires_grad_()
        if fused:
            h, stream = add_rms_norm(x, residual, weight, 1e-6)
        else:
            stream = residual + x
            h = rms_norm(stream, weight, 1e-6)
        loss = (h * upstream_h).sum() + ((stream * upstream_s).sum() if both_used else 0)
        loss.backward()
        results.append((h, stream, x.grad, residual.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_float32_stream_is_not_rounded_and_each_term_gets_its_gradient_in_its_own_type():
    x, residual = random(TOKENS, WIDTH).requires_grad_(), random(TOKENS, WIDTH, seed=1).bfloat16().requires_grad_()
    h, stream = add_rms_norm(x, residual, random(WIDTH, seed=2), 1e-6, dtype=torch.bfloat16)
    assert torch.equal(stream, residual.float() + x)
    assert h.dtype == torch.bfloat16
    (h.float() * random(TOKENS, WIDTH, seed=3)).sum().backward()
    assert (x.grad.dtype, residual.grad.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(residual.grad, x.grad.bfloat16())


def test_without_a_residual_the_stream_is_the_input_itself():
    x = random(TOKENS, WIDTH)
    h, stream = add_rms_norm(x, None, random(WIDTH, seed=1), 1e-6)
    assert stream is x
    assert torch.equal(h, rms_norm(x, random(WIDTH, seed=1), 1e-6))


def test_the_gradient_of_the_stream_passes_where_the_norm_is_not_used():
    x, residual = random(2, 4).requires_grad_(), random(2, 4, seed=1).requires_grad_()
    add_rms_norm(x, residual, torch.ones(4), 1e-6)[1].sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 4))
    assert torch.equal(residual.grad, torch.ones(2, 4))


def test_gradients_match_finite_differences():
    x, residual = (random(3, 8, seed=seed, dtype=torch.float64).requires_grad_() for seed in (0, 1))
    w = random(8, seed=2, dtype=torch.float64).requires_grad_()
    z = random(8, seed=3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *inputs: add_rms_norm(*inputs, 1e-3, noise=z), (x, residual, w))


def test_keys_give_the_draws_of_philox_row_by_row():
    for row, z_D in enumerate(keyed().z()):
        expected = philox.normal(5, "noise", WIDTH, c1=33, c2=row + 7, c3=2) * 0.05
        assert torch.equal(z_D, expected)
    positions = torch.arange(TOKENS) * 3
    by_position = keyed(c1_R=positions << 12, c2_R=torch.tensor([9])).z()
    for row, z_D in enumerate(by_position):
        assert torch.equal(z_D, philox.normal(5, "noise", WIDTH, c1=33 + (3 * row << 12), c2=9, c3=2) * 0.05)


def test_a_spread_of_each_channel_scales_the_draw():
    spread = random(WIDTH, seed=8).abs()
    unit = keyed(spread=torch.ones(1)).z()
    assert torch.equal(keyed(spread=spread).z(), unit * spread)


def test_records_give_the_bits_of_their_values():
    x, residual, w = random(TOKENS, WIDTH), random(TOKENS, WIDTH, seed=1), random(WIDTH, seed=2)
    rows, noisy = torch.tensor([0, 0, 1, 2, 2, 2]), torch.tensor([True, False, True, False, True, True])
    z_3D = keyed(3).z()
    cases = {
        "keys": (keyed(), keyed().z()),
        "shared draws, some clean": (keyed(3, rows_T=rows, noisy_T=noisy), z_3D[rows] * noisy[:, None]),
        "table": (TableNoise(z_RD=z_3D, rows_T=rows), z_3D[rows]),
        "one draw, some clean": (TableNoise(z_RD=z_3D[:1], noisy_T=noisy), z_3D[:1] * noisy[:, None]),
    }
    for name, (record, values) in cases.items():
        assert torch.equal(record.z(), values), name
        found, expected = (add_rms_norm(x, residual, w, 1e-6, noise) for noise in (record, values.expand_as(x)))
        assert torch.equal(found[0], expected[0]), name
        assert torch.equal(rms_norm(x, w, 1e-6, record), rms_norm(x, w, 1e-6, values.expand_as(x))), name
