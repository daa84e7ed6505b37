"""Attention in float16 beside products in bfloat16: nearer to float32, and the same gradients in every way of checkpointing."""

import math

import pytest
import torch
from nearness import distance, gradients, hidden, write_with_large_biases
from tiny_models import load_tiny, pack, random_tokens, randomize_adapters

from qerl.config.schema import LoraConfig
from qerl.model.attention import PackedSequences

LENGTHS = (60, 24, 1)


@pytest.fixture(scope="module", params=["qwen2-tied", "qwen3-wide-heads"])
def folder(request, tmp_path_factory):
    return write_with_large_biases(tmp_path_factory.mktemp("tiny"), request.param)


def loaded(folder, dtype=torch.bfloat16, half=False, **settings):
    model = load_tiny(
        folder, dtype=dtype, lora=LoraConfig(rank=4), float32_stream=True, float16_attention=half, **settings
    )
    randomize_adapters(model, size=0.02)
    return model


def test_it_is_nearer_to_float32(folder):
    sequences = random_tokens(LENGTHS)
    exact = hidden(loaded(folder, torch.float32), sequences)
    plain, half = (distance(hidden(loaded(folder, half=half), sequences), exact) for half in (False, True))
    assert half < 0.9 * plain


def test_gradients_are_nearer_too_and_depend_neither_on_what_is_kept_nor_on_their_size(folder):
    sequences = random_tokens(LENGTHS)
    exact = gradients(loaded(folder, torch.float32), sequences)
    plain, model = gradients(loaded(folder), sequences), loaded(folder, half=True)
    found = gradients(model, sequences)
    far, near = (sum(distance(one[name], exact[name]) for name in exact) / len(exact) for one in (plain, found))
    assert near < 0.9 * far
    for way in ("selective", "full"):
        again = gradients(model, sequences, checkpointing=way)
        assert all(torch.equal(again[name], found[name]) for name in found)
    # Of a mean over very many tokens: beyond what float16 could hold, and the same bits.
    small = gradients(model, sequences, 2.0**-40)
    assert all(torch.equal(small[name], 2.0**-40 * found[name]) for name in found)


def test_only_attention_is_in_float16(folder, monkeypatch):
    seen, attend = [], PackedSequences.attend_heads

    def recorded(self, *heads):
        seen.extend(part.dtype for part in heads)
        return attend(self, *heads)

    monkeypatch.setattr(PackedSequences, "attend_heads", recorded)
    model = loaded(folder, half=True)
    tokens, context = pack(random_tokens(LENGTHS))
    inputs = []
    for linear in model.grouped_linears():
        linear.stacked = lambda x, *given, own=linear.stacked, **options: (
            inputs.append(x.dtype) or own(x, *given, **options)
        )
    assert model(tokens, context).dtype == torch.bfloat16
    assert set(seen) == {torch.float16} and len(seen) == 3 * model.spec.num_layers
    assert set(inputs) == {torch.bfloat16} and len(inputs) == 4 * model.spec.num_layers


def test_weights_that_learn_get_gradients_through_it(folder):
    """Scales of head norms among them, which are inside of what is enlarged."""
    models = [load_tiny(folder, full=True)]
    models += [load_tiny(folder, full=True, dtype=torch.bfloat16, float16_attention=half) for half in (False, True)]
    exact, plain, half = (gradients(model, random_tokens(LENGTHS), 2.0**-30, some=True) for model in models)
    far, near = (sum(distance(one[name].float(), exact[name]) for name in exact) / len(exact) for one in (plain, half))
    assert near < far and all(math.isfinite(float(value.norm())) for value in half.values())
    for name in exact:
        if "norm" in name:
            assert distance(half[name], exact[name]) < 0.1, name
