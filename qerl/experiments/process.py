"""A cell in a process of its own: its memory, its peak and its crash are its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING

from qerl.errors import RunStopped
from qerl.metrics.terminal import LastingStream
from qerl.signals import STOPS
from qerl.train.stop import StopRequest

if TYPE_CHECKING:
    from qerl.experiments.plan import Plan

STARTING_SECONDS = 5.0
"""Kept back for importing and checking in the new process."""
LOOK_SECONDS = 0.1
"""Between two looks at running processes."""
AGAIN = "The same matrix command"
"""What goes on with a cell that was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a process ended."""

    code: int
    """Exit code; minus the signal's number where a signal ended it."""
    last_words: str
    """Last line of its messages."""

    @property
    def by_request(self) -> bool:
        """Whether SIGINT, SIGTERM or SIGHUP ended it, while it began or at work."""
        return self.code in {code for number in STOPS for code in (-number, 128 + number)}

    @property
    def words(self) -> str:
        """What happened, in words."""
        if self.code < 0:
            return f"the process was ended by {signal.Signals(-self.code).name}"
        return f"the process ended without a result, exit code {self.code}: {self.last_words}"[:2000]


class Child:
    """``qerl matrix`` on one cell in a process of its own, in a session of its own: the terminal's Ctrl-C reaches this process
    alone, which passes it on once.

    Args:
        plan: names the matrix file, its settings and its folder.
        arguments: what the process shall do, as on the command line.
        seconds: time limit; None is without.
        device: the one GPU that it may see, as ``CUDA_VISIBLE_DEVICES`` names it; None leaves the choice to the cell.
        name: put before each line that it prints, where several print to one terminal; None lets it have the terminal.
    """

    def __init__(
        self,
        plan: Plan,
        arguments: Sequence[str],
        seconds: float | None,
        device: str | None = None,
        name: str | None = None,
    ):
        command = [sys.executable, "-m", "qerl", "matrix", str(plan.path), *plan.settings, "--out", str(plan.out)]
        command += ["--one-process", "--started-by", str(os.getpid()), *arguments]
        if seconds is not None:
            command += ["--max-minutes", f"{max(seconds - STARTING_SECONDS, 0.0) / 60:.4f}"]
        self._name = name
        environment = os.environ if device is None else {**os.environ, "CUDA_VISIBLE_DEVICES": device}
        # A file: of several processes none waits until somebody reads its pipe.
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by result)
        self._process = subprocess.Popen(
            command,
            stdout=None if name is None else subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            env=environment,
            text=True,
            errors="replace",
        )
        self._reader = None if name is None else Thread(target=self._pass_on, args=(name,), daemon=True)
        if self._reader is not None:
            self._reader.start()

    def _pass_on(self, name: str) -> None:
        """Print what it prints, line by line, with its name."""
        assert self._process.stdout is not None
        shown = LastingStream(sys.stdout)
        with self._process.stdout as lines:
            for line in lines:
                shown.write(f"{name}: {line}")
                shown.flush()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Ask it to end after its step."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def ending(self) -> Ending:
        """How it ended. Its messages are passed on. To be asked once, after it has ended."""
        code = self._process.wait()
        if self._reader is not None:
            self._reader.join(LOOK_SECONDS * 20)
        self._errors.seek(0)
        text = self._errors.read()
        self._errors.close()
        before = "" if self._name is None else f"{self._name}: "
        LastingStream(sys.stderr).write("".join(before + line for line in text.splitlines(keepends=True)))
        last = text.strip().splitlines()[-1:] or ["no message"]
        return Ending(code=code, last_words=last[0])


def run_child(plan: Plan, arguments: Sequence[str]) -> str | None:
    """Run ``qerl matrix`` in a process of its own and wait; returns why it ended badly (codes 0 and 1 are answers), or None.

    The first stop signal is passed on once, so that a cell stops after its step; a second one ends it at once.

    Args:
        plan: names the matrix file, its settings and its folder.
        arguments: what the process shall do, as on the command line.

    Raises:
        RunStopped: a signal reached this process and was passed on.
    """
    child = Child(plan, arguments, None)
    with StopRequest(lambda text: child.stop()) as stop:
        try:
            while child.running:
                time.sleep(LOOK_SECONDS)
        except KeyboardInterrupt:
            child.kill()
            raise
    ending = child.ending()
    if stop.signal_number is not None:
        raise RunStopped(f"the running process was stopped. {AGAIN} goes on", stop.signal_number)
    return None if ending.code in (0, 1) else ending.words
