"""How the packed attention for CUDA divides a pack into calls. The library's own kernel is left out: a stand-in runs on the CPU."""

import pytest
import torch

from qerl.kernels.attention import KeySpans, flash, reference


@pytest.mark.parametrize(
    ("lengths", "runs"),
    [
        ((1024,) * 8, [(0, 8)]),
        ((8192,), [(0, 1)]),
        ((512,) * 7 + (4608,), [(0, 7), (7, 8)]),
        ((512, 4608, 512, 300), [(0, 1), (1, 2), (2, 4)]),
        ((4000, 4000), [(0, 2)]),
        ((1,), [(0, 1)]),
    ],
)
def test_a_sequence_far_longer_than_the_others_goes_alone(lengths, runs):
    found = flash.balanced_runs(lengths, heads=28, processors=132)
    assert [(run.start, run.stop) for run in found] == runs


class StandIn:
    """The reference in place of FlashAttention; records the lengths of each call."""

    def __init__(self):
        self.calls = []

    def apply(self, q, k, v, bounds, key_bounds, scale, longest):
        assert bounds.dtype == key_bounds.dtype == torch.int32
        assert int(bounds[0]) == int(key_bounds[0]) == 0
        assert int(bounds[-1]) == len(q) and int(key_bounds[-1]) == len(k) == len(v)
        assert longest == (int(bounds.diff().max()), int(key_bounds.diff().max()))
        self.calls.append(bounds.diff().tolist())
        keys = KeySpans(cu_keys_S1=key_bounds.long(), lengths=tuple(key_bounds.diff().tolist()))
        return reference.packed_attention(q, k, v, bounds.long(), scale, keys=keys)


@pytest.mark.parametrize("given", [True, False])
def test_values_and_gradients_do_not_depend_on_the_division(monkeypatch, given):
    lengths, heads, kv_heads, size = (5, 90, 1, 7), 4, 2, 8
    stand_in = StandIn()
    monkeypatch.setattr(flash, "_PackedAttention", stand_in)
    monkeypatch.setattr(flash, "_processors", lambda device: 64)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(103, n, size, generator=generator).bfloat16() for n in (heads, kv_heads, kv_heads)]
    results = []
    for attend in (flash.packed_attention, reference.packed_attention):
        leaves = [t.clone().requires_grad_() for t in inputs]
        output = attend(*leaves, bounds, size**-0.5, lengths if given else None)
        results.append((output, *torch.autograd.grad(output.float().square().sum(), leaves)))
    assert stand_in.calls == [[5], [90], [1, 7]]
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


def test_keys_are_divided_with_their_tokens(monkeypatch):
    lengths, counts = (5, 60, 1, 7), (5, 90, 20, 9)
    stand_in = StandIn()
    monkeypatch.setattr(flash, "_PackedAttention", stand_in)
    monkeypatch.setattr(flash, "_processors", lambda device: 64)
    bounds, key_bounds = (torch.tensor([0, *sizes]).cumsum(0) for sizes in (lengths, counts))
    keys = KeySpans(cu_keys_S1=key_bounds, lengths=counts)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, 8, generator=generator).bfloat16() for n, h in ((73, 4), (124, 2), (124, 2)))
    found = flash.packed_attention(q, k, v, bounds, 0.3, lengths, keys)
    assert stand_in.calls == [[5], [60], [1, 7]]
    expected = reference.packed_attention(q, k, v, bounds, 0.3, lengths, keys)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_input_that_flash_attention_does_not_take_goes_to_the_reference(monkeypatch):
    monkeypatch.setattr(flash, "_PackedAttention", None)
    for dtype, size in ((torch.float32, 8), (torch.bfloat16, 4)):
        q = torch.randn(6, 2, size, generator=torch.Generator().manual_seed(1)).to(dtype)
        bounds = torch.tensor([0, 2, 6])
        assert torch.equal(
            flash.packed_attention(q, q, q, bounds, 1.0), reference.packed_attention(q, q, q, bounds, 1.0)
        )
