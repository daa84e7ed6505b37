"""Time of stretches of a call, by the device's clock where there is one: the host does not wait for it."""

from __future__ import annotations

import time
from types import TracebackType

import torch


class Stopwatch:
    """Adds up the time of the stretches that it is entered for.

    Args:
        device: on CUDA the time is that of the current stream.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._seconds = 0.0

    def __enter__(self) -> None:
        self._mark(-1.0)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mark(1.0)

    def _mark(self, sign: float) -> None:
        if self._cuda:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._seconds += sign * time.perf_counter()

    def seconds(self) -> float:
        """So far; waits for the device."""
        if self._events:
            self._events[-1].synchronize()
        pairs = zip(self._events[::2], self._events[1::2], strict=True)
        return self._seconds + sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3
