"""What each row of the decode batch knows, on the device, and the window through which the host sees what the rows chose.

Shape legend: R rows of the decode batch, B running rows (the first B of R), M sequences named in one call, W steps of a window,
U answer positions whose random numbers are drawn at once, E tokens that end an answer.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qerl.kernels import philox
from qerl.kernels.sampling import advance_rows, keyed_uniforms
from qerl.records import SamplingSpec
from qerl.rollout.sampler import Chosen, answer_uniforms
from qerl.rollout.scheduler import Start
from qerl.rollout.sequence import Sequence

UNIFORM_WINDOW = 32
"""Answer positions whose random numbers are drawn in one call on the CPU; one call a step would cost as much as sampling."""


LOOKS = 2
"""Looks of the host that may be under way at once."""


def on_device(values: Items[Any], device: torch.device) -> Tensor:
    """int64 tensor of integers; on CUDA the host does not wait until the device has them."""
    tensor = torch.tensor(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def all_on_device(parts: Items[np.ndarray], device: torch.device) -> list[Tensor]:
    """int64 tensors of arrays of integers, in one copy that the host does not wait for on CUDA. Each begins at a multiple of 16 bytes, since
    Triton tells kernels apart by that."""
    starts = [0, *accumulate(-(-part.size // 2) * 2 for part in parts)]
    joined = torch.empty(starts[-1], dtype=torch.int64, pin_memory=device.type != "cpu")
    values = joined.numpy()
    for start, part in zip(starts, parts, strict=False):
        values[start : start + part.size] = part
    there = joined.to(device, non_blocking=True)
    return [there[start : start + part.size] for start, part in zip(starts, parts, strict=False)]


class Look:
    """A window on its way to the host.

    Args:
        window_3WB: int32 in the host's memory: tokens, and the bits of the two log-probs.
        event: when they are there; None if they are.
    """

    def __init__(self, window_3WB: Tensor, event: torch.cuda.Event | None):
        self._window_3WB, self._event = window_3WB, event

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """(int32 [W, B] tokens, -1 where a row was not alive, float32 [2, W, B] log-probs); waits for them."""
        if self._event is not None:
            self._event.synchronize()
        window_3WB = self._window_3WB.numpy()
        return window_3WB[0], window_3WB[1:].view(np.float32)


class RowState:
    """Tensors that are updated in place: a captured step reads and writes the same memory at every replay.

    A row's sequence has its prompt and ``count`` answer tokens. Its next pass feeds ``last_token``, whose keys and values belong
    at position ``length`` of the cache; at the start that is the last known token. A row that is not ``alive`` changes no more.

    Args:
        rows: R.
        window: W, most steps between two looks of the host.
        eos_ids: E.
        device: where the tensors lie.
    """

    def __init__(self, rows: int, window: int, eos_ids: Items[int], device: torch.device):
        def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # One tensor, so that starting and moving rows is one operation.
        self._books = integers(7, rows)
        (
            self.last_token_R,
            self.length_R,
            self.count_R,
            self.limit_R,
            self.sample_key_R,
            self.prompt_length_R,
            self.alive_R,
        ) = self._books
        self.eos_E = torch.tensor(list(eos_ids), dtype=torch.int64, device=device)
        self.cursor_1 = integers(1)
        self._window_3WR = integers(3, window, rows, dtype=torch.int32)
        self.tokens_WR = self._window_3WR[0]
        self.logprobs_2WR = self._window_3WR[1:].view(torch.float32)
        pinned = self._window_3WR.is_cuda
        self._host_3WR = [
            torch.empty_like(self._window_3WR, device="cpu", pin_memory=pinned) for _ in range(LOOKS * pinned)
        ]
        self._turn = 0
        self.key_3 = integers(3)
        """Key words of seed and stream, and the rollout: the part of the random numbers' key that all rows share."""
        self.temperature_1 = torch.ones(1, dtype=torch.float64, device=device)
        self.uniform_RU = torch.zeros(rows, UNIFORM_WINDOW, device=device)
        self._column = UNIFORM_WINDOW
        self.spec = SamplingSpec()

    def begin(self, spec: SamplingSpec) -> None:
        """Prepare for a call: its sampling settings, and no row alive."""
        self.spec = spec
        self._column = UNIFORM_WINDOW
        self.key_3.copy_(torch.tensor([*philox.stream_key(spec.seed, spec.stream), spec.rollout]))
        self.temperature_1.fill_(spec.temperature)
        self.cursor_1.zero_()
        self._books.zero_()

    def start(self, rows: Items[int], sequences: Items[Sequence], last_tokens: Items[int]) -> None:
        """Put sequences whose known tokens (all but the last) are in the cache into rows."""
        row_M = on_device(rows, self._books.device)
        columns = (
            last_tokens,
            [sequence.known_length - 1 for sequence in sequences],
            [sequence.answered for sequence in sequences],
            [sequence.limit or self.spec.max_new_tokens for sequence in sequences],
            [sequence.sample_key for sequence in sequences],
            [sequence.prompt_length for sequence in sequences],
            [1] * len(rows),
        )
        fresh = on_device(columns, row_M.device)
        self._books[:, row_M] = fresh
        if self._column < UNIFORM_WINDOW and self.spec.temperature > 0:
            width = UNIFORM_WINDOW - self._column
            self.uniform_RU[row_M, self._column :] = answer_uniforms(self.spec, fresh[4], fresh[2], width)

    def park(self, starts: Items[Start]) -> None:
        """Let the rows of sequences that are still being computed, and are not alive, go on writing where their first token will."""
        rows = [row for start in starts for row in start.rows]
        lengths = [sequence.known_length - 1 for start in starts for sequence in start.sequences]
        self.length_R[on_device(rows, self.length_R.device)] = on_device(lengths, self.length_R.device)

    def clear(self, rows: Items[int]) -> None:
        """Make rows ones that do not run."""
        self._books[:, on_device(rows, self._books.device)] = 0

    def uniforms(self, running: int) -> Tensor | None:
        """float32 [B]: the random numbers of this step's tokens, or None when greedy. Called once a step."""
        if self.spec.temperature == 0:
            return None
        if self.key_3.device.type != "cpu":
            return keyed_uniforms(self.key_3, self.count_R[:running], self.sample_key_R[:running])
        if self._column == UNIFORM_WINDOW:
            keys_B, counts_B = self.sample_key_R[:running], self.count_R[:running]
            self.uniform_RU[:running] = answer_uniforms(self.spec, keys_B, counts_B, UNIFORM_WINDOW)
            self._column = 0
        self._column += 1
        return self.uniform_RU[:running, self._column - 1]

    def append(self, chosen: Chosen) -> None:
        """Add one token to each of the first B rows that is alive."""
        advance_rows(
            chosen.tokens_B,
            chosen.behavior_logprobs_B,
            chosen.sampler_logprobs_B,
            last_token_R=self.last_token_R,
            length_R=self.length_R,
            count_R=self.count_R,
            limit_R=self.limit_R,
            alive_R=self.alive_R,
            cursor_1=self.cursor_1,
            eos_E=self.eos_E,
            tokens_WR=self.tokens_WR,
            logprobs_2WR=self.logprobs_2WR,
        )

    def close_window(self, steps: int, running: int) -> Look:
        """What the last ``steps`` steps chose, on its way to the host, and a new window. At most ``LOOKS`` are kept unread."""
        if self._window_3WR.is_cuda:
            self._turn = (self._turn + 1) % LOOKS
            host_3WR, event = self._host_3WR[self._turn], torch.cuda.Event()
            host_3WR.copy_(self._window_3WR, non_blocking=True)
            event.record()
        else:
            host_3WR, event = self._window_3WR.clone(), None
        self.cursor_1.zero_()
        return Look(host_3WR[:, :steps, :running], event)

    def move(self, source_M: Tensor, target_M: Tensor) -> None:
        """Copy rows (int64 [M] each, disjoint) to others."""
        self._books[:, target_M] = self._books[:, source_M]
        if self._books.device.type == "cpu":
            self.uniform_RU[target_M] = self.uniform_RU[source_M]
