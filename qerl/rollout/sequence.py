"""One answer under generation, and the tensors that hold the answers of all rows of the decode batch.

Shape legend: R rows of the decode batch, B running rows (the first B of R), M sequences named in one call, N longest
answer, W answer positions whose random numbers are drawn at once.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl.records import SamplingSpec
from qerl.rollout.sampler import Chosen, answer_uniforms

UNIFORM_WINDOW = 32
"""Answer positions whose random numbers are drawn in one call; one call a step would cost as much as sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One answer to be generated."""

    index: int
    """Place in the result: prompt * group_size + answer."""
    prompt_index: int
    prompt_length: int
    """Tokens."""
    sample_key: int
    """Key of its random numbers, unique within the rollout."""
    prefix_key: int = 0
    """Sequences of one prompt with the same number share the prompt's keys and values; noise may set them apart."""

    @property
    def prefix(self) -> tuple[int, int]:
        """What identifies the keys and values of its prompt."""
        return self.prompt_index, self.prefix_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The finished tokens of one sequence with their log-probs."""

    token_ids: list[int]
    behavior_logprobs: list[float]
    sampler_logprobs: list[float]


class RowState:
    """What each row of the decode batch knows, as tensors that are updated in place.

    A row's sequence has its prompt and ``count`` answer tokens. Its next pass feeds ``last_token``, whose keys and
    values belong at position ``length`` of the cache; at the start that is the last token of the prompt.

    Args:
        rows: R.
        spec: sampling settings; max_new_tokens is N.
        device: where the tensors lie.
    """

    def __init__(self, rows: int, spec: SamplingSpec, device: torch.device):
        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.spec = spec
        self.last_token_R = integers(rows)
        self.length_R = integers(rows)
        self.count_R = integers(rows)
        self.sample_key_R = integers(rows)
        self.prompt_length_R = integers(rows)
        self.tokens_RN = integers(rows, spec.max_new_tokens)
        self.behavior_RN = torch.zeros(rows, spec.max_new_tokens, device=device)
        self.sampler_RN = torch.zeros(rows, spec.max_new_tokens, device=device)
        self.uniform_RW = torch.zeros(rows, UNIFORM_WINDOW, device=device)
        self._column = UNIFORM_WINDOW

    def start(self, rows: Items[int], sequences: Items[Sequence], last_prompt_tokens: Items[int]) -> None:
        """Put sequences whose prompts (all but the last token) are in the cache into rows."""
        row_M = torch.tensor(rows, device=self.length_R.device)
        columns = (
            last_prompt_tokens,
            [sequence.prompt_length - 1 for sequence in sequences],
            [0] * len(rows),
            [sequence.sample_key for sequence in sequences],
            [sequence.prompt_length for sequence in sequences],
        )
        fresh = torch.tensor(columns, device=row_M.device)
        for state_R, values_M in zip(self._integers(), fresh, strict=True):
            state_R[row_M] = values_M
        if self._column < UNIFORM_WINDOW and self.spec.temperature > 0:
            width = UNIFORM_WINDOW - self._column
            self.uniform_RW[row_M, self._column :] = answer_uniforms(self.spec, fresh[3], fresh[2], width)

    def uniforms(self, running: int) -> Tensor:
        """float32 [B]: the random numbers of this step's tokens. Called once a step (never when greedy)."""
        if self._column == UNIFORM_WINDOW:
            keys_B, counts_B = self.sample_key_R[:running], self.count_R[:running]
            self.uniform_RW[:running] = answer_uniforms(self.spec, keys_B, counts_B, UNIFORM_WINDOW)
            self._column = 0
        self._column += 1
        return self.uniform_RW[:running, self._column - 1]

    def append(self, chosen: Chosen) -> None:
        """Add one token to each of the first B rows."""
        running = len(chosen.tokens_B)
        place_B1 = self.count_R[:running, None]
        self.tokens_RN[:running].scatter_(1, place_B1, chosen.tokens_B[:, None])
        self.behavior_RN[:running].scatter_(1, place_B1, chosen.behavior_logprobs_B[:, None])
        self.sampler_RN[:running].scatter_(1, place_B1, chosen.sampler_logprobs_B[:, None])
        self.last_token_R[:running] = chosen.tokens_B
        self.count_R[:running] += 1
        self.length_R[:running] += 1

    def finished(self, running: int, eos_E: Tensor) -> list[int]:
        """Rows, ascending, that just ended with an EOS token or reached the longest answer (synchronizes)."""
        ended_B = (self.last_token_R[:running, None] == eos_E).any(-1)
        ended_B |= self.count_R[:running] >= self.spec.max_new_tokens
        return ended_B.nonzero()[:, 0].tolist()

    def harvest(self, rows: Items[int]) -> list[Answer]:
        """The answers of finished rows (synchronizes)."""
        row_M = torch.tensor(rows, device=self.count_R.device)
        counts = self.count_R[row_M].tolist()
        longest = max(counts)
        columns = [
            state_RN[row_M, :longest].tolist() for state_RN in (self.tokens_RN, self.behavior_RN, self.sampler_RN)
        ]
        return [
            Answer(token_ids=tokens[:count], behavior_logprobs=behavior[:count], sampler_logprobs=sampler[:count])
            for count, tokens, behavior, sampler in zip(counts, *columns, strict=True)
        ]

    def move(self, source_M: Tensor, target_M: Tensor) -> None:
        """Copy rows (int64 [M] each, disjoint) to others."""
        for state_R in (*self._integers(), self.tokens_RN, self.behavior_RN, self.sampler_RN, self.uniform_RW):
            state_R[target_M] = state_R[source_M]

    def _integers(self) -> tuple[Tensor, ...]:
        return self.last_token_R, self.length_R, self.count_R, self.sample_key_R, self.prompt_length_R
