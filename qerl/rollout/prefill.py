"""Bringing the known tokens of sequences into the cache, before they take part in decode steps.

A pass computes several short prompts end to end. A prompt longer than a chunk is computed a chunk at a time: a chunk's tokens attend to those of
the chunks before, which are in the cache. Between two chunks the rows that run already may decode.

Shape legend: T tokens of a pass, S sequences of a pass, M tokens or pages named in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items

import numpy as np

from qerl.model.aqn import Noise
from qerl.model.attention import PackedSequences
from qerl.records import Prompt
from qerl.rollout.kv_cache import PrefillContext
from qerl.rollout.pages import PageBook
from qerl.rollout.row_noise import DecodeNoise
from qerl.rollout.row_state import all_on_device, on_device
from qerl.rollout.scheduler import Start
from qerl.rollout.sequence import Sequence
from qerl.rollout.transcript import Transcript
from qerl.rollout.workspace import Workspace


class Prefill:
    """The prefill passes of one call.

    Args:
        workspace: where keys, values and rows go.
        prompts: of the sequences.
        transcript: the tokens of answers that are computed again.
        noise: perturbation of the norm scales, or None.
        adapters: whether the adapters take part.
        book: pages of the rows; None where row b has page b.
        chunk_tokens: most tokens of one prompt that a pass computes.
    """

    def __init__(
        self,
        workspace: Workspace,
        prompts: Items[Prompt],
        transcript: Transcript,
        noise: Noise | None,
        adapters: bool,
        book: PageBook | None,
        chunk_tokens: int,
    ):
        self._workspace, self._prompts, self._transcript = workspace, prompts, transcript
        self._noise, self._adapters, self._book = noise, adapters, book
        self._chunk_tokens = chunk_tokens
        self.tokens = 0
        """Computed so far."""
        self.tokens_again = 0
        """Of these, ones that had been computed before: of answers that were put back, and of prompts that nobody kept."""
        self._prefixes: set[tuple[int, int, int]] = set()
        self.chunks = 0
        """Passes that computed a part of a prompt."""

    def in_parts(self, starts: list[Start]) -> bool:
        """Whether the pass is one prompt that is longer than a chunk."""
        return max(start.prefill_tokens for start in starts) > self._chunk_tokens

    def run(self, starts: list[Start]) -> Iterator[None]:
        """Compute what the sequences of one pass know and put them into their rows; yields where a prompt is partly computed."""
        workspace = self._workspace
        for start in starts:
            if self._book is None and not start.prefill:
                spare_1 = on_device([workspace.cache.pages - 1], workspace.device)
                rows_M = on_device(start.rows, workspace.device)
                workspace.cache.copy(spare_1, rows_M, start.sequences[0].known_length - 1)
            if start.copies:
                source_M, target_M = on_device(start.copies, workspace.device).unbind(1)
                workspace.cache.copy(source_M, target_M, workspace.cache.page_tokens)
        fresh = [start for start in starts if start.prefill_tokens]
        for start in fresh:
            head = start.sequences[0]
            self.tokens_again += start.prefill_tokens * (head.answered > 0 or head.prefix in self._prefixes)
            self._prefixes.add(head.prefix)
        if self.in_parts(starts):
            yield from self._chunked(fresh[0])
        else:
            # Clean prompts are computed without noise, answers that are computed again with it.
            for again in (False, True):
                self._compute([start for start in fresh if (start.sequences[0].answered > 0) == again])
        rows = [row for start in starts for row in start.rows]
        sequences = [sequence for start in starts for sequence in start.sequences]
        workspace.state.start(rows, sequences, [self._known(sequence)[-1] for sequence in sequences])
        if isinstance(workspace.noise, DecodeNoise):
            workspace.noise.start(rows, [sequence.sample_key for sequence in sequences])

    def _known(self, sequence: Sequence) -> Items[int]:
        prompt = self._prompts[sequence.prompt_index].token_ids
        return (*prompt, *self._transcript.tokens(sequence.index)) if sequence.answered else prompt

    def _chunked(self, start: Start) -> Iterator[None]:
        length = start.prefill_tokens
        for begin in range(0, length, self._chunk_tokens):
            self._compute([start], slice(begin, min(begin + self._chunk_tokens, length)))
            self.chunks += 1
            if begin + self._chunk_tokens < length:
                yield

    def _compute(self, fresh: list[Start], part: slice | None = None) -> None:
        """One pass over the known tokens, all but the last of each prefix, end to end; or over a part of those of one prefix."""
        if not fresh:
            return
        cache, device = self._workspace.cache, self._workspace.device
        heads = [start.sequences[0] for start in fresh]
        tokens: list[int] = []
        positions, bounds, earlier = [], [0], np.zeros(0, dtype=np.int64)
        # Places of all tokens in their order, and further places of some.
        places, more_sources, more_places = [], [], []
        for start, head in zip(fresh, heads, strict=True):
            taken = part or slice(0, start.prefill_tokens)
            (_, first_places), *others = self._targets(start)
            earlier = first_places[: taken.stop] if taken.start else earlier
            places.append(first_places[taken])
            for wanted, place in others:
                inside = (wanted >= taken.start) & (wanted < taken.stop)
                more_sources.append(bounds[-1] - taken.start + wanted[inside])
                more_places.append(place[inside])
            tokens.extend(self._known(head)[taken])
            positions.append(np.arange(taken.start, taken.stop))
            bounds.append(len(tokens))
        by_sample = self._noise is not None and self._noise.by_sample
        # One copy, which the host does not wait for: what it tells the device next is on its way while steps that were told before still run.
        tokens_T, positions_T, bounds_S1, source_M, place_M, earlier_L, keys_S, prompts_S = all_on_device(
            (
                np.array(tokens, dtype=np.int64),
                np.concatenate(positions),
                np.array(bounds),
                np.concatenate([np.arange(len(tokens)), *more_sources]),
                np.concatenate([*places, *more_places]),
                earlier,
                np.array([head.sample_key for head in heads if by_sample], dtype=np.int64),
                np.array([head.prompt_length for head in heads if by_sample], dtype=np.int64),
            ),
            device,
        )
        packed = PackedSequences(
            bounds_S1,
            positions_T,
            sample_keys_S=keys_S if by_sample else None,
            prompt_lengths_S=prompts_S if by_sample else None,
            lengths=tuple(np.diff(bounds).tolist()),
        )
        # Without noise, not with noise times zero: keys and values of clean prompts are those of no noise.
        clean = self._noise is not None and self._noise.state.prompt == "clean" and not heads[0].answered
        self._workspace.model(
            tokens_T,
            PrefillContext(cache, packed, source_M, place_M, earlier_L if len(earlier) else None),
            noise=None if clean else self._noise,
            adapters=self._adapters,
        )
        self.tokens += len(tokens)

    def _targets(self, start: Start) -> list[tuple[np.ndarray, np.ndarray]]:
        """(positions, places in the cache) of a prefix: all for the first row, and what each other one does not share with it."""
        length, page = start.prefill_tokens, self._workspace.cache.page_tokens
        positions = np.arange(length)
        if self._book is None:
            rows = (*start.rows, self._workspace.cache.pages - 1) if start.keep else start.rows
            return [(positions, row * page + positions) for row in rows]
        shared = length // page * page
        targets = []
        for index, pages in enumerate([self._book.rows[row] for row in start.rows] + [self._book.spare] * start.keep):
            wanted = positions[shared if index else 0 :]
            targets.append((wanted, np.array(pages, dtype=np.int64)[wanted // page] * page + wanted % page))
        return targets
