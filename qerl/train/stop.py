"""Stopping a run without losing its step: the first Ctrl-C ends it after the running step, the second at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from qerl.signals import STOPS, follows_an_interrupt

AFTER_STEP = "{name}: stopping after this step, which will be saved; again to stop at once and lose it"
AT_ONCE = "{name} again: stopping at once"


class StopRequest:
    """Context manager that turns the first of the signals ``STOPS`` into a flag. Off the main thread it does
    nothing, and a SIGHUP that is ignored (nohup) stays so.

    Args:
        say: called within the signal handler with what the signal does, in words.

    Attributes:
        signal_number: the signal that came last; None before one has come.
        at_once: whether a second one came, which raises KeyboardInterrupt.
    """

    def __init__(self, say: Callable[[str], None]):
        self.signal_number: int | None = None
        self.at_once = False
        self._say = say
        self._previous: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        """Whether the run is to end after the running step."""
        return self.signal_number is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in STOPS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.at_once, self.signal_number = self.requested, number
        self._say((AT_ONCE if self.at_once else AFTER_STEP).format(name=signal.Signals(number).name))
        if self.at_once:
            raise KeyboardInterrupt

    def swallowed_by(self, error: BaseException) -> bool:
        """Whether ``error`` is what compiled code made of the second signal's KeyboardInterrupt; see :class:`qerl.signals.Signals`."""
        return self.at_once and not follows_an_interrupt(error)


class Deadline:
    """Says when to stop so that a time limit is kept: before a step that may not fit.

    The longest stretch between two questions so far (a step with its evaluation, or the set-up before the first) is taken as
    what the next one may need.

    Args:
        seconds: time from now on; None is without a limit.
        clock: seconds, monotonic.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._previous = clock()
        self._end = None if seconds is None else self._previous + seconds
        self._longest = 0.0

    def reached(self) -> bool:
        """Asked at every step boundary: whether another stretch like the longest so far would end too late."""
        now = self._clock()
        self._longest, self._previous = max(self._longest, now - self._previous), now
        return self._end is not None and now + self._longest > self._end

    def restart(self) -> None:
        """Forget the stretches so far: what comes next takes its own time."""
        self._previous, self._longest = self._clock(), 0.0

    def seconds_left(self) -> float | None:
        """Seconds until the limit (negative after it); None without one."""
        return None if self._end is None else self._end - self._clock()
