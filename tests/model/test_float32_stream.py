"""A residual stream in float32 beside products in bfloat16: nearer to float32, the same gradients in every way of checkpointing."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import load_tiny, pack, random_tokens, randomize_adapters, write_tiny

from qerl.config.schema import LoraConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "qwen2-tied")
    tensors = {name: value.bfloat16() for name, value in load_file(path / "model.safetensors").items()}
    for name in tensors:
        if name.endswith("k_proj.bias"):
            # As in Qwen2.5; channels of the second half of each half turn slowly.
            tensors[name].view(-1, 2, 2, 4)[:, :, 1] *= 200
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def loaded(folder, dtype, float32_stream=False):
    model = load_tiny(folder, dtype=dtype, lora=LoraConfig(rank=4), float32_stream=float32_stream)
    randomize_adapters(model, size=0.02)
    return model


@torch.no_grad()
def hidden(model, sequences):
    tokens, context = pack(sequences)
    return model(tokens, context).float()


def distance(found, expected):
    return float((found - expected).norm() / expected.norm())


def test_it_is_nearer_to_float32(folder):
    sequences = random_tokens((40, 24))
    exact = hidden(loaded(folder, torch.float32), sequences)
    plain, wide = (distance(hidden(loaded(folder, torch.bfloat16, s), sequences), exact) for s in (False, True))
    assert wide < 0.8 * plain


def gradients(model, sequences, **call):
    tokens, context = pack(sequences)
    parameters = model.trainable_parameters()
    upstream = torch.randn(len(tokens), model.spec.hidden_size, generator=torch.Generator().manual_seed(3))
    loss = (model(tokens, context, **call).float() * upstream).sum()
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


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
