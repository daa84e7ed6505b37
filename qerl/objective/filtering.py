"""What kind of signal each group carries.

Kinds go by accuracy (the outcome), never by shaped reward: a length penalty alone would otherwise turn a group of equal
answers into one with differences. Dynamic sampling (``train.collect``) keeps the informative groups of this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from qerl.records import Group, Outcome


class GroupKind(StrEnum):
    """The five kinds; exactly one holds."""

    MIXED = "mixed"
    """At least one correct and one incorrect answer: the only kind with a learning signal from accuracy."""
    ALL_CORRECT = "all_correct"
    ALL_WRONG = "all_wrong"
    """No answer is correct, and at least one of them ended by itself."""
    ALL_TRUNCATED = "all_truncated"
    """Every scored answer was cut at the length limit, none correct."""
    UNSCORABLE = "unscorable"
    """No answer could be scored."""


def group_kind(group: Group) -> GroupKind:
    """Kind of one group; unscorable answers are left out unless there is nothing else."""
    outcomes = [score.outcome for score in group.scores if score.outcome is not Outcome.UNSCORABLE]
    if not outcomes:
        return GroupKind.UNSCORABLE
    correct = sum(outcome is Outcome.CORRECT for outcome in outcomes)
    if correct == len(outcomes):
        return GroupKind.ALL_CORRECT
    if correct:
        return GroupKind.MIXED
    if all(outcome is Outcome.TRUNCATED for outcome in outcomes):
        return GroupKind.ALL_TRUNCATED
    return GroupKind.ALL_WRONG


def is_informative(group: Group, *, mask_truncated: bool) -> bool:
    """Whether a group teaches: both correct and incorrect answers, and one of them in the loss.

    With ``mask_truncated`` a mixed group all of whose scored answers were cut off has nothing in the loss.
    """
    scored = [
        completion.stop_reason
        for completion, score in zip(group.completions, group.scores, strict=True)
        if score.outcome is not Outcome.UNSCORABLE
    ]
    return group_kind(group) is GroupKind.MIXED and not (mask_truncated and set(scored) == {"length"})


def kind_fractions(groups: Sequence[Group]) -> dict[GroupKind, float]:
    """Share of each kind among the groups (sums to 1)."""
    kinds = [group_kind(group) for group in groups]
    return {kind: kinds.count(kind) / len(kinds) for kind in GroupKind}
