"""Hidden states of many tokens on their way through the layers, a batch at a time.

Legend: T tokens of a batch, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qerl.model.attention import PackedSequences

BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Tokens of a batch, more only where one sequence is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Whole sequences, packed."""

    tokens_T: Tensor
    """int64 [T], on the CPU."""
    lengths: tuple[int, ...]


class Stream:
    """Hidden states of all batches, one copy, replaced in place layer by layer.

    Args:
        sequences: token ids; none is empty.
        embed_VD: embedding matrix, on any device; only rows of these tokens are read.
        dtype: type of the hidden states.
        device: where they are computed.
        keep: `device`, `cpu`, or a folder in which they are kept on disk.
    """

    def __init__(
        self,
        sequences: Sequence[Sequence[int]],
        embed_VD: Tensor,
        *,
        dtype: torch.dtype,
        device: torch.device,
        keep: str | Path = "device",
    ):
        self.device = device
        self.dtype = dtype
        self.batches = list(make_batches(sequences, BATCH_TOKENS["cuda" if device.type == "cuda" else "cpu"]))
        self.tokens = sum(batch.tokens_T.numel() for batch in self.batches)
        self._folder = keep if isinstance(keep, Path) else None
        self._place = torch.device("cpu") if keep == "cpu" else device
        self._held: dict[int, Tensor] = {}
        self._contexts: dict[int, PackedSequences] = {}
        self._width = embed_VD.shape[1]
        for index, batch in enumerate(self.batches):
            self._put(index, embed_VD[batch.tokens_T.to(embed_VD.device)].to(dtype))

    def context(self, index: int) -> PackedSequences:
        """Positions and bounds of the sequences of one batch."""
        if index not in self._contexts:
            bounds = torch.tensor([0, *self.batches[index].lengths], device=self.device).cumsum(0)
            self._contexts[index] = PackedSequences(bounds)
        return self._contexts[index]

    def __iter__(self) -> Iterator[tuple[Tensor, PackedSequences]]:
        """(hidden states [T, D] on the device, context) of every batch."""
        for index in range(len(self.batches)):
            yield self._get(index), self.context(index)

    def replace(self, step: Callable[[Tensor, PackedSequences], Tensor]) -> None:
        """Put step(x_TD, context) in the place of every batch."""
        for index in range(len(self.batches)):
            self._put(index, step(self._get(index), self.context(index)))

    def _get(self, index: int) -> Tensor:
        if self._folder is None:
            return self._held[index].to(self.device)
        data = torch.from_file(str(self._file(index)), size=self._elements(index), dtype=self.dtype)
        return data.view(-1, self._width).to(self.device, copy=True)

    def _put(self, index: int, x_TD: Tensor) -> None:
        if self._folder is None:
            self._held[index] = x_TD.to(self._place)
            return
        x_TD.contiguous().cpu().view(-1).view(torch.uint8).numpy().tofile(self._file(index))

    def _file(self, index: int) -> Path:
        assert self._folder is not None
        return self._folder / f"hidden-{index:05d}.bin"

    def _elements(self, index: int) -> int:
        return self.batches[index].tokens_T.numel() * self._width


def make_batches(sequences: Sequence[Sequence[int]], tokens: int) -> Iterator[Batch]:
    """Neighboring sequences together, up to `tokens` a batch."""
    pending: list[Sequence[int]] = []
    for sequence in sequences:
        if pending and sum(map(len, pending)) + len(sequence) > tokens:
            yield _batch(pending)
            pending = []
        pending.append(sequence)
    if pending:
        yield _batch(pending)


def _batch(sequences: list[Sequence[int]]) -> Batch:
    flat = [token for sequence in sequences for token in sequence]
    return Batch(tokens_T=torch.tensor(flat), lengths=tuple(map(len, sequences)))
