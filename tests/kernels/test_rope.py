"""Rotation of q and k against complex multiplication in float64; the norms over heads."""

import pytest
import torch

from qerl.kernels import philox
from qerl.kernels.attention import packed_attention
from qerl.kernels.rms_norm import KeyedNoise, rms_norm
from qerl.kernels.rope import HeadBias, HeadNorms, rope

TOKENS, HEADS, KV_HEADS, SIZE, POSITIONS = 5, 4, 2, 8, 16
WIDTH = (HEADS + 2 * KV_HEADS) * SIZE


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def angles() -> torch.Tensor:
    frequency_h = 100.0 ** -(torch.arange(SIZE // 2, dtype=torch.float64) / (SIZE // 2))
    return torch.arange(POSITIONS, dtype=torch.float64)[:, None] * frequency_h


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = angles().cos().float(), angles().sin().float()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def turned(x_TNd: torch.Tensor, positions_T: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """The rotation as a product of complex numbers, float64."""
    real, imaginary = x_TNd.double().chunk(2, -1)
    turns = torch.polar(torch.ones(()).double(), (-1 if back else 1) * angles()[positions_T])
    result = torch.complex(real, imaginary) * turns[:, None]
    return torch.cat((result.real, result.imag), -1)


def norms(noise: bool) -> HeadNorms:
    drawn = {
        name: KeyedNoise(
            key_2=torch.tensor(philox.stream_key(0, "noise")),
            width=SIZE,
            c1=site,
            c2_R=torch.arange(TOKENS),
            c3_1=torch.tensor([1]),
            spread=torch.tensor([0.1]),
        )
        for name, site in (("q_noise", 3), ("k_noise", 4))
    }
    weights = {"q_weight_d": 1 + 0.1 * random(SIZE, seed=7), "k_weight_d": 1 + 0.1 * random(SIZE, seed=8)}
    return HeadNorms(**weights, eps=1e-6, **(drawn if noise else {}))


@pytest.mark.parametrize("positions", [[0, 3, 3, 15, 1], None])
def test_q_and_k_turn_by_their_position_and_v_does_not(positions):
    qkv, (cos, sin) = random(TOKENS, WIDTH), tables()
    where = torch.arange(TOKENS) if positions is None else torch.tensor(positions)
    given = None if positions is None else where
    q, k, v = rope(
        qkv, given, cos[:TOKENS] if given is None else cos, sin[:TOKENS] if given is None else sin, HEADS, KV_HEADS
    )
    parts = [part.unflatten(1, (-1, SIZE)) for part in qkv.split((HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE), 1)]
    torch.testing.assert_close(q.double(), turned(parts[0], where), rtol=0, atol=1e-6)
    torch.testing.assert_close(k.double(), turned(parts[1], where), rtol=0, atol=1e-6)
    assert torch.equal(v, parts[2])


@pytest.mark.parametrize("noise", [False, True])
def test_heads_are_normalized_before_they_turn(noise):
    qkv, (cos, sin), where = random(TOKENS, WIDTH), tables(), torch.tensor([0, 3, 3, 15, 1])
    given = norms(noise)
    q, k, _ = rope(qkv, where, cos, sin, HEADS, KV_HEADS, norms=given)
    for found, start, weight, drawn in (
        (q, 0, given.q_weight_d, given.q_noise),
        (k, HEADS, given.k_weight_d, given.k_noise),
    ):
        x = qkv.unflatten(1, (-1, SIZE))[:, start : start + found.shape[1]]
        z = None if drawn is None else drawn.z()[:, None].expand_as(x)
        expected = turned(rms_norm(x.contiguous(), weight, 1e-6, z), where)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


def test_the_gradient_is_that_of_the_formula():
    cos, sin = tables()
    qkv = random(3, WIDTH, dtype=torch.float64)
    upstream = [random(3, n, SIZE, seed=n) for n in (HEADS, KV_HEADS, KV_HEADS)]
    x = qkv.float().requires_grad_()
    outputs = rope(x, None, cos[:3], sin[:3], HEADS, KV_HEADS)
    torch.autograd.backward(outputs, upstream)
    q_k = torch.cat(upstream[:2], 1)
    # The transpose of a rotation is the rotation back.
    back = turned(q_k, torch.arange(3), back=True)
    expected = torch.cat((back, upstream[2].double()), 1).flatten(1)
    torch.testing.assert_close(x.grad.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_is_added_before_the_turn_and_keys_lose_their_shift_after_it(dtype):
    qkv, bias, shift = (
        random(TOKENS, WIDTH).to(dtype),
        50 * random(WIDTH, seed=1).to(dtype),
        random(KV_HEADS, SIZE, seed=2),
    )
    cos, sin = tables()
    where = torch.tensor([0, 3, 3, 15, 1])
    found = rope(qkv, where, cos, sin, HEADS, KV_HEADS, bias=HeadBias(bias_X=bias, shift_Kd=shift))
    whole = (qkv.double() + bias.double()).split((HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE), 1)
    q, k, v = (part.unflatten(1, (-1, SIZE)) for part in whole)
    for one, exact in zip(found, (turned(q, where), turned(k, where) - shift, v), strict=True):
        assert one.dtype == dtype
        # A sum of 50 in float32, then one rounding.
        bound = 2e-5 if dtype == torch.float32 else 2**-8 * exact.abs() + 2e-5
        assert ((one.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("biased", [False, True])
def test_heads_in_float16_are_rounded_once_and_infinite_beyond_its_range(biased):
    qkv, where, (cos, sin) = random(TOKENS, WIDTH), torch.tensor([0, 3, 3, 15, 1]), tables()
    qkv[4, -1] = 7e4
    bias = (
        HeadBias(bias_X=random(WIDTH, seed=1).bfloat16(), shift_Kd=random(KV_HEADS, SIZE, seed=2)) if biased else None
    )
    leaf = qkv.clone().requires_grad_()
    found = rope(leaf, where, cos, sin, HEADS, KV_HEADS, bias=bias, dtype=torch.float16)
    whole = qkv.double() + (0 if bias is None else bias.bias_X.double())
    parts = whole.split((HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE), 1)
    q, k, v = (part.unflatten(1, (-1, SIZE)) for part in parts)
    k = turned(k, where) - (0 if bias is None else bias.shift_Kd.double())
    assert torch.isinf(found[2][4, -1, -1]) and torch.isinf(found[2]).sum() == 1
    v[4, -1, -1] = torch.inf
    for one, exact in zip(found, (turned(q, where), k, v), strict=True):
        assert one.dtype == torch.float16
        torch.testing.assert_close(one.double(), exact, rtol=2**-11, atol=1e-6)
    upstream = [random(*one.shape, seed=i).half() for i, one in enumerate(found)]
    gradient = torch.autograd.grad(found, leaf, upstream)[0]
    # The transpose of a rotation is the rotation back.
    back = turned(torch.cat(upstream[:2], 1), where, back=True)
    expected = torch.cat((back, upstream[2].double()), 1).flatten(1)
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient.double(), expected, rtol=0, atol=1e-6)


def test_attention_does_not_see_what_is_taken_from_every_key():
    qkv, bias, shift = random(TOKENS, WIDTH), random(WIDTH, seed=1), 30 * random(KV_HEADS, SIZE, seed=2)
    (cos, sin), where = tables(), torch.arange(TOKENS)
    outputs = []
    for given in (shift, torch.zeros_like(shift)):
        q, k, v = rope(qkv, where, cos, sin, HEADS, KV_HEADS, bias=HeadBias(bias_X=bias, shift_Kd=given))
        outputs.append(packed_attention(q, k, v, torch.tensor([0, TOKENS]), 0.3))
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-5)
