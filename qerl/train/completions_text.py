"""A few answers of a step as text, for people."""

from __future__ import annotations

from collections.abc import Sequence

from qerl.records import Group, Rollout


def completions_text(rollout: Rollout, groups: Sequence[Group], count: int) -> str:
    """The first answers of the first ``count`` groups, then of the next rank, until ``count`` are shown."""
    chosen = [(group, rank) for rank in range(rollout.group_size) for group in groups][:count]
    lines = [f"step {rollout.index + 1}: {len(chosen)} of {len(rollout.completions)} answers"]
    for group, rank in chosen:
        completion, score = group.completions[rank], group.scores[rank]
        reward = "none" if score.reward is None else f"{score.reward:g}"
        lines.append("")
        lines.append(
            f"=== {group.prompt.id} | {score.outcome.value} | reward {reward} | {len(completion.token_ids)} tokens | "
            f"{completion.stop_reason} | expected {group.prompt.answer} | parsed {score.parsed}"
        )
        lines += [f"Q: {group.prompt.question}", f"A: {completion.text}"]
        if score.note:
            lines.append(f"note: {score.note}")
    return "\n".join(lines) + "\n"
