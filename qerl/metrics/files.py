"""Files and folders that appear whole or not at all, and values as JSON."""

from __future__ import annotations

import json
import math
import numbers
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_TEMPORARY = ".tmp-"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary name to write to; it becomes ``path`` when the block ends well and vanishes when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}{_TEMPORARY}{os.getpid()}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to fill; it becomes ``path``, in place of an older one, when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}{_TEMPORARY}{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON whole or not at all; numbers that are not finite become null."""
    with whole_file(path) as temporary:
        text = json.dumps(to_json(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        temporary.write_text(text, encoding="utf-8")


def to_json(value: Any) -> Any:
    """``value`` with tuples as lists, paths as text and numbers that are not finite as None.

    Raises:
        TypeError: something in it has no JSON form.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    raise TypeError(f"no JSON form for {type(value).__name__}: {value!r}")


def is_temporary(path: Path) -> bool:
    """Whether a path is what ``whole_file`` or ``whole_folder`` left behind when the process was killed."""
    return path.name.startswith(".") and _TEMPORARY in path.name
