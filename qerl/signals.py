"""Ctrl-C, SIGTERM and a terminal that closes end a command with an exit code of its own, also where compiled code drops what a signal
handler raises."""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from types import FrameType, TracebackType
from typing import Any, Self

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


class SignalHandlers(ABC):
    """Context manager in which ``handle`` is what each of ``STOPS`` does in the main thread; then what was there before is back. Off the
    main thread it does nothing, and a signal that is ignored (a job in the background, nohup) stays so unless it is in ``taken_anyway``.

    A handler runs between two byte codes of whatever Python runs then, which may be a method that torch or numpy called: they
    clear what it raised and report an error of their own, such as ``ValueError: could not determine the shape``.
    :meth:`swallowed_by` knows such an error.

    Attributes:
        signal_number: the signal that came last; None before one has come.
        raised: whether ``handle`` has raised.
    """

    taken_anyway: tuple[signal.Signals, ...] = ()

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.raised = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOPS:
                if number in self.taken_anyway or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._called)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None: a handler that compiled code had set, which cannot be set from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def swallowed_by(self, error: BaseException) -> bool:
        """Whether ``error`` stands for what ``handle`` raised; not so when it arose while that was handled (a full disk during the
        clearing up, say)."""
        return self.raised and not follows_an_interrupt(error)

    @abstractmethod
    def handle(self, number: int, again: bool) -> None:
        """What a signal does, the first or another one; may raise KeyboardInterrupt."""

    def _called(self, number: int, frame: FrameType | None) -> None:
        again, self.signal_number = self.signal_number is not None, number
        try:
            self.handle(number, again)
        except KeyboardInterrupt:
            self.raised = True
            raise


class Signals(SignalHandlers):
    """Each of ``STOPS`` raises :class:`Signalled`."""

    def handle(self, number: int, again: bool) -> None:
        """End the command."""
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
