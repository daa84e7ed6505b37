"""Stopping a run without losing its step: the first Ctrl-C ends it after the running step, the second at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class StopRequest:
    """Context manager that turns the first SIGINT or SIGTERM into a flag. Off the main thread it does nothing.

    Args:
        on_request: called once, when the first signal arrives.
    """

    def __init__(self, on_request: Callable[[], None]):
        self.requested = False
        self._on_request = on_request
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._on_request()
