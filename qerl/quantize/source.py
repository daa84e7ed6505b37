"""A plain checkpoint as a quantizer reads it: one tensor at a time, leaving nothing mapped or open behind."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.errors import CheckpointError
from qerl.model.spec import GroupShape, ModelSpec, read_json_object
from qerl.model.tensor_folder import INDEX_FILE, SINGLE_FILE, TensorFile, TensorFolder
from qerl.quantize.tensor_bytes import StoredTensor, read_header

FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


class CheckpointSource:
    """Tensors of a plain checkpoint folder.

    A safetensors file that stays open keeps every page that was read resident; so a file is opened for each tensor and closed
    again, and a tensor is a copy. That is what keeps memory independent of the number of layers.

    Attributes:
        folder: where it is.
        spec: its shapes.
        stored: name -> where the bytes of each tensor lie.

    Raises:
        CheckpointError: the folder or model cannot be used; it is quantized already; a tensor that the architecture needs is
            missing or has another shape, or a linear weight is no floating point matrix.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.spec = ModelSpec.from_folder(folder)
        if self.spec.packed_layout is not None:
            raise CheckpointError(
                f"{folder} is quantized already",
                got=self.spec.packed_layout,
                expected="a checkpoint with plain weights",
                remedy="Quantize the plain checkpoint that it was made from.",
            )
        files = self._files()
        self.stored: dict[str, StoredTensor] = {}
        for file in files:
            self.stored |= read_header(file)
        self._check()

    def _files(self) -> list[Path]:
        """The weight files, after the checks that loading a model makes too."""
        TensorFolder(self.folder)
        if (self.folder / SINGLE_FILE).exists():
            return [self.folder / SINGLE_FILE]
        placed = read_json_object(self.folder, INDEX_FILE)["weight_map"]
        return [self.folder / shard for shard in dict.fromkeys(placed.values())]

    def _check(self) -> None:
        hidden, vocabulary = self.spec.hidden_size, self.spec.vocab_size
        expected: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (vocabulary, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.spec.tie_embeddings:
            expected["lm_head.weight"] = (vocabulary, hidden)
        for layer in range(self.spec.num_layers):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                expected[f"model.layers.{layer}.{norm}.weight"] = (hidden,)
        for name, shape in [*expected.items(), *self._linear_shapes()]:
            self._check_tensor(name, shape)

    def _linear_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for layer, shape in self.groups():
            for name, rows in zip(shape.part_names(layer), shape.sizes, strict=True):
                yield f"model.{name}.weight", (rows, shape.in_features)
                if shape.bias:
                    yield f"model.{name}.bias", (rows,)

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        tensor = self.stored.get(name)
        if tensor is None:
            raise CheckpointError(
                f"tensor {name} is missing from the weights in {self.folder}",
                expected=f"shape {list(shape)}",
                remedy="The files are incomplete, or config.json belongs to another model.",
            )
        if tensor.shape != shape or tensor.dtype not in FLOAT_TYPES:
            raise CheckpointError(
                f"{tensor.file}: tensor {name} does not fit config.json",
                got=f"{tensor.dtype} {list(tensor.shape)}",
                expected=f"{', '.join(FLOAT_TYPES[:-1])} or {FLOAT_TYPES[-1]}, shape {list(shape)}",
            )

    def groups(self) -> Iterator[tuple[int, GroupShape]]:
        """(layer, group) of all linear layers, in the order in which they run."""
        for layer in range(self.spec.num_layers):
            for shape in self.spec.groups():
                yield layer, shape

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """A copy of a tensor, dtype as stored.

        Raises:
            CheckpointError: it cannot be read.
            FormatError: it holds NaN or infinity.
        """
        return TensorFile(self.stored[name].file).read(name).to(device, copy=True)

    def layer_names(self, layer: int) -> list[str]:
        """All tensors of one layer, in the order of the files."""
        return [name for name in self.stored if name.startswith(f"model.layers.{layer}.")]

    def other_names(self) -> list[str]:
        """All tensors that are in no layer of the model."""
        layers = tuple(f"model.layers.{layer}." for layer in range(self.spec.num_layers))
        return [name for name in self.stored if not name.startswith(layers)]

    def fingerprint(self) -> str:
        """Hash of the configuration and of the names, types, shapes and places of all tensors: 16 hex digits of SHA-256.

        Contents of tensors are not read: this is for telling whether an interrupted run had the same source.
        """
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        for name, tensor in self.stored.items():
            status = tensor.file.stat()
            facts: list[Any] = [name, tensor.dtype, tensor.shape, tensor.start, tensor.file.name]
            digest.update(repr([*facts, status.st_size, status.st_mtime_ns]).encode())
        return digest.hexdigest()[:16]
