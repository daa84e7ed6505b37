"""Tiny bfloat16 models with what makes rounding visible, and how far their outputs and gradients are from others."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import pack, write_tiny
from torch import Tensor

from qerl.model.decoder import Decoder


def write_with_large_biases(path: Path, name: str) -> Path:
    """A tiny model in bfloat16 whose keys have biases as large as Qwen2.5's, in channels that turn slowly."""
    write_tiny(path, name)
    tensors = {name: value.bfloat16() for name, value in load_file(path / "model.safetensors").items()}
    for name in tensors:
        if name.endswith("k_proj.bias"):
            # As in Qwen2.5; channels of the second half of each half turn slowly.
            tensors[name].view(-1, 2, 2, 4)[:, :, 1] *= 200
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@torch.no_grad()
def hidden(model: Decoder, sequences: list[list[int]]) -> Tensor:
    """Last hidden states of packed sequences, float32 [T, D]."""
    tokens, context = pack(sequences)
    return model(tokens, context).float()


def distance(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of what is expected."""
    return float((found - expected).norm() / expected.norm())


def gradients(
    model: Decoder, sequences: list[list[int]], factor: float = 1.0, *, some: bool = False, **call: Any
) -> dict[str, Tensor]:
    """Of every parameter, or with ``some`` of those that have one, for one random gradient of the hidden states times ``factor``."""
    tokens, context = pack(sequences)
    parameters = model.trainable_parameters()
    upstream = torch.randn(len(tokens), model.spec.hidden_size, generator=torch.Generator().manual_seed(3))
    loss = (model(tokens, context, **call).float() * (factor * upstream)).sum()
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=some)
    return {name: gradient for name, gradient in zip(parameters, found, strict=True) if gradient is not None}
