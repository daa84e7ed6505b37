"""A residual stream in float32 beside products in bfloat16: nearer to float32, the same gradients in every way of checkpointing."""

import pytest
import torch
from nearness import distance, gradients, hidden, write_with_large_biases
from tiny_models import load_tiny, random_tokens, randomize_adapters

from qerl.config.schema import LoraConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_with_large_biases(tmp_path_factory.mktemp("tiny"), "qwen2-tied")


def loaded(folder, dtype, float32_stream=False):
    model = load_tiny(folder, dtype=dtype, lora=LoraConfig(rank=4), float32_stream=float32_stream)
    randomize_adapters(model, size=0.02)
    return model


def test_it_is_nearer_to_float32(folder):
    sequences = random_tokens((40, 24))
    exact = hidden(loaded(folder, torch.float32), sequences)
    plain, wide = (distance(hidden(loaded(folder, torch.bfloat16, s), sequences), exact) for s in (False, True))
    assert wide < 0.8 * plain


def test_gradients_are_nearer_too_and_do_not_depend_on_what_is_kept(folder):
    sequences = random_tokens((40, 24))
    exact = gradients(loaded(folder, torch.float32), sequences)
    plain = gradients(loaded(folder, torch.bfloat16), sequences)
    model = loaded(folder, torch.bfloat16, True)
    ways = [gradients(model, sequences, checkpointing=way) for way in ("none", "selective", "full")]
    far, near = (sum(distance(found[name], exact[name]) for name in exact) / len(exact) for found in (plain, ways[0]))
    assert near < 0.03
    assert near < 0.8 * far
    for name, gradient in ways[0].items():
        assert all(torch.equal(way[name], gradient) for way in ways[1:]), name
