"""Ctrl-C, SIGTERM and a terminal that closes end a command with an exit code of its own, also where compiled code drops what a signal
handler raises."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command in words: Ctrl-C, a request to end, a terminal that closes."""


class Signalled(KeyboardInterrupt):
    """A signal came and the command ends.

    Args:
        number: one of ``STOPS``.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class Signals:
    """Context manager in which each of ``STOPS`` raises :class:`Signalled` in the main thread, unless what runs has handlers of its
    own. Off the main thread it does nothing, and a signal that is ignored (a job in the background, nohup) stays so.

    A handler runs between two byte codes of whatever Python runs then, which may be a method that torch or numpy called: they
    clear what it raised and report an error of their own, such as ``ValueError: could not determine the shape``.
    :meth:`swallowed_by` knows such an error.

    Attributes:
        number: the signal that came last; None before one has come.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in STOPS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def swallowed_by(self, error: BaseException) -> bool:
        """Whether a signal came whose exception ``error`` stands for; not so when it arose while that exception was handled (a full
        disk during the clearing up, say)."""
        return self.number is not None and not follows_an_interrupt(error)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        raise Signalled(number)


def is_ctrl_c(error: KeyboardInterrupt) -> bool:
    """Whether an interrupt is Python's own, or comes of SIGINT: the user's wish, where other signals end the command."""
    return not isinstance(error, Signalled) or error.number == signal.SIGINT


def follows_an_interrupt(error: BaseException) -> bool:
    """Whether an interrupt is among what ``error`` was raised from, or in the handling of."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, KeyboardInterrupt):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
