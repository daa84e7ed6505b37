"""``qerl watch`` of a matrix folder: a line a cell, as the cells grow. Reads files only. Free of torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from qerl.experiments.manifest import Manifest, work_folder
from qerl.metrics.console import duration
from qerl.metrics.run_dir import RunDir
from qerl.metrics.run_lock import is_held
from qerl.metrics.terminal import console as lasting_console
from qerl.signals import is_ctrl_c

MatrixEnding = Literal["finished", "stopped", "left"]
"""How the watch ended: nothing is left to do, no cell is at work, or the reader."""

QUIET_SECONDS = 60.0
"""Without a cell at work for so long, a matrix is taken for stopped: between two cells there are seconds."""
OVER = ("finished", "failed", "invalid")
PLAIN_WIDTH = 160
HEADINGS = ("cell", "state", "step", "reward", "entropy", "held-out", "s a step", "time")


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLine:
    """What is shown of one cell."""

    name: str
    state: str
    at_work: bool
    shared: bool
    """Whether its times are not its own: it ran beside others on one device."""
    values: tuple[str, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        """The cells of its row, as ``HEADINGS``."""
        return self.name, self.state, *self.values


def is_matrix(folder: Path) -> bool:
    """Whether a folder is that of a matrix."""
    return Manifest(folder).path.exists()


def watch_matrix(
    folder: Path,
    *,
    plain: bool = False,
    once: bool = False,
    every: float = 1.0,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> MatrixEnding | None:
    """Show the cells of a matrix and follow them until all are done, none is at work any more, or Ctrl-C.

    Args:
        folder: folder of a matrix (``is_matrix``).
        plain: a line whenever a cell changes its state or is evaluated; so it is without a terminal too.
        once: show what there is and return.
        every: seconds between looks.
        console: where to write; None is standard output.
        clock: seconds.
        sleep: waits.

    Returns:
        How it ended; None with ``once``.

    Raises:
        RunFolderError: a damaged file.
    """
    # Into a file or a pipe nothing is cut off.
    console = console or lasting_console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    if once:
        console.print(_table(cell_lines(folder)))
        return None
    live = None if plain or not console.is_terminal else Live(console=console, auto_refresh=False)
    told: dict[str, tuple[str, str]] = {}
    quiet_since = clock()
    try:
        if live is not None:
            live.start()
        while True:
            lines = cell_lines(folder)
            if live is None:
                _tell(console, lines, told)
            else:
                live.update(_table(lines), refresh=True)
            if all(line.state in OVER for line in lines):
                return "finished"
            if any(line.at_work for line in lines):
                quiet_since = clock()
            elif clock() - quiet_since > QUIET_SECONDS:
                console.print("no cell is at work; the matrix command goes on", markup=False)
                return "stopped"
            sleep(every)
    except KeyboardInterrupt as stop:
        if not is_ctrl_c(stop):
            raise
        return "left"
    finally:
        if live is not None:
            live.stop()


def cell_lines(folder: Path) -> list[CellLine]:
    """Every cell of the matrix as it is now, in the order of the manifest."""
    cells: Mapping[str, Mapping[str, Any]] = Manifest(folder).read()["cells"]
    return [_line(folder, name, entry) for name, entry in cells.items()]


def _line(folder: Path, name: str, entry: Mapping[str, Any]) -> CellLine:
    run = RunDir(folder / name)
    # A folder of results/ has summaries alone.
    summary: Mapping[str, Any] = {} if run.metrics_path.exists() else run.read_json(run.summary_path) or {}
    rows = _summary_rows(summary) if summary else run.read_metrics()
    shared = bool(entry.get("shared_device") or summary.get("shared_device"))
    last: Mapping[str, Any] = rows[-1] if rows else {}
    held = [row["eval/accuracy"] for row in rows if row.get("eval/accuracy") is not None]
    seconds = [row["time/step"] for row in rows if row.get("time/step")]
    values = (
        f"{last['step']}" if rows else "",
        _number(last.get("reward"), "{:.3f}"),
        _number(last.get("entropy"), "{:.3f}"),
        " → ".join(f"{value:.1%}" for value in (held if len(held) < 2 else (held[0], held[-1]))),
        _number(median(seconds) if seconds else None, "{:.2f}*" if shared else "{:.2f}"),
        duration(float(last["time/elapsed"])) if "time/elapsed" in last else "",
    )
    at_work = is_held(work_folder(folder, name))
    state = "invalid" if "problem" in entry and entry.get("state") == "waiting" else str(entry.get("state", "waiting"))
    if state == "running" and at_work is False:
        state = "stopped"
    return CellLine(
        name=name,
        state=state,
        at_work=bool(at_work) or (at_work is None and state == "running"),
        shared=shared,
        values=values,
    )


def _summary_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows like those of ``metrics.jsonl`` from the summary of a cell."""
    rows: dict[int, dict[str, Any]] = {}
    for key, (steps, values) in (summary.get("curves") or {}).items():
        for step, value in zip(steps, values, strict=True):
            rows.setdefault(int(step), {"step": int(step)})[key] = value
    for point in summary.get("evaluations") or ():
        rows.setdefault(int(point["step"]), {"step": int(point["step"])})["eval/accuracy"] = point["accuracy"]
    found = [rows[step] for step in sorted(rows)]
    if found and summary.get("wall_seconds"):
        found[-1]["time/elapsed"] = summary["wall_seconds"]
    return found


def _number(value: Any, form: str) -> str:
    return form.format(value) if isinstance(value, (int, float)) else ""


def _table(lines: Sequence[CellLine]) -> Table:
    states = [line.state for line in lines]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    if any(line.shared for line in lines):
        counts += "   (* beside other cells on one device)"
    table = Table(caption=counts, caption_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, no_wrap=True, justify="left" if index < 2 else "right")
    for line in lines:
        table.add_row(*map(escape, line.texts), style="bold" if line.at_work else None)
    return table


def _tell(console: Console, lines: Sequence[CellLine], told: dict[str, tuple[str, str]]) -> None:
    """Print cells whose state or evaluation is new."""
    for line in lines:
        now = (line.state, line.values[HEADINGS.index("held-out") - 2])
        if told.get(line.name) != now:
            told[line.name] = now
            shown = [f"{heading} {text}" for heading, text in zip(HEADINGS[2:], line.values, strict=True) if text]
            console.print(", ".join([f"{line.name}: {line.state}", *shown]), markup=False, soft_wrap=True)
