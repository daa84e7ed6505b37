"""Held-out questions before and after training, for the explorer: what was answered, and which questions changed sides."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qerl.metrics.files import damaged_file
from qerl.metrics.run_dir import RunDir

CHANGES = ("gained", "lost", "right", "wrong")
"""How a question moved: right only after, right only before, right in both, wrong in both."""
PAGE_CHARACTERS = 6_000_000
"""Characters of answers that a page may hold; longer ones are cut to the same length each."""
SHORTEST, LONGEST = 300, 4000
"""Characters of one answer that are shown, at least and at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The questions of one or two evaluations.

    Attributes:
        steps: steps after which they were made, first and last; one where there is only one.
        counts: questions by change, or by ``right`` and ``wrong`` where there is one evaluation.
        outcomes: outcomes that occur in the last evaluation.
        rows: one a question, as plain values for the page's script.
    """

    steps: tuple[int, ...]
    counts: dict[str, int]
    outcomes: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]

    def json(self) -> str:
        """The rows, safe inside a script element."""
        text = json.dumps(self.rows, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def read_questions(run: RunDir, outcomes: Sequence[str]) -> Questions | None:
    """The first and the last evaluation of a run; None where it keeps none, or they asked different questions.

    Args:
        run: its folder.
        outcomes: all outcomes, in the order in which they are shown.
    """
    steps = run.evaluation_steps()
    if not steps:
        return None
    chosen: tuple[int, ...] = (steps[0], steps[-1]) if len(steps) > 1 else (steps[0],)
    sides = [run.read_evaluation(step) for step in chosen]
    with damaged_file(run.evaluations_dir, "questions with their answers", KeyError, TypeError, IndexError):
        if len(sides) == 2 and [row["id"] for row in sides[0]] != [row["id"] for row in sides[1]]:
            chosen, sides = chosen[1:], sides[1:]
        limit = max(SHORTEST, min(LONGEST, PAGE_CHARACTERS // max(1, len(sides) * len(sides[0]))))
        rows = tuple(_row(list(pair), limit) for pair in zip(*sides, strict=True))
    counts = Counter(row["change"] for row in rows)
    found = {row["sides"][-1]["outcome"] for row in rows}
    return Questions(
        steps=chosen,
        counts={change: counts[change] for change in CHANGES if counts[change]},
        outcomes=tuple(outcome for outcome in outcomes if outcome in found),
        rows=rows,
    )


def _row(pair: list[Mapping[str, Any]], limit: int) -> dict[str, Any]:
    right = [(row["accuracy"] or 0.0) >= 0.5 for row in pair]
    change = "right" if right[-1] else "wrong"
    if len(pair) == 2 and right[0] != right[1]:
        change = "gained" if right[1] else "lost"
    first = pair[0]
    return {
        "id": str(first["id"]),
        "question": str(first["question"]),
        "reference": str(first["answer"]),
        "change": change,
        "sides": [_side(row, limit) for row in pair],
    }


def _side(row: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """The first sample, and how many of all were right."""
    answers = row["answers"]
    shown = answers[0]
    return {
        "outcome": shown["outcome"],
        "text": shown["text"][:limit],
        "cut": max(0, len(shown["text"]) - limit),
        "parsed": shown["parsed"],
        "tokens": shown["tokens"],
        "note": shown.get("note"),
        "right": sum(answer["outcome"] == "correct" for answer in answers),
        "samples": len(answers),
    }
