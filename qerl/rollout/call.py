"""One generate call: sequences start, advance in rounds of some steps between which the host looks, and end.

What an answer is does not depend on how often the host looks: a row that has ended changes no more, and nothing reads what it goes
on writing.

Shape legend: B running rows, M rows or tokens named in one pass, S sequences of the call or of a pass, T tokens of a pass.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np

from qerl.model.aqn import Noise
from qerl.records import Prompt, SamplingSpec
from qerl.rollout.pages import PageBook
from qerl.rollout.prefill import Prefill
from qerl.rollout.row_noise import DecodeNoise
from qerl.rollout.row_state import Look, on_device
from qerl.rollout.scheduler import Scheduler, Start
from qerl.rollout.sequence import Answer, Sequence
from qerl.rollout.stopwatch import Stopwatch
from qerl.rollout.transcript import Transcript
from qerl.rollout.workspace import Workspace

ProgressCallback = Callable[[int, int, int], None]
"""Called with (answers done, answers in all, tokens generated) whenever answers end."""


@dataclass(frozen=True, slots=True)
class _Round:
    """Steps that the device has been told to do and the host has not looked at."""

    index_B: np.ndarray
    """int64 [B], sequence of each row when they were told; 0 in gaps, whose rows are not alive."""
    held_B: np.ndarray
    """bool [B], rows that hold one."""
    steps: int
    look: Look


class Call:
    """State of one generate call.

    On CUDA the next steps are on their way before the host looks at the last ones, so the device does not wait for it. What the
    host does to rows, pages and tables takes effect in the order of the stream: after the steps that were told before. Rows that ended in steps
    that the host has not looked at yet are not alive in the next ones.

    Args:
        workspace: memory of the decode batch.
        prompts: of the sequences.
        sequences: to be generated, in the order in which they start.
        sampling: how tokens are chosen.
        noise: perturbation of the norm scales, or None.
        adapters: whether the adapters take part.
        rows: most sequences that run at once.
        prefill_tokens: most prompt tokens of one prefill pass.
        chunk_tokens: a longer prompt is computed in parts of so many tokens.
        eos_ids: tokens that end an answer.
        ahead: rounds that the device is told before the host looks at the one before them: 0 or 1.
        together: rows of one prompt read its pages together.
    """

    def __init__(
        self,
        workspace: Workspace,
        prompts: Items[Prompt],
        sequences: list[Sequence],
        sampling: SamplingSpec,
        noise: Noise | None,
        adapters: bool,
        *,
        rows: int,
        prefill_tokens: int,
        chunk_tokens: int,
        eos_ids: Items[int],
        ahead: int = 0,
        together: bool = False,
    ):
        self.workspace = workspace
        self.eos_ids = np.array(list(eos_ids))
        layout = workspace.layout
        self.book = None
        if layout.columns is not None:
            self.book = PageBook(pages=layout.pages, page_tokens=layout.page_tokens, rows=layout.rows)
            self.book.changed.update(range(layout.rows))
        self.scheduler = Scheduler(sequences, rows=rows, prefill_tokens=prefill_tokens, book=self.book)
        self.transcript = Transcript(len(sequences))
        self.prefill = Prefill(workspace, prompts, self.transcript, noise, adapters, self.book, chunk_tokens)
        self._prompt_S = np.array([sequence.prompt_length for sequence in sequences])
        self._limit_S = np.array([sequence.limit or sampling.max_new_tokens for sequence in sequences])
        self._told_S = np.zeros(len(sequences), dtype=np.int64)
        """Steps that each sequence takes part in and that the host has not looked at."""
        self._ahead = ahead
        self._rounds: deque[_Round] = deque()
        self._runs_S = np.zeros(len(sequences), dtype=bool)
        """Sequences that have been computed as far as they were known; those that ended too."""
        self._prefilling: Iterator[None] | None = None
        """What remains to be computed of prompts whose sequences have rows."""
        self._prefill_watch = Stopwatch(workspace.device)
        workspace.begin(sampling, noise, adapters, together)
        self.steps = 0
        self.stats = {
            "generated_tokens": 0.0,
            "prompt_tokens": float(sum(len(prompt.token_ids) for prompt in prompts)),
            "kv_bytes": float(workspace.cache.nbytes),
            "peak_rows": float(rows),
        }

    def run(self, on_progress: ProgressCallback | None) -> Iterator[Answer]:
        """Generate everything; answers in the order of the sequences."""
        graphs, began = self.workspace.graphs, time.perf_counter()
        captures, seconds = (graphs.captures, graphs.capture_seconds) if graphs else (0, 0.0)
        done = 0
        while not self.scheduler.done:
            self._fill_rows()
            told = self._tell()
            while self._rounds and (len(self._rounds) > self._ahead or not told):
                done += self._look()
                told = True
                if on_progress is not None:
                    on_progress(done, len(self._prompt_S), int(self.transcript.counts_S.sum()))
        total = time.perf_counter() - began
        self.stats["prefill_seconds"] = min(self._prefill_watch.seconds(), total)
        self.stats["decode_seconds"] = total - self.stats["prefill_seconds"]
        self.stats["generated_tokens"] = float(self.transcript.counts_S.sum())
        self.stats["prefill_tokens"] = float(self.prefill.tokens)
        self.stats["prefill_tokens_again"] = float(self.prefill.tokens_again)
        self.stats["prefill_chunks"] = float(self.prefill.chunks)
        self.stats["decode_steps"] = float(self.steps)
        self.stats["refills"] = float(self.scheduler.refills)
        self.stats["preemptions"] = float(self.scheduler.preemptions)
        self.stats["graph_captures"] = float(graphs.captures - captures if graphs else 0)
        self.stats["graph_seconds"] = graphs.capture_seconds - seconds if graphs else 0.0
        return self.transcript.answers()

    def _rows(self) -> tuple[np.ndarray, np.ndarray]:
        """(int64 [B], sequence of each row, 0 in a gap; bool [B], rows that run one: its prefill is done)."""
        index_B = np.array(
            [-1 if sequence is None else sequence.index for sequence in self.scheduler.running], dtype=np.int64
        )
        held_B = (index_B >= 0) & self._runs_S[index_B]
        return np.where(held_B, index_B, 0), held_B

    def _fill_rows(self) -> None:
        """Start waiting sequences in free rows, then close the gaps that remain."""
        if self._prefilling is None:
            passes = self.scheduler.admit()
            self._prefilling = self._started(passes) if passes else None
        if self._prefilling is not None:
            with self._prefill_watch:
                for _ in self._prefilling:
                    if self._rows()[1].any():
                        return
            self._prefilling = None
        self._close_gaps()

    def _started(self, passes: list[list[Start]]) -> Iterator[None]:
        """Run the passes; yields where a prompt is partly computed."""
        if any(self.prefill.in_parts(starts) for starts in passes):
            self.workspace.state.park([start for starts in passes for start in starts])
        for starts in passes:
            yield from self.prefill.run(starts)
            for start in starts:
                self._runs_S[[sequence.index for sequence in start.sequences]] = True

    def _close_gaps(self) -> None:
        moves = self.scheduler.compact(self.workspace.step_rows)
        if not moves:
            return
        workspace = self.workspace
        sources, targets = zip(*moves, strict=True)
        source_M, target_M = on_device((sources, targets), workspace.device)
        if self.book is None:
            index_B, held_B = self._rows()
            workspace.cache.copy(source_M, target_M, int(self._lengths(index_B)[held_B].max()))
        workspace.state.move(source_M, target_M)
        workspace.state.clear(sources)
        if isinstance(workspace.noise, DecodeNoise):
            workspace.noise.move(source_M, target_M)

    def _lengths(self, index_B: np.ndarray) -> np.ndarray:
        """int64 [B]: tokens in the cache, those that are being added included: all that are known but the last, at most."""
        told_B = self.transcript.counts_S[index_B] + self._told_S[index_B]
        return self._prompt_S[index_B] + np.minimum(told_B, self._limit_S[index_B]) - 1

    def _tell(self) -> bool:
        """Tell the device to advance every running row by some tokens; False when nothing can run before the host looks."""
        index_B, held_B = self._rows()
        left_B = self._limit_S[index_B] - self.transcript.counts_S[index_B] - self._told_S[index_B]
        steps = int(min(self.workspace.layout.window, left_B[held_B].max(initial=0)))
        tokens_B = np.where(
            held_B, self._prompt_S[index_B] + self._limit_S[index_B] - np.maximum(left_B - steps, 0) - 1, 0
        )
        fits = self.scheduler.fits(tokens_B)
        if steps < 1 or (self._rounds and not fits):
            return False
        if self._prefilling is not None and not fits:
            # Who must give pages back is decided among rows that run.
            with self._prefill_watch:
                deque(self._prefilling, maxlen=0)
            self._prefilling = None
            return self._tell()
        lost = self.scheduler.grow(tokens_B)
        if lost:
            for _, sequence in lost:
                self._runs_S[sequence.index] = False
                self.scheduler.requeue(replace(sequence, answered=int(self.transcript.counts_S[sequence.index])))
            self.workspace.state.clear([row for row, _ in lost])
            self._close_gaps()
            index_B, held_B = self._rows()
        if self.book is not None:
            self.workspace.write_table(self.book)
        there = [sequence.index for sequence in self.scheduler.running if sequence is not None]
        longest = int(self._lengths(np.array(there)).max())
        look = self.workspace.decode(len(index_B), steps, longest)
        self.steps += steps
        self._told_S[index_B[held_B]] += steps
        self._rounds.append(_Round(index_B, held_B, steps, look))
        return True

    def _look(self) -> int:
        """Take in what the oldest round chose and free the rows of the answers that ended; how many."""
        told = self._rounds.popleft()
        tokens_WB, logprobs_2WB = told.look.read()
        taken_B = self.transcript.add(told.index_B, tokens_WB, logprobs_2WB)
        self._told_S[told.index_B[told.held_B]] -= told.steps
        last_B = tokens_WB[np.maximum(taken_B, 1) - 1, np.arange(len(taken_B))]
        full_B = self.transcript.counts_S[told.index_B] >= self._limit_S[told.index_B]
        ended_B = (taken_B > 0) & (full_B | np.isin(last_B, self.eos_ids))
        if not ended_B.any():
            return 0
        ended = set(told.index_B[ended_B].tolist())
        rows = [row for row, held in enumerate(self.scheduler.running) if held is not None and held.index in ended]
        self.scheduler.release(rows)
        self.workspace.state.clear(rows)
        return len(rows)
