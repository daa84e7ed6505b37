"""What commands print besides a run's own display (``metrics.console``): facts, warnings, a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def stderr() -> Console:
    """A console on standard error, where messages go so that standard output holds results alone."""
    return Console(stderr=True)


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
