"""Which sequence holds which row of the decode batch: plain bookkeeping, free of tensors.

Sequences start in order as rows become free, and a row is freed when its answer ends. A prompt is prefilled
once for all sequences that share its keys and values (one ``prefix``: a group as a rule, a single answer where noise at
the prompt differs between answers), when the first of them starts; where the rows do not suffice for all, the keys and values
also go to the spare row, from which the later ones start. As sequences start in order, at most one prefix
is in that state, so one spare row suffices. Running sequences hold the first rows, and gaps between them are closed where that makes a
step smaller: its cost follows the number of sequences that still run.

Where keys and values live in pages, sequences start while there are pages for them, and when those that run need more than
there is, the one that comes last in order is put back in front of the waiting ones with the tokens it has (``preempt``). The first
in order always gets what it needs, so everything ends as long as the pages hold the longest sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from qerl.rollout.pages import PageBook
from qerl.rollout.sequence import Sequence

REFILL_SHARE = 16
"""Freed rows are refilled when 1/16 of all rows is free, so that many short answers do not mean as many small prefills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Sequences of one prefix that start together."""

    sequences: tuple[Sequence, ...]
    rows: tuple[int, ...]
    prefill: bool
    """True: the prompt must be computed. False: its keys and values lie in the spare row."""
    keep: bool
    """Sequences of this prefix still wait: its keys and values must be (or stay) in the spare row."""
    copies: tuple[tuple[int, int], ...] = ()
    """(source, target) pages to be copied, where keys and values live in pages."""

    @property
    def prefill_tokens(self) -> int:
        """Tokens to compute: all but the last, which the first decode step feeds."""
        return self.sequences[0].known_length - 1 if self.prefill else 0


class Scheduler:
    """Assigns rows to sequences.

    Args:
        sequences: in the order in which they start; those of one prefix follow one another.
        rows: rows of the decode batch.
        prefill_tokens: most prompt tokens of one prefill pass; a longer prompt makes one, or several in parts, of its own.
        book: pages of the rows; None where every row has room for the longest sequence.
    """

    def __init__(self, sequences: Iterable[Sequence], *, rows: int, prefill_tokens: int, book: PageBook | None = None):
        assert rows > 0
        self.rows = rows
        self.prefill_tokens = prefill_tokens
        self.waiting = deque(sequences)
        self.running: list[Sequence | None] = []
        self.book = book
        self.refills = 0
        """Times that freed rows were filled again."""
        self.preemptions = 0
        """Times that a running sequence was put back for want of pages."""
        self._filled = False
        self._spare_prefix: tuple[int, int, int] | None = None

    @property
    def done(self) -> bool:
        """No sequence waits or runs."""
        return not self.waiting and not self.running

    def release(self, rows: Iterable[int]) -> list[Sequence]:
        """Free the rows of finished sequences; returns the sequences."""
        finished = []
        for row in rows:
            sequence = self.running[row]
            assert sequence is not None, f"row {row} holds no sequence"
            self._free_row(row)
            finished.append(sequence)
        self._drop_last_gaps()
        return finished

    def fits(self, tokens_B: np.ndarray) -> bool:
        """Whether ``grow`` would find enough free pages."""
        return self.book is None or self.book.missing(tokens_B).sum() <= self.book.free

    def grow(self, tokens_B: np.ndarray) -> list[tuple[int, Sequence]]:
        """Give every running row pages for its number of tokens (0 in a gap), those first in order first.

        Returns:
            (row, sequence) of those that lost their rows for it, last in order first. The caller puts each back with
            ``requeue``, with the tokens it has.
        """
        if self.book is None:
            return []
        lost: list[tuple[int, Sequence]] = []
        short = set(np.flatnonzero(self.book.missing(tokens_B)).tolist())
        for row in self._in_order() if short else ():
            sequence = self.running[row]
            while row in short and sequence is not None and not self.book.grow(row, int(tokens_B[row])):
                if self.book.spare:
                    self._drop_spare()
                    continue
                victim = self._in_order()[-1]
                last = self.running[victim]
                assert last is not None
                lost.append((victim, last))
                self._free_row(victim)
                sequence = self.running[row]
        self.preemptions += len(lost)
        self._drop_last_gaps()
        return lost

    def requeue(self, sequence: Sequence) -> None:
        """Put a sequence in front of all that wait; it will be computed again as far as it was."""
        self.waiting.appendleft(sequence)

    def admit(self) -> list[list[Start]]:
        """Start waiting sequences in free rows; each inner list is one prefill pass, to be run in order."""
        gaps = [row for row, sequence in enumerate(self.running) if sequence is None]
        free = self.rows - len(self.running) + len(gaps)
        wanted = min(max(1, self.rows // REFILL_SHARE), len(self.waiting))
        if not self.waiting or free < wanted:
            return []
        free_rows = iter(gaps + list(range(len(self.running), self.rows)))
        starts = []
        while self.waiting and free > 0:
            count = self._startable(free)
            if count < 1:
                break
            start = self._start(count, free_rows)
            free -= len(start.rows)
            starts.append(start)
        self.refills += self._filled and bool(starts)
        self._filled = True
        return self._passes(starts)

    def compact(self, size: Callable[[int], int] = lambda rows: rows) -> list[tuple[int, int]]:
        """Close the gaps: moves (source, target) that bring the last running rows into the free ones before them.

        Args:
            size: rows that a step over the first so many rows has. Gaps stay where closing them would not make it smaller.
        """
        held = len(self.running) - self.running.count(None)
        if size(held) >= size(len(self.running)):
            return []
        moves = []
        gaps = [row for row, sequence in enumerate(self.running) if sequence is None]
        for gap in gaps:
            if gap >= len(self.running):
                break
            self.running[gap] = self.running.pop()
            if self.book is not None:
                self.book.move(len(self.running), gap)
            moves.append((len(self.running), gap))
            self._drop_last_gaps()
        return moves

    def _drop_last_gaps(self) -> None:
        while self.running and self.running[-1] is None:
            self.running.pop()

    def _in_order(self) -> list[int]:
        """Rows of running sequences, in the order of the sequences."""
        held = [(sequence.index, row) for row, sequence in enumerate(self.running) if sequence is not None]
        return [row for _, row in sorted(held)]

    def _free_row(self, row: int) -> None:
        self.running[row] = None
        if self.book is not None:
            self.book.release(row)

    def _drop_spare(self) -> None:
        self._spare_prefix = None
        if self.book is not None:
            self.book.drop_spare()

    def _startable(self, free: int) -> int:
        """How many sequences of the next prefix can start in so many free rows; 0: none before something ends."""
        if self.book is None:
            return free
        first = self.waiting[0]
        running = len(self.running) - self.running.count(None)
        for _ in range(2):
            # A page for each row that runs stays free: starting what must be put back at once would waste a prefill.
            prefill = self._spare_prefix != first.prefix
            count = self.book.startable(first.known_length - 1, prefill=prefill, reserve=running)
            if count >= 1 or running or not self._spare_prefix:
                break
            self._drop_spare()
        return min(free, count)

    def _start(self, most: int, free_rows: Iterator[int]) -> Start:
        first = self.waiting[0]
        sequences: list[Sequence] = []
        rows: list[int] = []
        while self.waiting and self.waiting[0].prefix == first.prefix and len(rows) < most:
            row = next(free_rows)
            if row == len(self.running):
                self.running.append(None)
            self.running[row] = self.waiting[0]
            rows.append(row)
            sequences.append(self.waiting.popleft())
        in_spare = self._spare_prefix == first.prefix
        keep = bool(self.waiting) and self.waiting[0].prefix == first.prefix
        copies: list[tuple[int, int]] = []
        if self.book is not None:
            copies = self.book.start(rows, first.known_length - 1, prefill=not in_spare, keep=keep)
        if keep or in_spare:
            self._spare_prefix = first.prefix if keep else None
        return Start(
            sequences=tuple(sequences), rows=tuple(rows), prefill=not in_spare, keep=keep, copies=tuple(copies)
        )

    def _passes(self, starts: list[Start]) -> list[list[Start]]:
        passes: list[list[Start]] = []
        tokens = 0
        for start in starts:
            if not passes or tokens + start.prefill_tokens > self.prefill_tokens:
                passes.append([])
                tokens = 0
            passes[-1].append(start)
            tokens += start.prefill_tokens
        return passes
