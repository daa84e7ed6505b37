"""``matrix.json``: what the matrix is and how far each cell is, written whole after every change. Free of torch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from qerl.errors import RunFolderError
from qerl.experiments.stored import manifest_damage
from qerl.metrics.files import output_errors, wait_for_lock, write_json
from qerl.metrics.run_dir import MATRIX_NAME
from qerl.metrics.run_lock import is_held

SCHEMA = 1
AT_WORK = ".running"
"""Folder of the matrix folder with the locks of cells at work: outside the cells' folders, which a fresh start removes."""
State = Literal["waiting", "invalid", "running", "stopped", "trained", "finished", "failed"]
"""``trained``: all steps are made, final evaluations are missing. ``running`` after its process is gone: it was killed."""
UNBEGUN = ("waiting", "invalid")
"""States of a cell that has no run."""


def work_folder(out: Path, name: str) -> Path:
    """The folder whose lock (``metrics.run_lock``) the process that works on a cell holds.

    Args:
        out: the matrix folder.
        name: the cell.
    """
    return out / AT_WORK / name


def is_beside(entry: Mapping[str, Any], device: str | None) -> bool:
    """Whether a cell that is at work may share a device with a process on ``device``. Without a name it may be any."""
    return device is None or entry.get("device") in (None, device)


class Manifest:
    """The file of one matrix folder. Every change reads, changes and writes under a lock, so that several processes may
    work on one folder.

    Args:
        out: the matrix folder.
    """

    def __init__(self, out: Path):
        self.path = out / MATRIX_NAME
        self._lock = out / f".{MATRIX_NAME}.lock"

    def read(self) -> dict[str, Any]:
        """The content; of a folder without one, an empty matrix.

        Raises:
            RunFolderError: the file is damaged.
        """
        if not self.path.exists():
            return {"schema": SCHEMA, "cells": {}, "matched": {}, "choices": {}}
        try:
            value = dict(json.loads(self.path.read_text(encoding="utf-8")))
            damage = manifest_damage(value)
        except (ValueError, TypeError, OSError, RecursionError) as error:
            damage = str(error)
        if damage is not None:
            raise RunFolderError(
                "the manifest of the matrix is damaged",
                got=f"{self.path}: {damage}",
                expected="the file that `qerl matrix` wrote",
                remedy="Restore it from portable/ or a copy, or choose another --out",
            )
        return value

    @contextmanager
    def change(self) -> Iterator[dict[str, Any]]:
        """The content to be changed in place; it is written when the block ends well.

        Raises:
            OutputError: the disk is full, or the folder cannot be written.
            RunFolderError: the file is damaged.
        """
        with output_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = self._lock.open("w")
        with lock:
            with output_errors(self.path):
                wait_for_lock(lock.fileno())
            value = self.read()
            yield value
            write_json(self.path, value)

    def at_work(self, device: str | None) -> list[str]:
        """Cells that processes are at work on, this one's too, on that device."""
        entries = self.read()["cells"].items()
        out = self.path.parent
        return [name for name, entry in entries if is_beside(entry, device) and is_held(work_folder(out, name))]

    def note_sharing(self, names: Iterable[str]) -> None:
        """Mark cells whose times are not their own."""
        with self.change() as value:
            for name in names:
                value["cells"].setdefault(name, {"state": "waiting"})["shared_device"] = True

    def cell(self, name: str) -> dict[str, Any]:
        """What is known of a cell; ``state`` is ``waiting`` when nothing is."""
        return {"state": "waiting"} | dict(self.read()["cells"].get(name, {}))

    def note(self, name: str, **facts: Any) -> None:
        """Add facts about a cell."""
        with self.change() as value:
            value["cells"].setdefault(name, {"state": "waiting"}).update(facts)

    def set_state(self, name: str, state: State, **facts: Any) -> None:
        """Give a cell a state, the time, and more facts (None removes one)."""
        with self.change() as value:
            entry = value["cells"].setdefault(name, {})
            entry |= {"state": state, "changed": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())} | facts
            for key in [key for key, fact in entry.items() if fact is None]:
                del entry[key]
