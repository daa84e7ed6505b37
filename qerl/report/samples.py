"""Sample answers of an early and a late rollout, from the behavior records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.metrics.behavior import read_behavior
from qerl.metrics.run_dir import RunDir

OUTCOMES = ("correct", "wrong", "unparsable", "truncated", "unscorable")
PER_OUTCOME = 8
"""Answers of each outcome that are shown from one rollout."""
LONGEST_TEXT = 6000
"""Characters of an answer that are shown."""
COLUMNS = (
    "sample_key",
    "question",
    "answer",
    "text",
    "outcome",
    "reward",
    "parsed",
    "note",
    "token_ids",
    "behavior_logprobs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer as the page shows it."""

    question: str
    reference: str
    text: str
    cut_characters: int
    """Characters left out at the end."""
    outcome: str
    reward: float | None
    parsed: str | None
    note: str | None
    num_tokens: int
    mean_logprob: float | None
    """Mean log-prob of its tokens when it was sampled, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSet:
    """Answers of one rollout."""

    when: str
    """``early`` or ``late``."""
    rollout: int
    counts: dict[str, int]
    """All answers of the rollout by outcome, shown or not."""
    samples: list[Sample]


def read_samples(run: RunDir) -> list[SampleSet]:
    """The first rollout, and the last when there are several; empty when no records are kept."""
    paths = run.rollout_paths()
    chosen = [("early", paths[0])] if paths else []
    if len(paths) > 1:
        chosen.append(("late", paths[-1]))
    return [_sample_set(when, index, path) for when, (index, path) in chosen]


def read_kernels(run: RunDir) -> dict[str, str]:
    """Which implementation of each operation ran in the newest rollout that is kept; empty when none is."""
    paths = run.rollout_paths()
    if not paths:
        return {}
    rows = read_behavior(paths[-1][1], ("kernels",))
    return dict(rows[0]["kernels"]) if rows else {}


def _sample_set(when: str, index: int, path: Path) -> SampleSet:
    rows = read_behavior(path, COLUMNS)
    counts = Counter(row["outcome"] for row in rows)
    shown = [row for outcome in OUTCOMES for row in _spread([row for row in rows if row["outcome"] == outcome])]
    shown.sort(key=lambda row: row["sample_key"])
    return SampleSet(
        when=when,
        rollout=index,
        counts={outcome: counts[outcome] for outcome in OUTCOMES if counts[outcome]},
        samples=[_sample(row) for row in shown],
    )


def _spread(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most ``PER_OUTCOME`` rows at even distances, so that they come from different prompts."""
    if len(rows) <= PER_OUTCOME:
        return list(rows)
    return [rows[index * len(rows) // PER_OUTCOME] for index in range(PER_OUTCOME)]


def _sample(row: dict[str, Any]) -> Sample:
    logprobs = row["behavior_logprobs"]
    return Sample(
        question=row["question"],
        reference=row["answer"],
        text=row["text"][:LONGEST_TEXT],
        cut_characters=max(0, len(row["text"]) - LONGEST_TEXT),
        outcome=row["outcome"],
        reward=row["reward"],
        parsed=row["parsed"],
        note=row["note"],
        num_tokens=len(row["token_ids"]),
        mean_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
    )
