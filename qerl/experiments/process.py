"""A cell in a process of its own: its memory, its peak and its crash are its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qerl.errors import RunStopped
from qerl.train.stop import StopRequest

if TYPE_CHECKING:
    from qerl.experiments.plan import Plan

STARTING_SECONDS = 5.0
"""Kept back for importing and checking in the new process."""


def run_child(plan: Plan, arguments: Sequence[str], seconds: float | None) -> str | None:
    """Run ``qerl matrix`` on one cell and wait.

    The first Ctrl-C or SIGTERM is passed on once, so that the cell stops after its step; a second one ends it at once.

    Args:
        plan: names the matrix file, its settings and its folder.
        arguments: what this process shall do, as on the command line.
        seconds: time limit; None is without.

    Returns:
        Why it ended badly, or None.

    Raises:
        RunStopped: a signal reached this process and was passed on.
    """
    command = [sys.executable, "-m", "qerl", "matrix", str(plan.path), *plan.settings, "--out", str(plan.out)]
    command += ["--one-process", "--no-portable", *arguments]
    if seconds is not None:
        command += ["--max-minutes", f"{max(seconds - STARTING_SECONDS, 0.0) / 60:.4f}"]
    # A session of its own: the terminal's Ctrl-C reaches this process alone, which passes it on once.
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True)
    with StopRequest(lambda text: child.terminate()) as stop:
        try:
            _, errors = child.communicate()
        except KeyboardInterrupt:
            child.kill()
            child.wait()
            raise
    if errors:
        sys.stderr.write(errors)
    if stop.signal_number is not None:
        raise RunStopped("the running cell was stopped after its step, which is saved", stop.signal_number)
    if child.returncode in (0, 1):
        return None
    if child.returncode < 0:
        return f"the process was ended by {signal.Signals(-child.returncode).name}"
    last = errors.strip().splitlines()[-1:] or ["no message"]
    return f"exit code {child.returncode}: {last[0]}"[:2000]
