"""Data sets by name or path.

A name is tried, in this order, as

1. a path: a ``.jsonl``, ``.json`` (one object a line) or ``.parquet`` file, or a folder of ``SPLIT.jsonl`` files;
2. a built-in data set: ``arithmetic`` or ``calculations``;
3. a folder of that name under ``$QERL_DATA``;
4. a benchmark of ``data.suites`` that the hub has, with its fields renamed;
5. a data set of the Hugging Face hub (needs the ``datasets`` package): ``owner/name`` or ``owner/name/config``.

``NAME:SPLIT`` picks a split; without it the caller's default is taken.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.data.calculations import calculations
from qerl.data.suites import SUITES
from qerl.data.synthetic import arithmetic_problems
from qerl.errors import DataError, MissingDependencyError, nearest

FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
TRAIN_SPLIT = "train"
HELD_OUT_SPLITS = ("test", "validation", "valid", "dev", "eval")


class Row(dict[str, Any]):
    """A row that knows where it stands (``place``: file and line), for error messages and as an id of last resort."""

    def __init__(self, fields: Mapping[str, Any], place: str):
        super().__init__(fields)
        self.place = place


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """Rows and where they came from.

    Attributes:
        rows: at least one.
        source: what was asked for.
        location: what was read: a path, ``built-in NAME`` or ``hub NAME``.
        split: the split, or the stem of a file.
        warnings: in words; training on held-out data is the one there is.
    """

    rows: list[dict[str, Any]]
    source: str
    location: str
    split: str
    warnings: tuple[str, ...] = ()


def load_rows(name_or_path: str, *, default_split: str) -> DataSet:
    """All rows of a data set.

    Args:
        name_or_path: see the module's docstring.
        default_split: split where none is named; ``train`` also says that the rows are for training.

    Raises:
        DataError: nothing of that name or split exists, a line is not a JSON object, or there are no rows.
        MissingDependencyError: it can only be a hub data set and ``datasets`` is not installed.
    """
    name, split = _split_name(name_or_path)
    wanted = split or default_split
    path = Path(name).expanduser()
    if path.is_file():
        rows, location, wanted = read_file(path), str(path), split or path.stem
    elif path.is_dir():
        rows, location = _read_folder(path, wanted, name)
    elif name in BUILT_IN:
        rows, location = _read_built_in(name, wanted), f"built-in {name}"
    elif (folder := _data_folder(name)) is not None:
        rows, location = _read_folder(folder, wanted, name)
    elif name in SUITES:
        # The split of the hub's copy is the suite's own, but for training.
        wanted = split or (wanted if default_split == TRAIN_SPLIT else SUITES[name].split)
        rows, location = _read_suite(name, wanted), f"hub {SUITES[name].hub}"
    else:
        rows, location = _read_hub(name, wanted), f"hub {name}"
    if not rows:
        raise DataError("empty data set", got=f"{location} has no rows", expected="at least one row")
    warnings = []
    if default_split == TRAIN_SPLIT and wanted.lower() in HELD_OUT_SPLITS:
        warnings.append(
            f"training data {name_or_path} is a {wanted} split: results on it, or on data derived from it, mean nothing"
        )
    return DataSet(rows=rows, source=name_or_path, location=location, split=wanted, warnings=tuple(warnings))


def read_file(path: Path) -> list[dict[str, Any]]:
    """Rows of one ``.jsonl``, ``.json`` (one object a line) or ``.parquet`` file.

    Raises:
        DataError: another suffix, an unreadable file, or a line that is not a JSON object.
    """
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix not in FILE_SUFFIXES:
        raise DataError("unknown kind of data file", got=path, expected=f"one of {', '.join(FILE_SUFFIXES)}")
    rows: list[dict[str, Any]] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    rows.append(_read_line(line, f"{path}:{number}"))
    except OSError as error:
        raise DataError(f"data file {path} cannot be read", got=error.strerror) from error
    return rows


def _read_line(line: bytes, place: str) -> Row:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"{place}: the key {twice!r} is there twice", remedy="Leave one of them")
        return fields

    try:
        # Without the line's end, behind which the parser would count columns of another line.
        value = json.loads(line.decode("utf-8-sig").rstrip(" \t\r\n"), object_pairs_hook=once)
        if b"\\u" in line:
            json.dumps(value, ensure_ascii=False).encode()
    except DataError:
        raise
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: the line holds half a character",
            got=ascii(error.object[error.start]),
            expected="whole surrogate pairs",
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: the line is not UTF-8 text", got=str(error)) from error
    except json.JSONDecodeError as error:
        shown = line.decode("utf-8-sig").strip()
        raise DataError(
            f"{place}: the line is not JSON ({error.msg} at column {error.colno})",
            got=repr(shown[:80]),
            expected="one JSON object a line",
        ) from error
    except (ValueError, RecursionError) as error:
        # A whole number of thousands of digits, or lists in lists without end.
        raise DataError(
            f"{place}: the line cannot be read", got=str(error), expected="one JSON object a line"
        ) from error
    if not isinstance(value, dict):
        raise DataError(
            f"{place}: the line is not a JSON object", got=f"{value!r:.80}", expected="one JSON object a line"
        )
    return Row(value, place)


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        records = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"data file {path} cannot be read as parquet", got=str(error)) from error
    return [Row(record, f"{path}:{number}") for number, record in enumerate(records, start=1)]


def _arithmetic(count: int) -> Callable[[str], Iterable[Mapping[str, Any]]]:
    def rows(split: Any) -> Iterable[Mapping[str, Any]]:
        for problem in arithmetic_problems(split, count):
            yield {
                "id": problem.id,
                "question": problem.question,
                "answer": problem.answer,
                "solution": problem.solution,
            }

    return rows


BUILT_IN: dict[str, dict[str, Callable[[str], Iterable[Mapping[str, Any]]]]] = {
    "arithmetic": {"train": _arithmetic(20_000), "test": _arithmetic(1_000)},
    "calculations": {"train": calculations, "test": calculations},
}
"""Built-in data sets: name -> split -> rows of that split."""


def _read_built_in(name: str, split: str) -> list[dict[str, Any]]:
    splits = BUILT_IN[name]
    if split not in splits:
        raise _no_split(name, split, splits)
    return [Row(fields, f"{name}:{split}:{number}") for number, fields in enumerate(splits[split](split), start=1)]


def _read_folder(folder: Path, split: str, name: str) -> tuple[list[dict[str, Any]], str]:
    for suffix in FILE_SUFFIXES:
        path = folder / f"{split}{suffix}"
        if path.is_file():
            return read_file(path), str(path)
    present = sorted(file.stem for file in folder.iterdir() if file.suffix in FILE_SUFFIXES)
    raise _no_split(name, split, present)


def _read_suite(name: str, split: str) -> list[dict[str, Any]]:
    """A benchmark that is not under ``$QERL_DATA``, with the fields that ours have."""
    suite = SUITES[name]
    if suite.hub is None:
        raise DataError(
            f"there is no folder for {name} under $QERL_DATA, and the hub has no copy with one question a row",
            expected=f"$QERL_DATA/{name}/{split}.jsonl with the fields question and answer",
        )
    found = _read_hub(suite.hub, split, asked=name)
    return [Row(suite.row(row), f"{suite.hub}:{split}:{number}") for number, row in enumerate(found, start=1)]


def _read_hub(name: str, split: str, asked: str | None = None) -> list[dict[str, Any]]:
    local = _missing(asked or name)
    if not _may_be_hub_name(name):
        raise local
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            local.what + ", and the Hugging Face hub cannot be asked without the package datasets",
            got=repr(name),
            remedy=f"{local.remedy}; for a hub data set: pip install datasets",
        ) from error
    owner_and_name, config = _hub_parts(name)
    try:
        loaded = datasets.load_dataset(owner_and_name, config, split=split)
    # The hub client reports no network, no such data set, and no such config or split by these.
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"hub data set {name!r} (split {split}) cannot be read",
            got=f"{type(error).__name__}: {reason}",
            remedy=f"{local.remedy}; for a hub data set check the name, the split (NAME:SPLIT), the config (owner/name/config) and "
            "the connection",
        ) from error
    return [Row(record, f"{name}:{split}:{number}") for number, record in enumerate(loaded, start=1)]


def _split_name(text: str) -> tuple[str, str | None]:
    """``NAME:SPLIT`` in two; a path that exists is a path, colon or not."""
    name, colon, split = text.rpartition(":")
    if not colon or Path(text).expanduser().exists():
        return text, None
    return name, split


def _data_root() -> Path | None:
    root = os.environ.get("QERL_DATA")
    return Path(root).expanduser() if root else None


def _data_folder(name: str) -> Path | None:
    root = _data_root()
    folder = root / name if root is not None and name else None
    return folder if folder is not None and folder.is_dir() else None


def _may_be_hub_name(name: str) -> bool:
    parts = name.split("/")
    return len(parts) in (2, 3) and all(parts) and name[0] not in ".~" and Path(name).suffix not in FILE_SUFFIXES


def _hub_parts(name: str) -> tuple[str, str | None]:
    parts = name.split("/")
    return ("/".join(parts[:2]), parts[2]) if len(parts) == 3 else (name, None)


def _missing(name: str) -> DataError:
    """There is nothing of that name here."""
    root = _data_root()
    folder = Path(name).expanduser().parent
    known = [*BUILT_IN]
    if root is not None and root.is_dir():
        known += sorted(entry.name for entry in root.iterdir() if entry.is_dir())
    remedy = "Check the path, or set QERL_DATA to the folder of your data sets"
    close = nearest(name, known)
    if close is None and folder.is_dir() and folder != Path():
        # What stands there under this very name is no file: a device, or a link to nothing.
        beside = nearest(Path(name).name, [entry.name for entry in folder.iterdir() if entry.name != Path(name).name])
        close = str(folder / beside) if beside else None
    where = f"under $QERL_DATA ({root})" if root is not None else "under $QERL_DATA (which is not set)"
    return DataError(
        f"there is no data set {name!r}: no such file, no built-in and no folder {where}",
        expected=f"a {'/'.join(FILE_SUFFIXES)} file, or one of {', '.join(known)}",
        remedy=f"Did you mean {close!r}?" if close else remedy,
    )


def _no_split(name: str, split: str, present: Iterable[str]) -> DataError:
    names = sorted(set(present))
    return DataError(
        f"data set {name!r} has no split {split!r}",
        expected=f"one of {', '.join(names)}" if names else "a file such as train.jsonl in its folder",
        remedy=f"Name a split that exists: {name}:{names[0]}" if names else None,
    )
