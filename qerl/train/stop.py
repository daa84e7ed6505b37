"""Stopping a run without losing its step: the first Ctrl-C ends it after the running step, the second at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from qerl.signals import SignalHandlers

AFTER_STEP = "{name}: stopping after this step, which will be saved; a second signal stops at once and loses {lost}"
AT_ONCE = "{name} again: stopping at once"


class StopRequest(SignalHandlers):
    """The first of ``STOPS`` is a flag, and the second raises KeyboardInterrupt. Of signals that are ignored, SIGHUP alone (nohup) stays so.

    Args:
        say: called within the signal handler with what the signal does, in words.
        lost: what a second signal loses, in words; called within the signal handler.
    """

    taken_anyway = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, say: Callable[[str], None], lost: Callable[[], str] = lambda: "it"):
        super().__init__()
        self._say, self._lost = say, lost

    @property
    def requested(self) -> bool:
        """Whether the run is to end after the running step."""
        return self.signal_number is not None

    def handle(self, number: int, again: bool) -> None:
        """Say what comes of it; raise at the second."""
        name = signal.Signals(number).name
        self._say(AT_ONCE.format(name=name) if again else AFTER_STEP.format(name=name, lost=self._lost()))
        if again:
            raise KeyboardInterrupt


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
