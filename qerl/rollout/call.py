"""One generate call: sequences start, advance in rounds of some steps between which the host looks, and end.

What an answer is does not depend on how often the host looks: a row that has ended changes no more, and nothing reads what it goes
on writing.

Shape legend: B running rows, M rows or tokens named in one pass, S sequences of a pass, T tokens of a pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from qerl.model.aqn import Noise
from qerl.model.attention import PackedSequences
from qerl.records import Prompt, SamplingSpec
from qerl.rollout.kv_cache import PrefillContext
from qerl.rollout.pages import PageBook
from qerl.rollout.row_noise import DecodeNoise
from qerl.rollout.scheduler import Scheduler, Start
from qerl.rollout.sequence import Answer, Sequence
from qerl.rollout.workspace import Workspace

ProgressCallback = Callable[[int, int, int], None]
"""Called with (answers done, answers in all, tokens generated) whenever answers end."""


class Call:
    """State of one generate call.

    Args:
        workspace: memory of the decode batch.
        prompts: of the sequences.
        sequences: to be generated, in the order in which they start.
        sampling: how tokens are chosen.
        noise: perturbation of the norm scales, or None.
        adapters: whether the adapters take part.
        rows: most sequences that run at once.
        prefill_tokens: most prompt tokens of one prefill pass.
        eos_ids: tokens that end an answer.
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
        eos_ids: Items[int],
    ):
        self.workspace, self.prompts, self.sampling, self.adapters = workspace, prompts, sampling, adapters
        self.eos_ids = np.array(list(eos_ids))
        self.noise = noise
        self.by_sample = noise is not None and noise.by_sample
        layout = workspace.layout
        self.book = None
        if layout.columns is not None:
            self.book = PageBook(pages=layout.pages, page_tokens=layout.page_tokens, rows=layout.rows)
            self.book.changed.update(range(layout.rows))
        self.scheduler = Scheduler(sequences, rows=rows, prefill_tokens=prefill_tokens, book=self.book)
        self.answers = [Answer() for _ in sequences]
        workspace.begin(sampling, noise, adapters)
        self.steps = 0
        self.stats = {
            "generated_tokens": 0.0,
            "prompt_tokens": float(sum(len(prompt.token_ids) for prompt in prompts)),
            "prefill_tokens": 0.0,
            "kv_bytes": float(workspace.cache.nbytes),
            "peak_rows": float(rows),
            "prefill_seconds": 0.0,
            "decode_seconds": 0.0,
        }

    def run(self, on_progress: ProgressCallback | None) -> list[Answer]:
        """Generate everything; answers in the order of the sequences."""
        graphs = self.workspace.graphs
        captures, seconds = (graphs.captures, graphs.capture_seconds) if graphs else (0, 0.0)
        done = 0
        while not self.scheduler.done:
            self._fill_rows()
            ended = self._advance()
            if not ended:
                continue
            self.scheduler.release(ended)
            self.workspace.state.clear(ended)
            done += len(ended)
            if on_progress is not None:
                on_progress(done, len(self.answers), int(self.stats["generated_tokens"]))
        self.stats["decode_steps"] = float(self.steps)
        self.stats["refills"] = float(self.scheduler.refills)
        self.stats["preemptions"] = float(self.scheduler.preemptions)
        self.stats["graph_captures"] = float(graphs.captures - captures if graphs else 0)
        self.stats["graph_seconds"] = graphs.capture_seconds - seconds if graphs else 0.0
        return self.answers

    def _length(self, sequence: Sequence) -> int:
        """Tokens of a running sequence in the cache: all that are known but the last."""
        return sequence.prompt_length + len(self.answers[sequence.index].token_ids) - 1

    def _left(self, sequence: Sequence) -> int:
        """Tokens that its answer may still get."""
        limit = sequence.limit or self.sampling.max_new_tokens
        return limit - len(self.answers[sequence.index].token_ids)

    def _fill_rows(self) -> None:
        """Start waiting sequences in free rows, then close the gaps that remain."""
        passes = self.scheduler.admit()
        if passes:
            began = time.perf_counter()
            for starts in passes:
                self._prefill(starts)
            if self.workspace.device.type == "cuda":
                torch.cuda.synchronize(self.workspace.device)
            self.stats["prefill_seconds"] += time.perf_counter() - began
        self._close_gaps()

    def _close_gaps(self) -> None:
        moves = self.scheduler.compact(self.workspace.step_rows)
        if not moves:
            return
        workspace = self.workspace
        sources, targets = zip(*moves, strict=True)
        source_M, target_M = torch.tensor((sources, targets), device=workspace.device)
        if self.book is None:
            moved = [self.scheduler.running[row] for row in targets]
            longest = max(self._length(sequence) for sequence in moved if sequence is not None)
            workspace.cache.copy(source_M, target_M, longest)
        workspace.state.move(source_M, target_M)
        workspace.state.clear(sources)
        if isinstance(workspace.noise, DecodeNoise):
            workspace.noise.move(source_M, target_M)

    def _advance(self) -> list[int]:
        """Advance every running row by some tokens; the rows that ended, ascending."""
        began = time.perf_counter()
        steps = min(self.workspace.layout.window, max(self._left(sequence) for _, sequence in self._running()))
        lost = self.scheduler.grow(lambda sequence: self._length(sequence) + min(steps, self._left(sequence)))
        if lost:
            for _, sequence in lost:
                answered = len(self.answers[sequence.index].token_ids)
                self.scheduler.requeue(replace(sequence, answered=answered))
            self.workspace.state.clear([row for row, _ in lost])
            self._close_gaps()
        if self.book is not None:
            self.workspace.write_table(self.book)
        running = self._running()
        longest = max(self._length(sequence) for _, sequence in running)
        tokens, logprobs = self.workspace.decode(len(self.scheduler.running), steps, longest)
        self.steps += steps
        ended = self._collect(running, tokens, logprobs)
        self.stats["decode_seconds"] += time.perf_counter() - began
        return ended

    def _running(self) -> list[tuple[int, Sequence]]:
        """(row, sequence) of all that run."""
        return [(row, sequence) for row, sequence in enumerate(self.scheduler.running) if sequence is not None]

    def _collect(self, running: list[tuple[int, Sequence]], tokens: np.ndarray, logprobs: np.ndarray) -> list[int]:
        """Add what the last steps chose to the answers; the rows that ended."""
        counts = (tokens >= 0).sum(0)
        last = tokens[np.maximum(counts, 1) - 1, np.arange(tokens.shape[1])]
        stopped = np.isin(last, self.eos_ids).tolist()
        self.stats["generated_tokens"] += float(counts.sum())
        taken, ids = counts.tolist(), tokens.T.tolist()
        behavior, sampler = logprobs[0].T.tolist(), logprobs[1].T.tolist()
        ended = []
        for row, sequence in running:
            answer, count = self.answers[sequence.index], taken[row]
            answer.token_ids.extend(ids[row][:count])
            answer.behavior_logprobs.extend(behavior[row][:count])
            answer.sampler_logprobs.extend(sampler[row][:count])
            if stopped[row] or not self._left(sequence):
                ended.append(row)
        return ended

    def _prefill(self, starts: list[Start]) -> None:
        """Bring the known tokens of one pass into the cache, and their sequences into rows."""
        workspace = self.workspace
        for start in starts:
            if self.book is None and not start.prefill:
                spare_1 = torch.tensor([workspace.cache.pages - 1], device=workspace.device)
                rows_M = torch.tensor(start.rows, device=workspace.device)
                workspace.cache.copy(spare_1, rows_M, start.sequences[0].known_length - 1)
            if start.copies:
                source_M, target_M = torch.tensor(start.copies, device=workspace.device).unbind(1)
                workspace.cache.copy(source_M, target_M, workspace.cache.page_tokens)
        # Clean prompts are computed without noise, not with noise times zero: their keys and values are those of no noise.
        clean = self.noise is not None and self.noise.state.prompt == "clean"
        for again in (False, True):
            fresh = [start for start in starts if start.prefill_tokens and (start.sequences[0].answered > 0) == again]
            if fresh:
                tokens_T, context = self._pack(fresh)
                noise = None if clean and not again else self.noise
                workspace.model(tokens_T, context, noise=noise, adapters=self.adapters)
                self.stats["prefill_tokens"] += len(tokens_T)
        rows = [row for start in starts for row in start.rows]
        sequences = [sequence for start in starts for sequence in start.sequences]
        workspace.state.start(rows, sequences, [self._known(sequence)[-1] for sequence in sequences])
        if isinstance(workspace.noise, DecodeNoise):
            workspace.noise.start(rows, [sequence.sample_key for sequence in sequences])

    def _known(self, sequence: Sequence) -> Items[int]:
        prompt = self.prompts[sequence.prompt_index].token_ids
        return (*prompt, *self.answers[sequence.index].token_ids) if sequence.answered else prompt

    def _pack(self, fresh: list[Start]) -> tuple[Tensor, PrefillContext]:
        """Known tokens, all but the last of each prefix, end to end, and where their keys and values go."""
        cache, device = self.workspace.cache, self.workspace.device
        tokens: list[int] = []
        bounds, sources, places = [0], [], []
        for start in fresh:
            tokens.extend(self._known(start.sequences[0])[:-1])
            for positions, targets in self._targets(start):
                sources.append(bounds[-1] + positions)
                places.append(targets)
            bounds.append(len(tokens))
        keys_S = prompts_S = None
        if self.by_sample:
            heads = [start.sequences[0] for start in fresh]
            keys_S = torch.tensor([head.sample_key for head in heads], device=device)
            prompts_S = torch.tensor([head.prompt_length for head in heads], device=device)
        packed = PackedSequences(torch.tensor(bounds, device=device), sample_keys_S=keys_S, prompt_lengths_S=prompts_S)
        source_M, place_M = (torch.from_numpy(np.concatenate(parts)).to(device) for parts in (sources, places))
        return torch.tensor(tokens, device=device), PrefillContext(cache, packed, source_M, place_M)

    def _targets(self, start: Start) -> list[tuple[np.ndarray, np.ndarray]]:
        """(positions, places in the cache) of a prefix: all for each row, or what the rows share once and the rest for each."""
        length, page = start.prefill_tokens, self.workspace.cache.page_tokens
        positions = np.arange(length)
        if self.book is None:
            rows = (*start.rows, self.workspace.cache.pages - 1) if start.keep else start.rows
            return [(positions, row * page + positions) for row in rows]
        shared = length // page * page
        targets = []
        for index, pages in enumerate([self.book.rows[row] for row in start.rows] + [self.book.spare] * start.keep):
            wanted = positions[shared if index else 0 :]
            targets.append((wanted, np.array(pages, dtype=np.int64)[wanted // page] * page + wanted % page))
        return targets
