"""Benchmarks that are known by name: where the hub has them, and which of its fields hold question and answer.

A folder of the same name under ``$QERL_DATA`` comes first (``data.tasks``); its rows have the fields ``question`` and
``answer``, and so have those made here. A name says which questions are meant, never how they are asked: prompt, temperature
and samples are the evaluation's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """One benchmark.

    Attributes:
        about: what it asks, in a few words.
        hub: ``owner/name`` or ``owner/name/config`` on the hub; None where there is no copy with one question a row.
        split: the split that is measured there.
        question: field that holds the question.
        answer: field that holds the reference.
    """

    about: str
    hub: str | None = None
    split: str = "test"
    question: str = "question"
    answer: str = "answer"

    def row(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """A row of the hub with ``question`` and ``answer`` as text, its other fields kept.

        Raises:
            DataError: it lacks a field.
        """
        for key in (self.question, self.answer):
            if key not in fields:
                raise DataError(
                    f"the hub's copy in {self.hub} has changed: a row has no field {key!r}",
                    got=", ".join(fields),
                    remedy="Put the questions under $QERL_DATA, or name the data set with data.question_key and data.answer_key",
                )
        return {**fields, "question": fields[self.question], "answer": str(fields[self.answer])}


SUITES: dict[str, Suite] = {
    "gsm8k": Suite(about="grade-school word problems, 1319", hub="openai/gsm8k/main"),
    "math500": Suite(about="competition mathematics, 500", hub="HuggingFaceH4/MATH-500", question="problem"),
    "aime24": Suite(about="AIME 2024, 30", hub="HuggingFaceH4/aime_2024", split="train", question="problem"),
    "aime25": Suite(about="AIME 2025, 30", hub="math-ai/aime25", question="problem"),
    "amc23": Suite(about="AMC 12 2023, 40", hub="math-ai/amc23"),
    "svamp": Suite(
        about="one-step word problems, varied", hub="ChilleD/SVAMP", question="question_concat", answer="Answer"
    ),
    "asdiv": Suite(about="elementary word problems of many kinds"),
    "mawps": Suite(about="elementary word problems"),
    "multiarith": Suite(about="two-step word problems", hub="ChilleD/MultiArith", answer="final_ans"),
    "gsm_plus": Suite(about="GSM8K test questions, perturbed in eight ways", hub="qintongli/GSM-Plus"),
    "gsm_plus_mini": Suite(about="a sample of gsm_plus", hub="qintongli/GSM-Plus", split="testmini"),
}
"""Name -> benchmark."""


def split_list(text: str) -> tuple[str, ...]:
    """``gsm8k,math500`` as its names; each may be a name or a path, with ``:SPLIT``. A path that exists is one, commas or not."""
    if Path(text).exists():
        return (text,)
    return tuple(dict.fromkeys(part for part in (item.strip() for item in text.split(",")) if part))
