"""``portable/``: the matrix folder without what is large, to go on or to be reported elsewhere.

Each cell's part is written when the cell ends, while others are at work, so that little is left to do when time is up.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from qerl.experiments.cells import Cell
from qerl.experiments.manifest import work_folder
from qerl.experiments.plan import Plan
from qerl.metrics.files import whole_file, whole_folder
from qerl.metrics.run_dir import RunDir
from qerl.metrics.run_lock import is_held
from qerl.train.portable import write_portable_run

PORTABLE = "portable"
"""Folder of the matrix folder with what goes to another machine."""
DONE = ("finished", "failed", "invalid")
"""States in which a cell does not go on."""
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

    @property
    def folder(self) -> Path:
        return self._plan.out / PORTABLE

    def take(self, cell: Cell) -> None:
        """Begin to write a cell that has ended, in whatever state."""
        if self._wanted:
            self._writing[cell.name] = self._threads.submit(self._write, cell)

    def __enter__(self) -> Portable:
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
        for path in (self._plan.manifest.path, RunDir(self._plan.out).probe_path):
            if path.exists():
                with whole_file(self.folder / path.name) as copy:
                    shutil.copyfile(path, copy)

    def _write(self, cell: Cell) -> None:
        run, target = self._plan.run(cell), self.folder / cell.name
        # What another process is at work on is its command's to write.
        if is_held(work_folder(self._plan.out, cell.name)) or _same(run.cell_path, target / run.cell_path.name):
            return
        if run.holds_a_run():
            # Full-parameter checkpoints have no portable form: such a cell goes on only where it is.
            full = cell.config is None or cell.config.train.mode == "full"
            write_portable_run(run, target, checkpoint=self._plan.state(cell) not in DONE and not full)
        elif run.cell_path.exists():
            with whole_folder(target) as folder:
                shutil.copyfile(run.cell_path, folder / run.cell_path.name)


def _same(first: Path, second: Path) -> bool:
    """Whether a cell's summary, which is written anew whenever the cell ends, is the one that was carried before."""
    return first.exists() and second.exists() and first.read_bytes() == second.read_bytes()
