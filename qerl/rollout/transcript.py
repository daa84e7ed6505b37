"""What the sequences of a call have chosen so far, look by look.

Shape legend: S sequences of the call, B running rows, W steps of a window, N tokens of all looks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from qerl.rollout.sequence import Answer


class Transcript:
    """Tokens and log-probs in the order in which they came; put together by sequence when asked for.

    Args:
        sequences: S.
    """

    def __init__(self, sequences: int):
        self.counts_S = np.zeros(sequences, dtype=np.int64)
        """Tokens of each answer so far."""
        self._index: list[np.ndarray] = []
        self._tokens: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []

    def add(self, index_B: np.ndarray, tokens_WB: np.ndarray, logprobs_2WB: np.ndarray) -> np.ndarray:
        """Append a window: int32 tokens, -1 where a row was not alive, and their two log-probs.

        Args:
            index_B: int64, sequence of each row; of a row that holds none, any (it was not alive).

        Returns:
            int64 [B], tokens of each row.
        """
        taken_BW = tokens_WB.T >= 0
        taken_B = taken_BW.sum(1)
        np.add.at(self.counts_S, index_B, taken_B)
        self._index.append(np.repeat(index_B, taken_B))
        self._tokens.append(tokens_WB.T[taken_BW])
        self._logprobs.append(logprobs_2WB.transpose(0, 2, 1)[:, taken_BW])
        return taken_B

    def tokens(self, index: int) -> list[int]:
        """Token ids of one answer so far."""
        parts = [tokens[owner == index] for owner, tokens in zip(self._index, self._tokens, strict=True)]
        return np.concatenate(parts).tolist() if parts else []

    def answers(self) -> Iterator[Answer]:
        """All answers, in the order of the sequences."""
        order_N = np.argsort(np.concatenate(self._index), kind="stable")
        tokens_N = np.concatenate(self._tokens)[order_N]
        logprobs_2N = np.concatenate(self._logprobs, axis=1)[:, order_N]
        stop = 0
        for count in self.counts_S.tolist():
            start, stop = stop, stop + count
            behavior, sampler = logprobs_2N[:, start:stop].tolist()
            yield Answer(tokens_N[start:stop].tolist(), behavior, sampler)
