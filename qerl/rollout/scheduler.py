"""Which sequence holds which row of the decode batch: plain bookkeeping, free of tensors.

Sequences start in order as rows become free, and a row is freed when its answer ends. A prompt is prefilled
once for all sequences that share its keys and values (one ``prefix``: a group as a rule, a single answer where noise at
the prompt differs between answers), when the first of them starts; where the rows do not suffice for all, the keys and values
also go to the spare row, from which the later ones start. As sequences start in order, at most one prefix
is in that state, so one spare row suffices. Running sequences always hold the first rows, without gaps: a step's cost
follows the number of sequences that still run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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

    @property
    def prefill_tokens(self) -> int:
        """Tokens to compute: all but the last, which the first decode step feeds."""
        return self.sequences[0].prompt_length - 1 if self.prefill else 0


class Scheduler:
    """Assigns rows to sequences.

    Args:
        sequences: in the order in which they start; those of one prefix follow one another.
        rows: rows of the decode batch.
        prefill_tokens: most prompt tokens of one prefill pass; a longer prompt makes a pass of its own.
    """

    def __init__(self, sequences: Iterable[Sequence], *, rows: int, prefill_tokens: int):
        assert rows > 0
        self.rows = rows
        self.prefill_tokens = prefill_tokens
        self.waiting = deque(sequences)
        self.running: list[Sequence | None] = []
        self.refills = 0
        """Times that freed rows were filled again."""
        self._filled = False
        self._spare_prefix: tuple[int, int] | None = None

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
            self.running[row] = None
            finished.append(sequence)
        self._drop_last_gaps()
        return finished

    def admit(self) -> list[list[Start]]:
        """Start waiting sequences in free rows; each inner list is one prefill pass, to be run in order."""
        gaps = [row for row, sequence in enumerate(self.running) if sequence is None]
        free = self.rows - len(self.running) + len(gaps)
        wanted = min(max(1, self.rows // REFILL_SHARE), len(self.waiting))
        if not self.waiting or free < wanted:
            return []
        self.refills += self._filled
        self._filled = True
        free_rows = iter(gaps + list(range(len(self.running), self.rows)))
        starts = []
        while self.waiting and free > 0:
            start = self._start(free, free_rows)
            free -= len(start.rows)
            starts.append(start)
        return self._passes(starts)

    def compact(self) -> list[tuple[int, int]]:
        """Close the gaps: moves (source, target) that bring the last running rows into the free ones before them."""
        moves = []
        gaps = [row for row, sequence in enumerate(self.running) if sequence is None]
        for gap in gaps:
            if gap >= len(self.running):
                break
            self.running[gap] = self.running.pop()
            moves.append((len(self.running), gap))
            self._drop_last_gaps()
        return moves

    def _drop_last_gaps(self) -> None:
        while self.running and self.running[-1] is None:
            self.running.pop()

    def _start(self, free: int, free_rows: Iterator[int]) -> Start:
        prefix = self.waiting[0].prefix
        sequences: list[Sequence] = []
        rows: list[int] = []
        while self.waiting and self.waiting[0].prefix == prefix and len(rows) < free:
            row = next(free_rows)
            if row == len(self.running):
                self.running.append(None)
            self.running[row] = self.waiting[0]
            rows.append(row)
            sequences.append(self.waiting.popleft())
        in_spare = self._spare_prefix == prefix
        keep = bool(self.waiting) and self.waiting[0].prefix == prefix
        self._spare_prefix = prefix if keep else None
        return Start(sequences=tuple(sequences), rows=tuple(rows), prefill=not in_spare, keep=keep)

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
