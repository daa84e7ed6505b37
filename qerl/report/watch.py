"""``qerl watch``: a run folder as it grows, in the terminal. Reads files only, so it may look at any run from anywhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from qerl.metrics.console import Progress, duration
from qerl.metrics.run_dir import RunDir
from qerl.metrics.run_lock import is_held
from qerl.report.collect import RunData, alarm_warnings, read_run
from qerl.report.html import method_line
from qerl.signals import is_ctrl_c

Ending = Literal["finished", "interrupted", "stopped", "silent", "left"]
"""How the watch ended: the run's own status, a run whose process is gone, one that wrote nothing for long, or the reader."""

SILENT_SECONDS = 900.0
"""On a file system without locks, a run that wrote nothing for so long, and for ten steps, is taken for stopped."""


def watch(
    folder: str | Path,
    *,
    plain: bool = False,
    once: bool = False,
    every: float = 1.0,
    console: Console | None = None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Ending | None:
    """Show a run and follow it until it ends, or until Ctrl-C.

    Args:
        folder: run folder: running, finished, interrupted or crashed.
        plain: a line a step instead of a display; so it is without a terminal too.
        once: show what there is and return.
        every: seconds between looks.
        console: where to write; None is standard output.
        clock: seconds, as file times.
        sleep: waits.

    Returns:
        How it ended; None with ``once`` while the run goes on.

    Raises:
        RunFolderError: the folder holds no run, or a damaged file.
    """
    run = RunDir.open(folder)
    data = read_run(run.path, samples=False)
    display = Progress(
        data.planned_steps or data.last_step,
        "plain" if plain else "auto",
        eval_every=int(data.setting("eval.every") or 0),
        eval_after=bool(data.setting("eval.after")),
        console=console,
        clock=lambda: _elapsed(run, data, clock),
        since=0.0,
    )
    first = None if once else _first_step(run, data, clock())
    display.start({"run": str(run.path), "what": ", ".join(method_line(data)), **({"now": first} if first else {})})
    told: set[int] = set()
    try:
        seen: object = None
        while True:
            now = _stamp(run)
            if now != seen:
                seen, data = now, read_run(run.path, samples=False)
                _show(display, run, data, told)
            ending = _ending(run, data, clock())
            if ending is not None or once:
                display.finish(_closing(run, data, ending, clock()))
                return ending
            first = _first_step(run, data, clock())
            if first:
                display.running(first)
            elif display.mode == "live":
                display.note(_pause(run, clock()))
            sleep(every)
    except KeyboardInterrupt as stop:
        if not is_ctrl_c(stop):
            raise
        display.finish({"left": f"at step {data.last_step}; the run is not touched"})
        return "left"
    finally:
        display.close()


def _show(display: Progress, run: RunDir, data: RunData, told: set[int]) -> None:
    """All lines, from the first: a resumed run may have taken some back."""
    rows = run.read_metrics()
    display.show(rows, new=[row for row in rows if row["step"] not in told])
    told.update(row["step"] for row in rows)
    for text in alarm_warnings(data).values():
        # The counts in it change with every step; the alarm is told of once.
        display.warn(text.partition(" in ")[0])


def _ending(run: RunDir, data: RunData, now: float) -> Ending | None:
    if data.status in ("finished", "interrupted"):
        return "finished" if data.status == "finished" else "interrupted"
    alive = is_held(run.path)
    if alive is not None:
        return None if alive else "stopped"
    steps = data.series("time/step")[1]
    patience = max(SILENT_SECONDS, 10 * max(steps, default=0.0))
    return "silent" if now - _last_change(run) > patience else None


def _stamp(run: RunDir) -> tuple[tuple[int, int] | None, ...]:
    """Changes when a watched file does."""
    return tuple(_size_and_time(path) for path in (run.metrics_path, run.summary_path, run.config_path))


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns


def _last_change(run: RunDir) -> float:
    """Time of the newest file the run has written, in seconds."""
    folders = (run.path, run.completions_dir, run.rollouts_dir, run.checkpoints_dir, run.evaluations_dir)
    paths = [run.metrics_path, *(folder for folder in folders if folder.exists())]
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


def _elapsed(run: RunDir, data: RunData, clock: Callable[[], float]) -> float:
    """Seconds the run has taken: of an ended one its own, of one that goes on those up to its last line and since."""
    wall = data.summary.get("wall_seconds")
    if wall is not None:
        return float(wall)
    stated = data.series("time/elapsed")[1]
    counted = stated[-1] if stated else sum(data.series("time/step")[1])
    return counted + (_since_last_line(run, clock()) if is_held(run.path) is not False else 0.0)


def _since_last_line(run: RunDir, now: float) -> float:
    """Seconds since a run's last line, or since its start where it has none."""
    last = run.metrics_path if run.metrics_path.exists() else run.config_path
    return max(now - last.stat().st_mtime, 0.0) if last.exists() else 0.0


def _first_step(run: RunDir, data: RunData, now: float) -> str | None:
    """How long a run without a finished step is at what comes first; None where it has one, or has ended."""
    if data.last_step or data.status in ("finished", "interrupted") or is_held(run.path) is False:
        return None
    evaluates = data.setting("data.eval") is not None and bool(data.setting("eval.before"))
    what = "the evaluation before step 1" if evaluates and not run.metrics_path.exists() else "step 1"
    return f"{what} is running, {duration(_since_last_line(run, now))}"


def _pause(run: RunDir, now: float) -> str:
    """Said when nothing has been written for long."""
    quiet = now - _last_change(run)
    return f"nothing written for {duration(quiet)}" if quiet > 60 else ""


def _closing(run: RunDir, data: RunData, ending: Ending | None, now: float) -> Mapping[str, Any]:
    steps = f"step {data.last_step}" + (f" of {data.planned_steps}" if data.planned_steps else "")
    on = "the command of the run with --resume goes on"
    if run.latest_checkpoint() is None:
        on = "it has no checkpoint to go on from"
    words = {
        "finished": f"finished after {steps}",
        "interrupted": f"interrupted at {steps}; {on}",
        "stopped": f"its process is gone, at {steps}; {on}",
        "silent": f"nothing written for {duration(now - _last_change(run))}, at {steps}: taken for crashed",
        None: _first_step(run, data, now) or f"running, at {steps}",
    }
    lines: dict[str, Any] = {"status": words[ending]}
    for point in data.evaluations:
        if point.step in (0, data.evaluations[-1].step):
            interval = "" if point.low is None or point.high is None else f" [{point.low:.1%}, {point.high:.1%}]"
            lines[f"held-out, step {point.step}"] = f"{point.accuracy:.1%}{interval}"
    if "wall_seconds" in data.summary:
        lines["time"] = duration(float(data.summary["wall_seconds"]))
    warnings = [str(text) for text in data.summary.get("warnings", ())]
    for index, text in enumerate(warnings, start=1):
        lines[f"warning {index}" if len(warnings) > 1 else "warning"] = text
    if run.report_path.exists():
        lines["report"] = run.report_path
    return lines
