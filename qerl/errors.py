"""Errors a user can cause, and the one place where their wording is composed.

Every error says four things: what failed, what was got, what was expected and what to do about it.
The command line prints the message alone (no traceback) and exits with ``QerlError.exit_code``.
Broken invariants of the program itself are ``assert`` statements, not members of this family.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QerlError(Exception):
    """Base of all user-facing errors.

    Args:
        what: what failed, one sentence without a final period.
        got: the offending value, shown as it was given.
        expected: what would have been accepted.
        remedy: what the user can do next.
    """

    exit_code = 2

    def __init__(self, what: str, *, got: object = None, expected: str | None = None, remedy: str | None = None):
        self.what = what
        self.got = got
        self.expected = expected
        self.remedy = remedy
        parts = [what]
        if got is not None:
            parts.append(f"got {got}")
        if expected is not None:
            parts.append(f"expected {expected}")
        message = "; ".join(parts)
        super().__init__(f"{message}. {remedy}" if remedy else message)


class ConfigError(QerlError, ValueError):
    """A setting is unknown, has the wrong type, or contradicts another one."""


class CheckpointError(QerlError, ValueError):
    """A model folder, weight file or adapter cannot be read, or is of a kind that is not supported."""


class DataError(QerlError, ValueError):
    """A data set is missing, empty, or holds a row that cannot be used."""


class RunFolderError(QerlError, ValueError):
    """A run folder already holds a run, or does not hold what was asked of it."""


class RewardError(QerlError, ValueError):
    """A reward function cannot be found or does not follow the reward protocol."""


class FormatError(QerlError, ValueError):
    """A tensor cannot be quantized, or packed storage does not fit its format."""


class KernelUnavailableError(QerlError, RuntimeError):
    """A kernel implementation was asked for by name and cannot run here."""


class LayoutGateError(QerlError, RuntimeError):
    """The chosen kernel and the explicitly dequantized product disagree (checked before step 0)."""


class MemoryBudgetError(QerlError, RuntimeError):
    """The plan does not fit the memory it was given."""


class DeviceMemoryError(QerlError, RuntimeError):
    """A GPU, or the share of it that a run was given, had not the memory that was asked for."""

    crowded = False
    """Whether other processes had what was missing: alone on the GPU the run may fit."""


class OutputError(QerlError, RuntimeError):
    """A file or folder cannot be written: a full disk, no permission, a path that is taken or too long."""


class MissingDependencyError(QerlError, ImportError):
    """An optional package is needed for what was asked."""


class TrainingError(QerlError, RuntimeError):
    """Training cannot go on: non-finite loss or gradient, or no usable sample."""


class RunStopped(KeyboardInterrupt):
    """A signal ended a run before its last step. Not a mistake, so not a ``QerlError``: an interrupt that says how to go on.

    Args:
        message: what was kept, and what the user can do next.
        signal_number: one of ``signals.STOPS``.
    """

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.exit_code = 128 + signal_number
        """As shells have it: 130 after SIGINT (Ctrl-C), 143 after SIGTERM, 129 after SIGHUP."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to ``name``, or None when nothing is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None
