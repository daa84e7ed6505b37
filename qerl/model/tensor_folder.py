"""Reading of safetensors checkpoints, whole or sharded, one tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qerl.errors import CheckpointError
from qerl.formats.base import check_finite
from qerl.model.spec import read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
"""Types, as safetensors names them, that an unpacked weight may have."""


class TensorFile:
    """One safetensors file; tensors are read when asked for.

    Raises:
        CheckpointError: the file is missing, truncated, or no safetensors file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file: Any = safe_open(path, framework="pt", device="cpu")
        except FileNotFoundError:
            # safetensors says so of a file that may not be read, too.
            what = "cannot be opened by this user" if os.path.lexists(path) else "does not exist"
            raise CheckpointError(f"{path} {what}") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is truncated or not a safetensors file",
                got=str(error),
                remedy="Copy or download the file again.",
            ) from None
        self.names = frozenset(self._file.keys())

    def dtype(self, name: str) -> str:
        """Type of a tensor by its safetensors name, from the header."""
        return str(self._file.get_slice(name).get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header alone."""
        return tuple(self._file.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """The tensor as stored, on the CPU.

        Raises:
            CheckpointError: it cannot be read.
            FormatError: it holds NaN or infinity.
        """
        try:
            tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path}: tensor {name} cannot be read", got=str(error)) from None
        if tensor.is_floating_point() and tensor.numel():
            low, high = torch.aminmax(tensor.float() if tensor.itemsize == 1 else tensor)
            check_finite(torch.maximum(high, -low), name)
        return tensor


class TensorFolder:
    """All tensors of a checkpoint folder by name, from ``model.safetensors`` or from an index and its shards.

    Raises:
        CheckpointError: no weights, an index that names a missing shard, or a shard that lacks what the index promises.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._home: dict[str, TensorFile] = {}
        if (folder / SINGLE_FILE).exists():
            file = TensorFile(folder / SINGLE_FILE)
            self._home = dict.fromkeys(file.names, file)
        elif (folder / INDEX_FILE).exists():
            self._open_shards(read_json_object(folder, INDEX_FILE))
        else:
            others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".gguf", ".pth"))
            raise CheckpointError(
                f"{folder} holds no safetensors weights",
                got=", ".join(others) or None,
                expected=f"{SINGLE_FILE} or {INDEX_FILE}",
                remedy="Save the model again with transformers' save_pretrained, which writes safetensors."
                if others
                else None,
            )

    def _open_shards(self, index: dict[str, Any]) -> None:
        placed = index.get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise CheckpointError(f"{self.folder / INDEX_FILE} is unusable", expected="a weight_map of tensor -> shard")
        files: dict[str, TensorFile] = {}
        for shard in sorted(set(placed.values())):
            if not (self.folder / shard).exists():
                raise CheckpointError(
                    f"{INDEX_FILE} names a shard that is missing from {self.folder}",
                    got=shard,
                    remedy="Copy all shards of the checkpoint.",
                )
            files[shard] = TensorFile(self.folder / shard)
        for name, shard in placed.items():
            if name not in files[shard].names:
                raise CheckpointError(f"{self.folder / shard} lacks tensor {name}, which {INDEX_FILE} places there")
            self._home[name] = files[shard]

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def check(self, expected: dict[str, tuple[int, ...]], ignored: frozenset[str]) -> None:
        """Compare the headers with what a model needs, before any data is read.

        Args:
            expected: tensor name -> shape.
            ignored: names that may be present and are not used.

        Raises:
            CheckpointError: a tensor is missing, has another shape, holds integers, or is not part of the model.
        """
        for name, shape in expected.items():
            packed = name.removesuffix(".weight") + ".weight_packed"
            if name not in self._home and packed in self._home:
                raise CheckpointError(
                    f"{self._home[packed].path}: {name} is stored quantized, which is read for projections of the layers alone",
                    got=packed,
                    expected=f"{name}, unquantized",
                    remedy="Quantize with lm_head and embeddings ignored; quant.lm_head packs the head at load.",
                )
            if name not in self._home:
                raise CheckpointError(
                    f"tensor {name} is missing from the weights in {self.folder}",
                    expected=f"shape {list(shape)}",
                    remedy="The files are incomplete, or config.json belongs to another model.",
                )
            found = self._home[name].shape(name)
            if found != shape:
                raise CheckpointError(
                    f"{self._home[name].path}: tensor {name} does not fit config.json",
                    got=f"shape {list(found)}",
                    expected=f"shape {list(shape)}",
                )
            dtype = self._home[name].dtype(name)
            if name.endswith((".weight", ".bias")) and dtype not in FLOAT_TYPES:
                raise CheckpointError(
                    f"{self._home[name].path}: tensor {name} is not of a floating-point type",
                    got=dtype,
                    expected=" or ".join(FLOAT_TYPES),
                    remedy="The folder may hold weights quantized in a layout that is not supported.",
                )
        extra = sorted(set(self._home) - set(expected) - ignored)
        if extra:
            raise CheckpointError(
                f"{self._home[extra[0]].path} holds tensors that this architecture does not have",
                got=", ".join(extra[:3]) + (f" and {len(extra) - 3} more" if len(extra) > 3 else ""),
                remedy="config.json may belong to another model, or the model has a part that is not supported.",
            )

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """A tensor as stored, on ``device``."""
        return self._home[name].read(name).to(device)
