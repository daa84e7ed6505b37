"""How long this process has compiled kernels, Triton's and those in CUDA C++: what makes one step longer than its neighbors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any


@dataclass(slots=True)
class _Account:
    """Seconds of all compilers, and who may add to them: the backward pass has a thread of its own."""

    seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


_ACCOUNT = _Account()


class CompileClock:
    """Seconds spent on compiling since the clock was made or last read.

    Args:
        triton: Triton's are counted too, from the first clock on that asks for it.
    """

    def __init__(self, *, triton: bool) -> None:
        if triton:
            _watch_triton()
        self._read = _ACCOUNT.seconds

    def take(self) -> float:
        """Seconds since the last call; those of compilers that ran beside each other are added up."""
        before, self._read = self._read, _ACCOUNT.seconds
        return self._read - before


@contextmanager
def counted() -> Iterator[None]:
    """Count the block as compiling."""
    start = time.perf_counter()
    try:
        yield
    finally:
        _add(time.perf_counter() - start)


def _add(seconds: float) -> None:
    with _ACCOUNT.lock:
        _ACCOUNT.seconds += seconds


class _Listener:
    """What Triton tells of each compilation, passed on to who listened before."""

    def __init__(self, before: Any):
        self._before = before

    def __call__(self, **event: Any) -> None:
        _add(event["times"].total / 1e6)
        if self._before is not None:
            self._before(**event)


def _watch_triton() -> None:
    """Listen to Triton, once a process."""
    if find_spec("triton") is None:
        return
    from triton import knobs

    if not isinstance(knobs.compilation.listener, _Listener):
        knobs.compilation.listener = _Listener(knobs.compilation.listener)
