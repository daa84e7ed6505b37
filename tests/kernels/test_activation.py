"""silu(gate) * up: the bits of the plain formula, its gradient, and what it keeps."""

import pytest
import torch
from torch.nn import functional as F

from qerl.kernels.activation import silu_mul


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_and_gradients_have_the_bits_of_the_plain_formula(dtype):
    upstream = random(7, 24, seed=1).to(dtype)
    found = (4 * random(7, 48)).to(dtype).requires_grad_()
    plain = found.detach().clone().requires_grad_()
    gate, up = plain.split((24, 24), dim=-1)
    expected = F.silu(gate) * up
    expected.backward(upstream)
    ours = silu_mul(found)
    ours.backward(upstream)
    assert torch.equal(ours, expected)
    assert torch.equal(found.grad, plain.grad)


def test_gradients_match_finite_differences():
    assert torch.autograd.gradcheck(silu_mul, random(3, 10, dtype=torch.float64).requires_grad_())


def test_only_the_input_is_kept_for_backward():
    kept = []
    x = random(5, 16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        silu_mul(x)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]
