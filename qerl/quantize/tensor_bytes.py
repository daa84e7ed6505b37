"""Safetensors files as bytes: tensors are moved from file to file without being held in memory.

A file is: the length of the header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, data_offsets), the data.
Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from qerl.errors import CheckpointError

_CHUNK = 8 << 20
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where one tensor lies."""

    file: Path
    dtype: str
    """As the header spells it, e.g. `BF16`."""
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    nbytes: int

    @property
    def itemsize(self) -> int:
        """Bytes of one element; 1 for an empty tensor."""
        return max(1, self.nbytes // max(1, prod(self.shape)))


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Name -> place of every tensor in a file, in the order of their bytes.

    Raises:
        CheckpointError: the file is missing, cut short, or no safetensors file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            (length,) = _LENGTH.unpack(opened.read(_LENGTH.size))
            if length > min(size, _LARGEST_HEADER):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            entries: dict[str, Any] = json.loads(opened.read(length))
            entries.pop("__metadata__", None)
            data = _LENGTH.size + length
            tensors = {name: _stored(file, data, entry) for name, entry in entries.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be opened", got=error.strerror) from None
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise CheckpointError(f"{file} is not a safetensors file", got=str(error)) from None
    if any(tensor.start + tensor.nbytes > size for tensor in tensors.values()):
        raise CheckpointError(f"{file} is truncated", got=f"{size} bytes", remedy="Copy or download the file again.")
    return dict(sorted(tensors.items(), key=lambda item: item[1].start))


def _stored(file: Path, data: int, entry: Mapping[str, Any]) -> StoredTensor:
    begin, end = entry["data_offsets"]
    return StoredTensor(
        file=file, dtype=entry["dtype"], shape=tuple(entry["shape"]), start=data + begin, nbytes=end - begin
    )


def write_tensors(out: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write a safetensors file with copies of `tensors`. It appears whole or not at all.

    Wide elements come first, so that every tensor is aligned to its element.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in ordered:
        offsets = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        offset += tensor.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    part = out.with_name(out.name + ".part")
    with part.open("wb") as target:
        target.write(_LENGTH.pack(len(encoded)) + encoded)
        for _, tensor in ordered:
            with tensor.file.open("rb") as source:
                source.seek(tensor.start)
                _copy(source, target, tensor.nbytes)
    os.replace(part, out)


def _copy(source: BinaryIO, target: BinaryIO, nbytes: int) -> None:
    while nbytes:
        chunk = source.read(min(_CHUNK, nbytes))
        if not chunk:
            raise CheckpointError("a file was cut short while it was read", got=source.name)
        target.write(chunk)
        nbytes -= len(chunk)
