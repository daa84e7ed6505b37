"""Hashes that tell policies apart: of the frozen base, the adapters and the norms, as they are held."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from qerl.model.decoder import Decoder


def adapter_hash(model: Decoder) -> str:
    """Hash of the adapter matrices and their scale: 16 hex digits of SHA-256."""
    tensors = []
    for linear in model.grouped_linears():
        if linear.lora is not None:
            scale = torch.tensor(linear.lora.scale, dtype=torch.float64)
            for name, (a_RI, b_OR) in linear.lora.matrices().items():
                tensors += [(f"{name}.scale", scale), (f"{name}.a", a_RI), (f"{name}.b", b_OR)]
    return _hash(tensors)


def norm_hash(model: Decoder) -> str:
    """Hash of all clean norm scales: 16 hex digits of SHA-256."""
    return _hash((name, tensor) for name, tensor in model.named_parameters() if name.endswith("_norm"))


def base_hash(model: Decoder) -> str:
    """Hash of the frozen base as stored: packed weights, biases, embedding and head. 16 hex digits of SHA-256."""
    tensors: list[tuple[str, Tensor]] = [("embed_tokens", model.embed_tokens)]
    head = model.head_weight if model.packed_head is None else model.packed_head
    if isinstance(head, Tensor):
        tensors.append(("lm_head", head))
    else:
        tensors += [(f"lm_head.{key}", tensor) for key, tensor in sorted(head.tensors.items())]
    for linear in model.grouped_linears():
        tensors += [(f"{linear.name}.{key}", tensor) for key, tensor in sorted(linear.weight.tensors.items())]
        if linear.bias_O is not None:
            tensors.append((f"{linear.name}.bias", linear.bias_O))
    return _hash(tensors)


def _hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(data.numpy().data)
    return digest.hexdigest()[:16]
