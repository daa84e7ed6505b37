"""The memory of the decode batch and the step that advances it: rows, cache, page table, noise, and captured steps.

On CUDA a workspace outlives the calls that use it, since captured steps are bound to its memory; a call only rewrites the contents.

Shape legend: B rows of a step (running ones first), R rows, N pages a row has at most, C groups of rows, M rows of a group.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qerl.kernels.cached_attention import SharedPages, members_for
from qerl.model.aqn import Noise, NoiseSource
from qerl.model.attention import SampleRows
from qerl.model.decoder import Decoder
from qerl.records import SamplingSpec
from qerl.rollout import together
from qerl.rollout.cuda_graphs import GraphPool
from qerl.rollout.kv_cache import DecodeContext, KVCache
from qerl.rollout.pages import PageBook
from qerl.rollout.row_noise import DecodeNoise, KeyedDecodeNoise, fits_tables
from qerl.rollout.row_state import Look, RowState
from qerl.rollout.sampler import choose

SHORT_TOKENS, MANY_PAIRS = 2048, 288
"""Where a step has so many rows times key/value heads, and no row more tokens than this, attention is told so: contexts that are not cut
have a leaner kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of a workspace."""

    rows: int
    """R."""
    pages: int
    """Pages of the cache; one of them is the spare row's, or the one that belongs to nobody."""
    page_tokens: int
    columns: int | None
    """N; None when each row has one page, of its own number, and the last page is the spare row's."""
    window: int
    """Most steps between two looks of the host."""
    buckets: tuple[int, ...] | None
    """Ascending numbers of rows that a step may have, the last at least R; None: as many as run."""
    graphs: bool
    """Steps are captured."""
    kv_dtypes: tuple[torch.dtype, torch.dtype]
    """Of keys and of values in the cache."""
    lent: bool = False
    """Keys and values can be given back and had again where they were: captured steps stay."""
    whole_table: bool = False
    """Without graphs too, a step looks at all N columns of the table: its shapes never change."""


class Workspace:
    """What the decode steps of one model read and write.

    Args:
        model: read at every step.
        eos_ids: tokens that end an answer.
        layout: sizes.
        device: where it lies.
    """

    def __init__(self, model: Decoder, eos_ids: Items[int], layout: Layout, device: torch.device):
        spec = model.spec
        self.model, self.layout, self.device = model, layout, device
        self.state = RowState(layout.rows, layout.window, eos_ids, device)
        self.cache = KVCache(
            layers=spec.num_layers,
            pages=layout.pages,
            page_tokens=layout.page_tokens,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtypes=layout.kv_dtypes,
            device=device,
            lent=layout.lent,
        )
        self.table_RN: Tensor | None = None
        if layout.columns is not None:
            self.table_RN = torch.zeros(layout.rows, layout.columns, dtype=torch.int32, device=device)
            self._lines_RN = np.zeros((layout.rows, layout.columns), dtype=np.int32)
            self._members = members_for(spec.num_heads, spec.num_kv_heads)
            self._shared_R = torch.zeros(layout.rows, dtype=torch.int32, device=device)
            self._groups_CM = torch.full(
                (max(1, layout.rows // 2), self._members), -1, dtype=torch.int32, device=device
            )
        self.graphs = GraphPool(device) if layout.graphs else None
        self.noise: NoiseSource | None = None
        self._sources: dict[Hashable, DecodeNoise | KeyedDecodeNoise] = {}
        self._key: Hashable = None
        self._adapters = True
        self._by_sample = False
        self._together = False

    def begin(self, spec: SamplingSpec, noise: Noise | None, adapters: bool, together: bool = False) -> None:
        """Prepare for a call. ``together``: rows of one prompt that run at the same time read its pages together, where there is a table."""
        self.state.begin(spec)
        # A replayed step reads the copies that products take; what the host does to bring them up to date is not in the graph.
        self.model.refresh_adapters()
        self._adapters = adapters
        self._by_sample = noise is not None and noise.by_sample
        self.noise, noise_key = self._noise_source(noise)
        self._together = together and self.table_RN is not None
        self._key = (adapters, noise_key, _sampling_class(spec), self._together)

    def _noise_source(self, noise: Noise | None) -> tuple[NoiseSource | None, Hashable]:
        """What decode steps read the noise of a call from, and what of it decides which kernels run."""
        if noise is None or not noise.places():
            return None, None
        state = noise.state
        tables = fits_tables(noise, self.layout.rows, self.device)
        spreads = tuple(isinstance(spread, Tensor) for spread in noise.spreads.values())
        # Tables are filled by the draws of the call: an evaluation whose groups have another size finds those of the rollouts.
        group_size = state.group_size if state.scope == "group" and not tables else None
        key = (state.scope, state.prompt, state.sharing, group_size, tuple(noise.widths.items()), tables, spreads)
        source = self._sources.get(key)
        if source is None:
            source = (
                DecodeNoise(noise, self.layout.rows, self.device) if tables else KeyedDecodeNoise(noise, self.device)
            )
            self._sources[key] = source
        else:
            source.begin(noise)
        return source, key

    def write_table(self, book: PageBook) -> None:
        """Bring the device's page table up to date."""
        if self.table_RN is None or not book.changed:
            return
        for row in book.changed:
            pages = book.rows[row]
            self._lines_RN[row, : len(pages)] = pages
            self._lines_RN[row, len(pages) :] = 0
        stop = max(book.changed) + 1
        self._write(self.table_RN[:stop], self._lines_RN[:stop])
        book.changed.clear()
        if self._together:
            self._write_groups(book)

    def _write_groups(self, book: PageBook) -> None:
        """Bring up to date which rows read which pages together."""
        groups = book.groups(self._members, together.LEAST_PAGES)
        pages_R = np.zeros(len(self._shared_R), dtype=np.int32)
        groups_CM = np.full(self._groups_CM.shape, -1, dtype=np.int32)
        for index, rows in enumerate(groups):
            groups_CM[index, : len(rows)] = rows
            pages_R[rows] = book.shared[rows[0]]
        self._write(self._shared_R, pages_R)
        self._write(self._groups_CM, groups_CM)

    @staticmethod
    def _write(target: Tensor, values: np.ndarray) -> None:
        """Copy to the device; on CUDA the host does not wait."""
        source = torch.from_numpy(values)
        if target.is_cuda:
            # By numpy, which needs no other thread: torch wakes all of them for more than 32,768 numbers, which takes longer than the copy.
            pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            np.copyto(pinned.numpy(), values)
            source = pinned
        target.copy_(source, non_blocking=True)

    def full_rows(self, tokens: int) -> int:
        """Rows of so many tokens that the pages hold without any being shared; at least 1."""
        return max(1, (self.layout.pages - 2) // (-(-tokens // self.layout.page_tokens) + 1))

    def step_rows(self, running: int) -> int:
        """Rows of a step over the first ``running`` ones: the next bucket."""
        if self.layout.buckets is None:
            return running
        return next(bucket for bucket in (0, *self.layout.buckets) if bucket >= running)

    def decode(self, running: int, steps: int, longest: int) -> Look:
        """Advance the first ``running`` rows by ``steps`` tokens, those that are not alive or end on the way excepted; on CUDA the
        host does not wait for them.

        Args:
            running: rows up to the last that holds a sequence.
            steps: at most the window.
            longest: most tokens that a row has in the cache.
        """
        rows = self.step_rows(running)
        columns = self._columns(rows, longest + steps)
        for index in range(steps):
            if self.graphs is None:
                self._step(rows, longest + index, columns)
            else:
                self.graphs.run(self.graph_key(rows, longest + steps), lambda: self._step(rows, 0, columns))
        return self.state.close_window(steps, running)

    def graph_key(self, rows: int, longest: int) -> Hashable:
        """Names the captured step of so many rows, none of which has more than ``longest`` tokens when it is done."""
        return rows, self._key, self._columns(rows, longest)

    def _columns(self, rows: int, longest: int) -> int | None:
        """Columns of the table that a captured step is told of; all when None. Fewer say how long a row may be, and nothing else."""
        many = rows * self.model.spec.num_kv_heads >= MANY_PAIRS and not self.layout.whole_table
        return SHORT_TOKENS // self.cache.page_tokens if many and longest <= SHORT_TOKENS else None

    def _step(self, rows: int, longest: int, columns: int | None) -> None:
        """One token for each of the first ``rows`` rows; ``columns`` as of ``_columns``, where steps are captured."""
        state, table_RN = self.state, self.table_RN
        samples = None
        if self._by_sample:
            samples = SampleRows(keys_S=state.sample_key_R[:rows], prompt_lengths_S=state.prompt_length_R[:rows])
        if self.layout.whole_table:
            columns = None
        elif self.graphs is None:
            columns = longest // self.cache.page_tokens + 1
        context = DecodeContext(
            self.cache,
            state.length_R[:rows],
            samples,
            table_BN=None if table_RN is None else table_RN[:rows, :columns],
            longest=longest if self.graphs is None else None,
            shared=self._shared_pages(rows),
        )
        hidden_BD = self.model(state.last_token_R[:rows], context, noise=self.noise, adapters=self._adapters)
        temperature = None if self.device.type == "cpu" else state.temperature_1
        state.append(choose(self.model.logits(hidden_BD), state.spec, state.uniforms(rows), temperature))

    def _shared_pages(self, rows: int) -> SharedPages | None:
        """What a step of so many rows reads together."""
        if not self._together or rows < together.LEAST_ROWS:
            return None
        likely = -(-rows // self._members)
        return SharedPages(pages_B=self._shared_R[:rows], members_CM=self._groups_CM[: rows // 2], likely_groups=likely)


def _sampling_class(spec: SamplingSpec) -> Hashable:
    """What of the sampling settings decides which kernels run. A temperature is read on the device; truncations are not."""
    if spec.temperature == 0 or not spec.truncated_support:
        return spec.temperature == 0
    return spec.top_k, spec.top_p, spec.min_p
