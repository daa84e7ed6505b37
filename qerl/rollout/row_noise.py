"""Noise of the rows of the decode batch: draws that last as long as an answer, kept where the row is.

A decode step sees one token a row, and the noise of scopes ``group`` and ``response`` is the same at every step of an answer.
Drawing it anew each step would cost more than a small model's step, so it is drawn when a row starts, moves with the row,
and is read in place. Nothing is kept of ``token`` noise, whose draws never repeat.

Shape legend: R rows, B running rows (the first B), M rows named in one call, D width of a norm.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from qerl.kernels.rms_norm import NormNoise, TableNoise
from qerl.model.aqn import Noise, NoisePass, NoiseSource, Place
from qerl.model.attention import AttentionContext

TABLE_BYTES = 1 << 30
"""Most memory of the tables of all places; noise that needs more is drawn at every step."""


class RowNoise:
    """A noise source for decode steps, with one table [R, D] a place.

    Args:
        noise: of scope ``group`` or ``response``.
        rows: R.
        device: where the tables lie.
    """

    def __init__(self, noise: Noise, rows: int, device: torch.device):
        self.noise = noise
        self.tables: dict[Place, Tensor] = {
            place: torch.zeros(rows, noise.widths[place], device=device) for place in noise.places()
        }

    def start(self, rows: Items[int], sample_keys: Items[int]) -> None:
        """Draw for samples that begin in these rows; samples with one scope key share a draw."""
        device = next(iter(self.tables.values())).device
        first: dict[int, int] = {}
        for sample_key in sample_keys:
            first.setdefault(self.noise.state.scope_key(sample_key), sample_key)
        place_of = {scope_key: index for index, scope_key in enumerate(first)}
        row_M = torch.tensor(rows, device=device)
        draw_M = torch.tensor([place_of[self.noise.state.scope_key(key)] for key in sample_keys], device=device)
        keys_S = torch.tensor(list(first.values()), device=device)
        for place, table_RD in self.tables.items():
            table_RD[row_M] = self.noise.draw(place, keys_S)[draw_M]

    def move(self, source_M: Tensor, target_M: Tensor) -> None:
        """Copy rows (int64 [M] each, disjoint) to others."""
        for table_RD in self.tables.values():
            table_RD[target_M] = table_RD[source_M]

    def for_pass(self, context: AttentionContext) -> NoisePass:
        """What a decode step over the first rows sees."""
        return _RowPass(self, context)


class _RowPass(NoisePass):
    """Reads the tables instead of drawing."""

    def __init__(self, rows: RowNoise, context: AttentionContext):
        super().__init__(rows.noise, context)
        self._tables = rows.tables

    def values(self, place: Place) -> Tensor:
        return self._tables[place][: len(self.positions_T)]

    def of_norm(self, layer: int, name: str) -> NormNoise | None:
        place = (layer, name)
        return TableNoise(z_RD=self.values(place), noisy_T=self._noisy_T) if place in self._tables else None


def decode_noise(noise: Noise | None, rows: int, device: torch.device) -> NoiseSource | None:
    """The source that decode steps read: tables where draws last an answer and fit, else the noise itself."""
    if noise is None or not noise.places():
        return None
    keeps = noise.state.scope in ("group", "response") and 4 * rows * sum(noise.widths.values()) <= TABLE_BYTES
    return RowNoise(noise, rows, device) if keeps else noise
