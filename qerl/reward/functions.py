"""Reward functions other than accuracy: the format pattern, and functions of the user.

A user function is ``module:function`` or ``path/file.py:function`` and is called with keyword lists, one element an
answer (the protocol of TRL's custom reward functions)::

    def shorter(prompts, completions, completion_ids, answer, **kwargs) -> list[float | None]:
        return [-len(ids) / 1000 for ids in completion_ids]

``prompts`` are rendered prompts, ``completions`` answer texts, ``completion_ids`` lists of token ids; every field of
the data row (``question``, ``answer``, ...) follows under its own name. A function without ``**kwargs`` is given only
what it names. None makes an answer unscorable. Functions run in a process of their own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qerl.errors import RewardError
from qerl.records import Completion
from qerl.reward.worker import Reply
from qerl.reward.workers import WorkerPool

MAX_HANGS = 3
"""After so many answers in a row that each fail by themselves, the rest of the batch is not tried."""

RESERVED = ("prompts", "completions", "completion_ids")


@dataclass(frozen=True, slots=True)
class Value:
    """Unweighted value of one answer; None, with a note, when there is none."""

    value: float | None
    note: str | None = None


class IsolatedFunction:
    """A reward function in a worker process.

    The whole batch goes in one call. When that call raises or takes longer than ``timeout_seconds``, the answers are
    tried one at a time, each with that limit, so that the fault is pinned to its sample.

    Args:
        spec: ``module:function`` or ``path/file.py:function``.
        timeout_seconds: limit of one call.
        constants: further keyword arguments of every call.
        name: name in ``Score.parts``; by default that of the function.

    Raises:
        RewardError: when the function cannot be loaded.
    """

    def __init__(
        self, spec: str, timeout_seconds: float, *, constants: dict[str, Any] | None = None, name: str | None = None
    ):
        self.name = name or spec.rpartition(":")[2]
        self.constants = constants or {}
        self.warnings: list[str] = []
        self.timeout_seconds = timeout_seconds
        self._pool = WorkerPool(spec, rewards=True)
        self._pool.start()

    def values(self, completions: Sequence[Completion]) -> list[Value]:
        """One value an answer; see the class for how faults are pinned down."""
        if not completions:
            return []
        reply = self._call(completions)
        if reply.status == "ok":
            return [self._value(element) for element in reply.value]
        if reply.status == "protocol" or len(completions) == 1:
            return [self._failed(reply.error)] * len(completions)
        self._warn(f"the call with {len(completions)} answers failed ({reply.error}); they were scored one at a time")
        return self._one_at_a_time(completions)

    def close(self) -> None:
        """End the worker process."""
        self._pool.close()

    def _call(self, completions: Sequence[Completion]) -> Reply:
        return self._pool.call([call_arguments(completions) | self.constants], self.timeout_seconds)[0]

    def _one_at_a_time(self, completions: Sequence[Completion]) -> list[Value]:
        values: list[Value] = []
        failed_in_a_row = 0
        for completion in completions:
            if failed_in_a_row >= MAX_HANGS:
                values.append(self._failed(f"not tried after {MAX_HANGS} failures in a row"))
                continue
            reply = self._call([completion])
            failed_in_a_row = 0 if reply.status == "ok" else failed_in_a_row + 1
            values.append(self._value(reply.value[0]) if reply.status == "ok" else self._failed(reply.error))
        return values

    def _value(self, element: float | str | None) -> Value:
        if isinstance(element, str):
            return self._failed(element)
        return self._failed("returned None") if element is None else Value(element)

    def _failed(self, why: str) -> Value:
        return Value(None, f"reward function {self.name}: {why}")

    def _warn(self, text: str) -> None:
        self.warnings.append(f"reward function {self.name}: {text}")


def format_function(pattern: str, timeout_seconds: float) -> IsolatedFunction:
    """``format``: 1 where the pattern is found anywhere in the answer (dot matches newline), else 0.

    A regular expression can take exponential time, so it runs in a worker as well.

    Raises:
        RewardError: when the pattern is not a regular expression.
    """
    try:
        re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise RewardError(
            f"reward.format_pattern is not a regular expression: {error}",
            got=repr(pattern),
            remedy="In YAML, quote it with single quotes, so that backslashes stay as they are",
        ) from error
    return IsolatedFunction(
        "qerl.reward.shaping:pattern_found", timeout_seconds, constants={"pattern": pattern}, name="format"
    )


def call_arguments(completions: Sequence[Completion]) -> dict[str, list[Any]]:
    """Keyword arguments of one call: the reserved lists and one list for every field that any row has."""
    keys = dict.fromkeys(key for completion in completions for key in completion.prompt.row if key not in RESERVED)
    columns = {key: [completion.prompt.row.get(key) for completion in completions] for key in keys}
    columns.setdefault("question", [completion.prompt.question for completion in completions])
    columns.setdefault("answer", [completion.prompt.answer for completion in completions])
    return columns | {
        "prompts": [completion.prompt.text for completion in completions],
        "completions": [completion.text for completion in completions],
        "completion_ids": [list(completion.token_ids) for completion in completions],
    }
