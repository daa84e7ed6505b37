"""Noise of the rows of the decode batch, in memory that stays where it is.

A decode step sees one token a row, and the noise of scopes ``rollout``, ``group`` and ``response`` is the same at every step of an
answer. Drawing it anew each step would cost more than a small model's step, so it is drawn when the rollout, or a row, starts,
moves with the row, and is read in place: a captured step finds the next rollout's noise where the last one's was. Of ``token`` noise, whose draws never repeat, and where tables
would be too large or, on a GPU, rows are many, only the keys are kept, and the norm draws for itself.

What the host writes into tables takes effect in the order of the stream, between two captured steps, and it waits for neither.

Shape legend: R rows, B running rows (the first B), M rows named in one call, D width of a norm.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from qerl.kernels.philox import stream_key
from qerl.kernels.rms_norm import NormNoise, TableNoise
from qerl.model.aqn import Noise, NoisePass, Place
from qerl.model.aqn.noise import Counter, keeps_tables
from qerl.model.aqn.sites import POSITION_SHIFT
from qerl.model.attention import AttentionContext, SampleRows
from qerl.rollout.row_state import on_device

DRAWN_BYTES = 1 << 25
"""About how much is drawn for all places at once."""


class DecodeNoise:
    """A noise source for decode steps, with one table a place: [D] in scope ``rollout``, [R, D] in ``group`` and ``response``.

    Args:
        noise: of one of these scopes.
        rows: R.
        device: where the tables lie.
    """

    def __init__(self, noise: Noise, rows: int, device: torch.device):
        self.noise = noise
        self.by_row = noise.state.scope != "rollout"
        self.tables: dict[Place, Tensor] = {}
        for place in noise.places():
            width = noise.widths[place]
            self.tables[place] = torch.zeros((rows, width) if self.by_row else width, device=device)
        self.begin(noise)

    def begin(self, noise: Noise) -> None:
        """Take over the noise of a call: of the places, widths and scope that the tables were made for."""
        self.noise = noise
        if not self.by_row:
            for place, table_D in self.tables.items():
                table_D.copy_(noise.values[place])

    def start(self, rows: Items[int], sample_keys: Items[int]) -> None:
        """Draw for samples that begin in these rows; samples with one scope key share a draw."""
        if not self.by_row:
            return
        device = next(iter(self.tables.values())).device
        if device.type != "cpu":
            self.draw_all(on_device(rows, device), on_device(sample_keys, device))
            return
        first: dict[int, int] = {}
        for sample_key in sample_keys:
            first.setdefault(self.noise.state.scope_key(sample_key), sample_key)
        place_of = {scope_key: index for index, scope_key in enumerate(first)}
        row_M = torch.tensor(rows, device=device)
        draw_M = torch.tensor([place_of[self.noise.state.scope_key(key)] for key in sample_keys], device=device)
        keys_S = torch.tensor(list(first.values()), device=device)
        for place, table_RD in self.tables.items():
            table_RD[row_M] = self.noise.draw(place, keys_S)[draw_M]

    def draw_all(self, row_M: Tensor, key_M: Tensor) -> None:
        """As ``start``, in few launches and without a word to the host: the draws of all places for some rows (int64 [M], with their sample
        keys) at a time."""
        together = max(1, DRAWN_BYTES // (4 * sum(self.noise.widths.values())))
        for rows_M, keys_M in zip(row_M.split(together), key_M.split(together), strict=True):
            samples = SampleRows(keys_S=keys_M, prompt_lengths_S=torch.zeros_like(keys_M))
            for place, z_MD in self.noise.draw_all(self.noise.counter(samples, keys_M)).items():
                self.tables[place].index_copy_(0, rows_M, z_MD)

    def move(self, source_M: Tensor, target_M: Tensor) -> None:
        """Copy rows (int64 [M] each, disjoint) to others."""
        if self.by_row:
            for table_RD in self.tables.values():
                table_RD[target_M] = table_RD[source_M]

    def for_pass(self, context: AttentionContext) -> NoisePass:
        """What a decode step over the first rows sees."""
        return _RowPass(self, context)


class _RowPass(NoisePass):
    """Reads the tables instead of drawing."""

    def __init__(self, rows: DecodeNoise, context: AttentionContext):
        super().__init__(rows.noise, context)
        self._tables, self._by_row = rows.tables, rows.by_row

    def values(self, place: Place) -> Tensor:
        table = self._tables[place]
        return table[: len(self.positions_T)] if self._by_row else table

    def of_norm(self, layer: int, name: str) -> NormNoise | None:
        place = (layer, name)
        if place not in self._tables:
            return None
        values = self.values(place)
        if not self._by_row and self._noisy_T is None:
            return values
        return TableNoise(z_RD=values.view(-1, values.shape[-1]), noisy_T=self._noisy_T)


class KeyedDecodeNoise:
    """A noise source for decode steps that keeps the keys of the draws, and nothing drawn: for any scope but ``rollout``.

    Args:
        noise: a call's noise.
        device: where keys and spreads lie.
    """

    def __init__(self, noise: Noise, device: torch.device):
        self.key_2 = torch.zeros(2, dtype=torch.int64, device=device)
        self.c3_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.spreads = {place: noise.spread_tensor(place, device).clone() for place in noise.places()}
        self.begin(noise)

    def begin(self, noise: Noise) -> None:
        """Take over the noise of a call: of the places and scope that this was made for."""
        self.noise = noise
        self.key_2.copy_(torch.tensor(stream_key(noise.state.seed, noise.state.stream)))
        self.c3_1.fill_(noise.state.rollout)
        for place, spread in self.spreads.items():
            spread.copy_(noise.spread_tensor(place, spread.device))

    def for_pass(self, context: AttentionContext) -> NoisePass:
        """What a decode step over the first rows sees."""
        return _KeyedPass(self, context)


class _KeyedPass(NoisePass):
    """Its keys and spreads are those of the source, and not of one call's noise."""

    def __init__(self, source: KeyedDecodeNoise, context: AttentionContext):
        super().__init__(source.noise, context)
        self._source = source

    def counter(self, samples: SampleRows) -> Counter:
        source, state = self._source, self.noise.state
        return Counter(
            key_2=source.key_2,
            c1_R=self.positions_T << POSITION_SHIFT if state.scope == "token" else None,
            c2_R=samples.keys_S // state.group_size if state.scope == "group" else samples.keys_S,
            c3_1=source.c3_1,
        )

    def spread(self, place: Place) -> Tensor:
        return self._source.spreads[place]


def fits_tables(noise: Noise, rows: int, device: torch.device) -> bool:
    """Whether decode steps of so many rows read the noise from tables."""
    return keeps_tables(noise.state.scope, rows, sum(noise.widths.values()), device.type)
