"""Where commands print, and what they print besides a run's own display (``metrics.console``): facts, warnings, a progress bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def open_missing_streams() -> None:
    """Input and outputs that the command was started without (``>&-``, some services) go nowhere: Python has None for them, and the next file
    that is opened would get their number, and with it what compiled code prints."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115 (open as long as the process)


class LastingStream:
    """A stream that goes quiet when it cannot be written any more (a pipe that nobody reads, a terminal that has closed, a full disk
    behind a redirection), so that what is said ends and the work does not.

    Args:
        stream: what is written to.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Characters that were taken."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            return self.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError):
            self._go_quiet()
        return len(text)

    def flush(self) -> None:
        """Hands what was written to the operating system."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._go_quiet()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _go_quiet(self) -> None:
        """What is still buffered goes nowhere too, so that the end of the process does not fail either."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def console(file: TextIO | None = None, **options: Any) -> Console:
    """A console on a lasting stream. Names between colons stay as they are: ``data.jsonl:100:`` is line 100, and no picture.

    Args:
        file: where it writes; None is standard output.
        options: of rich's ``Console``.
    """
    return Console(file=LastingStream(file or sys.stdout), emoji=False, **options)  # type: ignore[arg-type]


def stderr() -> Console:
    """A console on standard error, where messages go so that standard output holds results alone."""
    return console(sys.stderr)


def warn(text: str) -> None:
    """Print a warning."""
    stderr().print(f"[yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print names and values in two columns on standard output."""
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


@contextmanager
def progress_bar(what: str = "answers") -> Iterator[Callable[[int, int, int], None]]:
    """A bar on standard error; yields the callback that moves it (done, in all, tokens)."""
    columns = [
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    ]
    with Progress(*columns, console=stderr(), transient=True) as bar:
        task = bar.add_task(what, total=None, note="")

        def move(done: int, total: int, tokens: int) -> None:
            bar.update(task, completed=done, total=total, note=f"{tokens} tokens" if tokens else "")

        yield move
