"""``portable/``: the matrix folder without what is large, to go on or to be reported elsewhere.

Each cell's part is written when the cell ends, while others are at work, so that little is left to do when time is up; and, of cells at
work beside this process, whenever they have saved, so that a machine that is taken away takes little with it. A cell whose command was
killed writes its own part when it ends.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from types import TracebackType

from qerl.errors import CheckpointError, OutputError
from qerl.experiments.cells import Cell
from qerl.experiments.manifest import work_folder
from qerl.experiments.plan import Plan
from qerl.experiments.summary import SUMMARY_FILE, stored_summary
from qerl.metrics.files import recover_folders, remove_leftovers, whole_file, whole_folder
from qerl.metrics.run_dir import RunDir
from qerl.metrics.run_lock import is_held
from qerl.train.portable import write_portable_run

PORTABLE = "portable"
"""Folder of the matrix folder with what goes to another machine."""
DONE = ("finished", "failed", "invalid")
"""States in which a cell does not go on by itself; a failed one does with ``--retry``, and so keeps its checkpoint."""
LOOK_SECONDS = 1.0
"""Between two looks for new checkpoints."""
WRITERS = 8
"""Cells that are written at one time: most of it is compression."""


class Portable:
    """Context manager that keeps ``portable/`` up to date: at its end every cell that is not at work is there, each that is not done
    with its checkpoint.

    Args:
        plan: the matrix.
        wanted: whether to write anything.
    """

    def __init__(self, plan: Plan, *, wanted: bool):
        self._plan, self._wanted = plan, wanted
        self._threads = ThreadPoolExecutor(max_workers=WRITERS)
        self._writing: dict[str, Future[None]] = {}
        self._saved: dict[str, str] = {}
        """Name of the checkpoint of a cell at work that was carried last."""
        self._next_look = 0.0
        self._whole = Lock()

    @property
    def folder(self) -> Path:
        return self._plan.out / PORTABLE

    def take(self, cell: Cell) -> None:
        """Begin to write a cell that has ended, in whatever state."""
        if self._wanted:
            before = self._writing.get(cell.name)
            self._writing[cell.name] = self._threads.submit(self._write, cell, before)

    def look_at(self, running: Iterable[Cell]) -> None:
        """Begin to write those of the cells at work that have saved since they were written last. To be called often."""
        if not self._wanted or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        for cell in running:
            newest = self._plan.run(cell).latest_checkpoint()
            busy = cell.name in self._writing and not self._writing[cell.name].done()
            if newest is None or busy or self._saved.get(cell.name) == newest.name or _is_full(cell):
                continue
            self._saved[cell.name] = newest.name
            self._writing[cell.name] = self._threads.submit(self._write_at_work, cell)

    def __enter__(self) -> Portable:
        if self._wanted:
            recover_folders(self.folder)
            remove_leftovers(self.folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._threads:
            if not self._wanted or error is not None:
                return
            for cell in self._plan.cells:
                if cell.name not in self._writing:
                    self.take(cell)
            for future in self._writing.values():
                future.result()
        self._write_common()

    def _write_common(self) -> None:
        """What belongs to the matrix and not to a cell."""
        with self._whole:
            for path in (self._plan.manifest.path, RunDir(self._plan.out).probe_path):
                if path.exists():
                    with whole_file(self.folder / path.name) as copy:
                        shutil.copyfile(path, copy)

    def _write(self, cell: Cell, before: Future[None] | None) -> None:
        """A cell that has ended, after what is still being written of it."""
        if before is not None:
            before.result()
        run, target = self._plan.run(cell), self.folder / cell.name
        summary = run.cell_path if stored_summary(run.path) is None else run.path / SUMMARY_FILE
        # What another process is at work on is its command's to write.
        if is_held(work_folder(self._plan.out, cell.name)) or _same(summary, target / summary.name):
            return
        if run.holds_a_run():
            self._write_run(cell, run, target)
        elif summary.exists():
            with whole_folder(target) as folder:
                shutil.copyfile(summary, folder / summary.name)
        self._write_common()

    def _write_run(self, cell: Cell, run: RunDir, target: Path) -> None:
        state = self._plan.state(cell)
        try:
            write_portable_run(run, target, checkpoint=(state not in DONE or state == "failed") and not _is_full(cell))
        except CheckpointError:
            if state != "failed":
                raise
            # What was carried before it failed is better than nothing.
            if RunDir(target).latest_checkpoint() is None:
                write_portable_run(run, target, checkpoint=False)

    def _write_at_work(self, cell: Cell) -> None:
        """What a cell at work has saved. Where it is replaced by the next checkpoint meanwhile, that one is carried."""
        with suppress(CheckpointError, FileNotFoundError, OutputError):
            write_portable_run(self._plan.run(cell), self.folder / cell.name)
            self._write_common()


def _is_full(cell: Cell) -> bool:
    """Full-parameter checkpoints have no portable form: such a cell goes on only where it is."""
    return cell.config is None or cell.config.train.mode == "full"


def _same(first: Path, second: Path) -> bool:
    """Whether a cell's summary, which is written anew whenever the cell ends, is the one that was carried before."""
    return first.is_file() and second.is_file() and first.read_bytes() == second.read_bytes()
