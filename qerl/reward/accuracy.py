"""The accuracy checker: what was found in each answer, and whether it equals the reference."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass

from qerl.errors import MissingDependencyError
from qerl.records import Completion
from qerl.reward.math_answer import find_answer, is_symbolic, quick_equal, reference_value
from qerl.reward.workers import WorkerPool

MAX_WORKERS = 4
MEMORY_BYTES = 4 * 2**30
"""Address space of a symbolic comparison: an absurd power must fail, not exhaust the machine."""

MAX_CACHE = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the checker says of one answer.

    Attributes:
        parsed: the answer found in the text; None when there is none (unparsable).
        correct: None when it could not be decided.
        note: why it could not.
    """

    parsed: str | None
    correct: bool | None
    note: str | None = None


class AccuracyChecker:
    """Plain numbers and words are compared at once; the rest goes to math-verify, with a time limit a comparison.

    Args:
        timeout_seconds: limit of one symbolic comparison.

    Raises:
        MissingDependencyError: when math-verify is not installed.
    """

    def __init__(self, timeout_seconds: float):
        if importlib.util.find_spec("math_verify") is None:
            raise MissingDependencyError(
                "the accuracy reward needs the package math-verify", remedy="Install it: pip install math-verify"
            )
        self.timeout_seconds = timeout_seconds
        self._pool = WorkerPool(
            "qerl.reward.symbolic:compare", size=min(MAX_WORKERS, os.cpu_count() or 1), memory_bytes=MEMORY_BYTES
        )
        self._known: dict[tuple[str, str | None], Judgement] = {}

    def warm_up(self) -> None:
        """Begin to start what a first symbolic comparison would wait for, which takes seconds."""
        self._pool.warm_up()

    def judge(self, completions: Sequence[Completion]) -> list[Judgement]:
        """One judgement an answer, in order."""
        results: dict[int, Judgement] = {}
        open_pairs: dict[tuple[str, str | None], list[int]] = {}
        for index, completion in enumerate(completions):
            reference, found = reference_value(completion.prompt.answer), find_answer(completion.text)
            quick = _judge_quickly(reference, found)
            if quick is not None:
                results[index] = quick
            else:
                open_pairs.setdefault((reference, found), []).append(index)
        self._compare([pair for pair in open_pairs if pair not in self._known])
        for pair, indices in open_pairs.items():
            results |= dict.fromkeys(indices, self._known[pair])
        if len(self._known) > MAX_CACHE:
            self._known.clear()
        return [results[index] for index in range(len(completions))]

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def _compare(self, pairs: list[tuple[str, str | None]]) -> None:
        calls = [{"reference": reference, "found": found} for reference, found in pairs]
        for (reference, found), reply in zip(pairs, self._pool.call(calls, self.timeout_seconds), strict=True):
            if reply.status != "ok":
                note = f"comparing {found!r} with the reference answer {reference!r}: {reply.error}"
                verdict = Judgement(parsed=found, correct=None, note=note)
            elif reply.value == "reference unreadable":
                verdict = Judgement(parsed=found, correct=None, note=_unreadable(reference))
            else:
                verdict = Judgement(parsed=found, correct=reply.value == "equal")
            self._known[reference, found] = verdict


def _judge_quickly(reference: str, found: str | None) -> Judgement | None:
    """The judgement, where no symbolic comparison is needed."""
    if not any(character.isalnum() for character in reference):
        return Judgement(parsed=found, correct=None, note=_unreadable(reference))
    if found is None:
        return None if is_symbolic(reference) else Judgement(parsed=None, correct=False)
    equal = quick_equal(reference, found)
    return None if equal is None else Judgement(parsed=found, correct=equal)


def _unreadable(reference: str) -> str:
    return f"the reference answer {reference!r} cannot be parsed"
