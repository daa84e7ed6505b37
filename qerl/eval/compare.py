"""Two evaluations of the same questions against each other: the paired difference, and which questions changed sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qerl.errors import DataError
from qerl.eval.evaluate import compare
from qerl.eval.files import StoredEvaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Discordant:
    """A question that one of two evaluations got right and the other did not (by a share of at least one half)."""

    id: str
    question: str
    answer: str
    """The reference."""
    first: str | None
    """What was found in the first sample of the first evaluation."""
    second: str | None
    gained: bool
    """Right in the second only; otherwise lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """``second`` against ``first``; accuracies as fractions."""

    suite: str | None
    first: str
    second: str
    first_accuracy: float
    second_accuracy: float
    difference: float
    """Mean over the questions that both could score."""
    low: float
    high: float
    """Paired bootstrap over questions (``intervals.paired_difference``)."""
    confidence: float
    gained: int
    lost: int
    p_value: float
    """Two-sided exact McNemar test of ``gained`` against ``lost``."""
    count: int
    """Questions that both could score."""
    protocol_differences: tuple[str, ...]
    """In words; empty where both were measured the same way, as far as is known."""
    discordant: tuple[Discordant, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def line(self) -> str:
        """The difference in one line."""
        name = f"{self.suite}, " if self.suite else ""
        ends = f"[{100 * self.low:+.1f}, {100 * self.high:+.1f}]"
        return (
            f"{name}{self.second} - {self.first}: {100 * self.difference:+.1f} points {ends}, "
            f"{self.gained} gained, {self.lost} lost, McNemar exact p = {self.p_value:.3g}"
        )

    def lines(self, most: int = 20) -> list[str]:
        """For people: the difference, its certainty, and up to ``most`` of the questions that changed sides."""
        name = f"{self.suite}: " if self.suite else ""
        ends = f"{self.confidence:.0%} interval {100 * self.low:+.1f} to {100 * self.high:+.1f}"
        lines = [
            f"{name}{self.second} against {self.first}",
            f"  accuracy    {self.first_accuracy:.1%} -> {self.second_accuracy:.1%} ({self.count} questions that both could score)",
            f"  difference  {100 * self.difference:+.1f} points ({ends}, paired bootstrap)",
            f"  discordant  {self.gained} gained, {self.lost} lost, McNemar exact p = {self.p_value:.3g}",
        ]
        lines += [f"  warning     {text}" for text in self.protocol_differences]
        for row in self.discordant[:most]:
            sign = "+" if row.gained else "-"
            found = f"{_short(row.first)} -> {_short(row.second)}"
            lines.append(f"    {sign} {row.id}: {found}, reference {_short(row.answer)}")
        if len(self.discordant) > most > 0:
            lines.append(f"    … and {len(self.discordant) - most} more")
        return lines


def compare_stored(
    first: StoredEvaluation, second: StoredEvaluation, *, confidence: float = 0.95, seed: int = 0
) -> Comparison:
    """``second`` against ``first``, question by question; their order may differ.

    Raises:
        DataError: they are not of the same questions, or none could be scored by both.
    """
    before, after = first.rows, _in_order_of(first.rows, second.rows)
    values = compare(before, after, confidence=confidence, seed=seed)
    pairs = [
        (a, b) for a, b in zip(before, after, strict=True) if a["accuracy"] is not None and b["accuracy"] is not None
    ]
    return Comparison(
        suite=first.suite or second.suite,
        first=first.policy,
        second=second.policy,
        first_accuracy=sum(a["accuracy"] for a, _ in pairs) / len(pairs),
        second_accuracy=sum(b["accuracy"] for _, b in pairs) / len(pairs),
        difference=float(values["difference"]),
        low=float(values["low"]),
        high=float(values["high"]),
        confidence=confidence,
        gained=int(values["gained"]),
        lost=int(values["lost"]),
        p_value=float(values["p_value"]),
        count=int(values["count"]),
        protocol_differences=_protocol_differences(first, second),
        discordant=tuple(_discordant(a, b) for a, b in pairs if (a["accuracy"] >= 0.5) != (b["accuracy"] >= 0.5)),
    )


def pair_up(
    firsts: Sequence[StoredEvaluation], seconds: Sequence[StoredEvaluation]
) -> list[tuple[StoredEvaluation, StoredEvaluation]]:
    """Which evaluations of two places belong together: one against one, or by suite, and by policy where a suite has several.

    Raises:
        DataError: nothing belongs together.
    """
    if len(firsts) == len(seconds) == 1:
        return [(firsts[0], seconds[0])]
    pairs = []
    for first in firsts:
        same_suite = [second for second in seconds if second.suite == first.suite]
        same_policy = [second for second in same_suite if second.policy == first.policy]
        alone = len(same_suite) == 1 and sum(other.suite == first.suite for other in firsts) == 1
        if alone or same_policy:
            pairs.append((first, same_suite[0] if alone else same_policy[0]))
    if not pairs:
        names = [
            " and ".join(f"{e.suite or 'a suite without a name'} ({e.policy})" for e in side)
            for side in (firsts, seconds)
        ]
        raise DataError(
            "no two of these evaluations belong together",
            got=f"{names[0]}; {names[1]}",
            expected="the same suite on both sides, under one policy each or policies of the same name",
            remedy="Name two parquet files",
        )
    return pairs


def _in_order_of(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    by_id = {row["id"]: row for row in second}
    missing = [row["id"] for row in first if row["id"] not in by_id]
    if missing or len(first) != len(second) or len(by_id) != len(second):
        raise DataError(
            "two evaluations can be compared only on the same questions",
            got=f"{len(first)} and {len(second)} questions, {len(first) - len(missing)} of them the same",
            remedy="Evaluate both with the same --data and --limit",
        )
    changed = [row["id"] for row in first if row["question"] != by_id[row["id"]]["question"]]
    if changed:
        raise DataError(
            "a question of the same id has another text",
            got=changed[0],
            expected="two evaluations of the same data set",
        )
    return [by_id[row["id"]] for row in first]


def _protocol_differences(first: StoredEvaluation, second: StoredEvaluation) -> tuple[str, ...]:
    known = [key for key in first.protocol if key in second.protocol]
    return tuple(
        f"{key.replace('_', ' ')} differs: {first.protocol[key]} and {second.protocol[key]}"
        for key in known
        if first.protocol[key] != second.protocol[key]
    )


def _discordant(first: Mapping[str, Any], second: Mapping[str, Any]) -> Discordant:
    return Discordant(
        id=str(first["id"]),
        question=str(first["question"]),
        answer=str(first["answer"]),
        first=first["answers"][0]["parsed"],
        second=second["answers"][0]["parsed"],
        gained=second["accuracy"] >= 0.5,
    )


def _short(text: str | None) -> str:
    return "nothing" if text is None else text if len(text) <= 40 else f"{text[:39]}…"
