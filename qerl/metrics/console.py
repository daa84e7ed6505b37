"""The terminal display of a run: current numbers, two small curves, the last steps and the time left.

``live`` redraws one block in place; ``plain`` prints one line a step (for logs and pipes); ``off`` prints nothing but
warnings.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from qerl.metrics.terminal import console as lasting_console

Mode = Literal["auto", "live", "plain", "off"]

BLOCKS = "▁▂▃▄▅▆▇█"
RECENT_STEPS = 10
"""Steps that the time left is estimated from."""
SHOWN_ROWS = 6
QUIET_SECONDS = 30.0
"""Seconds without a line after which plain mode says how far the running step has come."""
COLUMNS = (
    ("reward", "reward", "{:.3f}"),
    ("accuracy", "accuracy", "{:.1%}"),
    ("entropy", "entropy", "{:.3f}"),
    ("groups/mixed", "mixed", "{:.0%}"),
    ("completions/mean_length", "length", "{:.0f}"),
    ("aqn/sigma", "sigma", "{:.2g}"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
)
"""Metric, heading and format of each column, in the order shown."""
CURVES = (("reward", "reward"), ("accuracy", "accuracy"))


class TimeLeft:
    """Estimates the time left from the mean of the last steps, and evaluations apart from them.

    Args:
        total_steps: steps of the whole run.
        eval_every: steps between evaluations; 0 for none in between.
        eval_after: whether the run ends with one.
        clock: seconds, monotonic.
    """

    def __init__(self, total_steps: int, eval_every: int, eval_after: bool, clock: Callable[[], float]):
        self._total, self._every, self._after, self._clock = total_steps, eval_every, eval_after, clock
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._evaluation: float | None = None
        self._previous = clock()

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Counts the time since the last call as this step's, its evaluation (``time/evaluate``) left out."""
        now = self._clock()
        elapsed, self._previous = now - self._previous, now
        evaluation = float(metrics.get("time/evaluate") or 0.0)
        if evaluation > 0.0:
            self._evaluation = evaluation
        if step == 0:
            return
        # The time by the clock holds an evaluation before the first step, too; the measured time does not.
        measured = metrics.get("time/step")
        self._seconds.append(float(measured) if measured is not None else max(elapsed - evaluation, 0.0))

    def seconds(self, step: int) -> float | None:
        """Seconds left after ``step``; None before the first step has ended."""
        if not self._seconds:
            return None
        steps = (self._total - step) * sum(self._seconds) / len(self._seconds)
        return steps + self._evaluations_left(step) * (self._evaluation or 0.0)

    def _evaluations_left(self, step: int) -> int:
        between = (self._total - 1) // self._every - step // self._every if self._every else 0
        return max(between, 0) + (1 if self._after and step < self._total else 0)


class Progress:
    """Shows a run as it goes. A display that fails (a closed pipe, say) ends; the run does not.

    Args:
        total_steps: steps of the whole run.
        mode: ``auto`` is ``live`` on a terminal, ``plain`` elsewhere.
        eval_every: ``eval.every``, for the time left.
        eval_after: ``eval.after``, for the time left.
        console: where to write; None is standard output.
        clock: seconds, monotonic.
        since: reading of the clock that the elapsed time counts from; None is when the display opens.
    """

    def __init__(
        self,
        total_steps: int,
        mode: Mode = "auto",
        *,
        eval_every: int = 0,
        eval_after: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        since: float | None = None,
    ):
        self._console = console or lasting_console(highlight=False)
        if mode == "auto":
            mode = "live" if self._console.is_terminal and not self._console.is_dumb_terminal else "plain"
        self.mode = mode
        self._total = total_steps
        self._clock = clock
        self._time_left = TimeLeft(total_steps, eval_every, eval_after, clock)
        self._since = since
        self._started = clock() if since is None else since
        self._rows: list[dict[str, Any]] = []
        self._evaluations: list[dict[str, Any]] = []
        self._status = "starting"
        self._running: str | None = None
        self._begun = ("", 0.0)
        self._said = 0.0
        self._warned: set[str] = set()
        self._live: Live | None = None

    def start(self, header: Mapping[str, Any]) -> None:
        """Prints what runs (name -> value) and opens the display."""
        if self._since is None:
            self._started = self._clock()
        if self.mode == "off":
            return
        self._print_values(header)
        if self.mode == "live":
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4, transient=False)
            self._live.start()

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Shows the metrics of one step; step 0 is the evaluation before training."""
        row = dict(metrics)
        step = int(row["step"])
        self._take(row)
        self._status, self._running = "", None
        if self.mode == "plain":
            self._print(Text(self._plain_line(step, row)))
        elif self._live is not None:
            self._live.refresh()

    def show(self, rows: Sequence[Mapping[str, Any]], *, new: Sequence[Mapping[str, Any]]) -> None:
        """Shows a run from outside: all of its lines so far in place of those shown, ``new`` ones said in plain mode."""
        self._rows.clear()
        self._evaluations.clear()
        fresh = {id(row) for row in new}
        for row in rows:
            self._take(dict(row))
            if self.mode == "plain" and id(row) in fresh:
                self._print(Text(self._plain_line(int(row["step"]), row)))
        if self._live is not None:
            self._live.refresh()

    def note(self, text: str) -> None:
        """Says what is going on; the live display keeps the latest note under its table."""
        self._status = text
        if self.mode == "plain":
            self._print(Text(text, style="dim"))
        elif self._live is not None:
            self._live.refresh()

    def begin(self, name: str) -> None:
        """What :meth:`running` speaks of from now on, such as ``step 1``; its time counts from now."""
        self._begun = (name, self._clock())

    def running(self, text: str) -> None:
        """Says how far what was begun has come; cheap enough for every decode step. The live display shows the latest; plain mode
        prints a line where none has been printed for :data:`QUIET_SECONDS`."""
        self._running = text
        if self.mode == "plain" and self._clock() - self._said >= QUIET_SECONDS:
            self._print(Text(self._running_line(), style="dim"))

    def answers(self, most_tokens: int) -> Callable[[int, int, int], None]:
        """The callback of an engine: answers done, in all, and tokens so far, into :meth:`running`.

        Args:
            most_tokens: longest answer.
        """

        def tell(done: int, total: int, tokens: int) -> None:
            self.running(f"{done} of {total} answers have ended, {tokens:,} tokens of at most {total * most_tokens:,}")

        return tell

    def warn(self, text: str) -> None:
        """Prints a warning, once however often it is given."""
        if text in self._warned:
            return
        self._warned.add(text)
        self._print(Text.assemble(("warning: ", "bold yellow"), text))

    def say(self, text: str) -> None:
        """Says something at once, whatever the mode; safe in a signal handler, which may interrupt a line being printed."""
        self._status = text
        if self._live is None:
            with contextlib.suppress(OSError):
                os.write(2, f"{text}\n".encode())

    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        """Closes the display and prints closing lines (name -> value)."""
        self._status, self._running = "", None
        self.close()
        if summary and self.mode != "off":
            self._print_values(summary)

    def close(self) -> None:
        """Gives the terminal back; harmless when done twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _take(self, row: dict[str, Any]) -> None:
        step = int(row["step"])
        self._time_left.add(step, row)
        if row.get("eval/accuracy") is not None:
            self._evaluations.append(row)
        if step > 0:
            self._rows.append(row)

    def _print(self, content: RenderableType) -> None:
        # A pipe has no width: lines stay whole there, and wrap at words on a terminal.
        self._said = self._clock()
        self._console.print(content, soft_wrap=not self._console.is_terminal)

    def _running_line(self) -> str:
        name, since = self._begun
        return f"{name}, {duration(self._clock() - since)}: {self._running}" if name else str(self._running)

    def _print_values(self, values: Mapping[str, Any]) -> None:
        """Prints names and values in two columns, between empty lines."""
        width = max((len(name) for name in values), default=0)
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in values.items():
            grid.add_row(f"  {name}", Text(str(value)))
            if not self._console.is_terminal:
                self._print(Text(f"  {name:<{width}}  {value}"))
        if self._console.is_terminal:
            self._print(Group(Text(""), grid))

    def _plain_line(self, step: int, row: Mapping[str, Any]) -> str:
        width = len(str(self._total))
        cells = [f"step {step:>{width}}/{self._total}"]
        cells += [f"{name} {form.format(row[key])}" for key, name, form in COLUMNS if row.get(key) is not None]
        if row.get("eval/accuracy") is not None:
            cells.append(f"held-out {_evaluation(row)}")
        left = self._time_left.seconds(step)
        if left is not None and step < self._total:
            cells.append(f"left {duration(left)}")
        return "  ".join(cells)

    def _render(self) -> RenderableType:
        step = int(self._rows[-1]["step"]) if self._rows else 0
        parts: list[RenderableType] = [Text(""), self._bar(step)]
        if self._rows:
            parts += [Text(""), self._table()]
            parts += [Text(""), *self._curves()]
        if self._evaluations:
            parts.append(self._held_out())
        if self._running is not None:
            parts.append(Text(f"  {self._running_line()}", style="dim"))
        if self._status:
            parts.append(Text(f"  {self._status}", style="dim italic"))
        return Group(*parts)

    def _bar(self, step: int) -> RenderableType:
        left = self._time_left.seconds(step)
        elapsed = duration(self._clock() - self._started)
        tail = f"{elapsed} elapsed" + (f", {duration(left)} left" if left is not None and step < self._total else "")
        line = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=self._total, completed=step, width=max(10, min(40, self._console.width - 48)))
        line.add_row(Text(f"  step {step}/{self._total}", style="bold"), bar, Text(tail, style="dim"))
        return line

    def _table(self) -> Table:
        """The last steps, the newest in bold; on narrow terminals the last columns are left out."""
        room = max(2, (self._console.width - 8) // 10)
        columns = [column for column in COLUMNS if any(row.get(column[0]) is not None for row in self._rows)][:room]
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("  step", justify="right")
        for _, name, _ in columns:
            table.add_column(name, justify="right", min_width=7, no_wrap=True)
        shown = self._rows[-SHOWN_ROWS:]
        for row in shown:
            cells = [form.format(row[key]) if row.get(key) is not None else "" for key, _, form in columns]
            table.add_row(str(row["step"]), *cells, style="bold" if row is shown[-1] else "dim")
        return table

    def _curves(self) -> list[RenderableType]:
        width = max(10, min(60, self._console.width - 34))
        lines: list[RenderableType] = []
        for key, name in CURVES:
            values = [float(row[key]) for row in self._rows if row.get(key) is not None]
            if values:
                low, high = min(values), max(values)
                curve = sparkline(values, width)
                lines.append(
                    Text.assemble((f"  {name:<9}", "dim"), (curve, "cyan"), (f"  {low:.2f} … {high:.2f}", "dim"))
                )
        return lines

    def _held_out(self) -> Text:
        """Each held-out accuracy so far, the first and the last few."""
        shown = self._evaluations if len(self._evaluations) <= 3 else [self._evaluations[0], *self._evaluations[-2:]]
        text = Text("  held-out ", style="dim")
        for index, row in enumerate(shown):
            arrow = " → " if index else ""
            text.append(arrow, style="dim")
            text.append(f"{row['eval/accuracy']:.1%}", style="bold green" if row is shown[-1] else "green")
            text.append(f" (step {row['step']})", style="dim")
        return text


def sparkline(values: list[float], width: int) -> str:
    """``values`` as block characters between their least and greatest, averaged down to at most ``width``."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[start:stop]) / (stop - start) for start, stop in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    if span == 0.0:
        return BLOCKS[0] * count
    return "".join(BLOCKS[min(int((mean - low) / span * len(BLOCKS)), len(BLOCKS) - 1)] for mean in means)


def duration(seconds: float) -> str:
    """Seconds as ``42s``, ``3m 07s`` or ``5h 12m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def _evaluation(row: Mapping[str, Any]) -> str:
    text = f"{row['eval/accuracy']:.1%}"
    if row.get("eval/accuracy_low") is not None and row.get("eval/accuracy_high") is not None:
        text += f" [{row['eval/accuracy_low']:.1%}, {row['eval/accuracy_high']:.1%}]"
    return text
