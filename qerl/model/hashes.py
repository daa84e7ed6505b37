"""Hashes that tell policies apart: of the base, the adapters (or, in full mode, all weights) and the norms, as they are held."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from qerl.formats import PackedWeight, get_format
from qerl.model.decoder import Decoder
from qerl.model.model_files import model_tensors

CHUNK_WORDS = 1 << 24
"""Words of a fingerprint worked on at once: 128 MiB of them."""


def adapter_hash(model: Decoder) -> str:
    """Hash of what learns, by fingerprints: the adapter matrices and their scale, or in full mode every weight. 16 hex digits of
    SHA-256."""
    if model.full:
        return _hash((name, fingerprint(tensor)) for name, tensor in model_tensors(model).items())
    named = [
        (f"{name}.{part} {linear.lora.scale!r}", tensor)
        for linear in model.grouped_linears()
        if linear.lora is not None
        for name, matrices in linear.lora.matrices().items()
        for part, tensor in zip("ab", matrices, strict=True)
    ]
    digest = hashlib.sha256("".join(f"{name} {list(tensor.shape)}\n" for name, tensor in named).encode())
    # Many at once, end to end: they are hundreds, and small.
    for part in _stretches([tensor for _, tensor in named]):
        digest.update(_bytes(fingerprint(torch.cat([tensor.detach().reshape(-1) for tensor in part]))))
    return digest.hexdigest()[:16]


def _stretches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbors of together at most ``CHUNK_WORDS`` elements, or one that has more."""
    part: list[Tensor] = []
    for tensor in tensors:
        if part and sum(other.numel() for other in part) + tensor.numel() > CHUNK_WORDS:
            yield part
            part = []
        part.append(tensor)
    if part:
        yield part


def norm_hash(model: Decoder) -> str:
    """Hash of all clean norm scales: 16 hex digits of SHA-256."""
    named = [(name, tensor.detach()) for name, tensor in model.named_parameters() if name.endswith("_norm")]
    # One copy to the host: it is taken three times a step.
    together = torch.cat([tensor.reshape(-1) for _, tensor in named]).cpu()
    parts = together.split([tensor.numel() for _, tensor in named])
    return _hash((name, part.view(tensor.shape)) for (name, tensor), part in zip(named, parts, strict=True))


def base_hash(model: Decoder) -> str:
    """Hash of the base as stored: packed weights, biases, embedding and head. 16 hex digits of SHA-256.

    In full mode, where the weights move, a run takes it before its first step: it then names the model that training began with.
    """
    tensors: list[tuple[str, Tensor]] = [("embed_tokens", model.embed_tokens)]
    head = model.head_weight if model.packed_head is None else model.packed_head
    if isinstance(head, Tensor):
        tensors.append(("lm_head", head))
    else:
        tensors += [(f"lm_head.{key}", tensor) for key, tensor in _stored(head)]
    for linear in model.grouped_linears():
        tensors += [(f"{linear.name}.{key}", tensor) for key, tensor in _stored(linear.weight)]
        if linear.bias_O is not None:
            tensors.append((f"{linear.name}.bias", linear.bias_O))
    return _hash(tensors)


def _stored(weight: PackedWeight) -> list[tuple[str, Tensor]]:
    """The tensors of a weight as a file has them, whatever order its device keeps."""
    return sorted(get_format(weight.format).natural(weight).tensors.items())


def fingerprint(tensor: Tensor) -> Tensor:
    """sum_i (2 i + 1) w_i modulo 2^64 over the bytes of a tensor as words w_i of 8 (the last one padded with zeros); int64 [1].

    Computed where the tensor is: a model of 15 GB takes milliseconds on a GPU, and half a minute through SHA-256. Any one word
    that changes, and any two unequal words that trade places, change it: it finds accidents, and no more than those.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    total = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    words = data[:whole].view(torch.int64)
    for start in range(0, words.numel(), CHUNK_WORDS):
        part = words[start : start + CHUNK_WORDS]
        total += (part * (2 * torch.arange(start, start + part.numel(), device=part.device) + 1)).sum()
    rest = torch.zeros(8, dtype=torch.uint8, device=tensor.device)
    rest[: data.numel() - whole] = data[whole:]
    return total + rest.view(torch.int64) * (whole // 4 + 1)


def _hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()[:16]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
