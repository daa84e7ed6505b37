"""The groups of one step: one draw of prompts, or as many as dynamic sampling needs (DAPO, arXiv 2503.14476, section 3.2).

Dynamic sampling goes on drawing until ``rollout.prompts_per_step`` groups are informative, and trains on those alone, in
the order in which they were drawn. All rounds of a step share its rollout index, so its noise; sample keys go on
counting, so no two answers share their random numbers. A refill draws as many prompts as the share of informative groups
so far says are needed, at most as many as the first round. When the rounds are used up the batch is what there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from qerl.config.schema import Config
from qerl.objective.filtering import is_informative
from qerl.records import Group, Rollout

Draw = Callable[[int, int], tuple[Rollout, Sequence[Group]]]
"""(number of prompts, first sample key) -> their answers, and the same by group with scores."""

_LARGEST = ("kv_bytes", "peak_rows")
"""Engine counters of which a step has the largest of its rounds; the others add up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Everything that was sampled in a step, and which of it is trained on."""

    rollout: Rollout
    groups: tuple[Group, ...]
    """All groups, in the order drawn."""
    in_batch: tuple[bool, ...]
    """By group: it is trained on."""
    rounds: int

    @property
    def batch(self) -> list[Group]:
        """The groups that are trained on."""
        return [group for group, kept in zip(self.groups, self.in_batch, strict=True) if kept]

    def metrics(self, config: Config) -> dict[str, float]:
        """What dynamic sampling cost; nothing without it."""
        if not config.objective.dynamic_sampling:
            return {}
        dropped = [group for group, kept in zip(self.groups, self.in_batch, strict=True) if not kept]
        return {
            "sampling/refill_rounds": self.rounds - 1,
            "sampling/groups_kept": len(self.groups) - len(dropped),
            "sampling/groups_dropped": len(dropped),
            "sampling/tokens_wasted": sum(len(c.token_ids) for group in dropped for c in group.completions),
        }


def collect(config: Config, draw: Draw) -> Collected:
    """Draw the groups of one step.

    Args:
        config: ``rollout.prompts_per_step`` and the settings of dynamic sampling.
        draw: samples and scores.
    """
    wanted, objective = config.rollout.prompts_per_step, config.objective
    rollout, drawn = draw(wanted, 0)
    rollouts, groups = [rollout], list(drawn)
    if not objective.dynamic_sampling:
        return Collected(rollout=rollout, groups=tuple(groups), in_batch=(True,) * len(groups), rounds=1)
    informative = _informative(config, groups)
    while sum(informative) < wanted and len(rollouts) < objective.dynamic_sampling_max_rounds:
        count = refill_size(wanted, sum(informative), len(groups))
        rollout, drawn = draw(count, len(groups) * config.rollout.group_size)
        rollouts.append(rollout)
        groups.extend(drawn)
        informative += _informative(config, drawn)
    kept = 0
    in_batch = []
    for flag in informative:
        in_batch.append(flag and kept < wanted)
        kept += in_batch[-1]
    return Collected(
        rollout=merge_rollouts(rollouts), groups=tuple(groups), in_batch=tuple(in_batch), rounds=len(rollouts)
    )


def _informative(config: Config, groups: Sequence[Group]) -> list[bool]:
    return [is_informative(group, mask_truncated=config.objective.mask_truncated) for group in groups]


def refill_size(wanted: int, informative: int, drawn: int) -> int:
    """Prompts of the next round: what is missing over the share of informative groups so far, at most ``wanted``."""
    if not informative:
        return wanted
    return min(wanted, math.ceil((wanted - informative) * drawn / informative))


def shortage(config: Config, collected: Collected) -> str | None:
    """A warning when the rounds were used up before the batch was full."""
    wanted, kept = config.rollout.prompts_per_step, sum(collected.in_batch)
    if kept == wanted:
        return None
    start = (
        f"Dynamic sampling used up objective.dynamic_sampling_max_rounds={config.objective.dynamic_sampling_max_rounds} in a step "
        f"before rollout.prompts_per_step={wanted} groups had both correct and incorrect answers"
    )
    if kept == 0:
        return f"{start}: it found none, so the step made no update. The task is too hard or too easy for the model."
    return f"{start}: the step trained on fewer (metric sampling/groups_kept)."


def merge_rollouts(rollouts: Sequence[Rollout]) -> Rollout:
    """The rounds of one step as one rollout: same policy and sampler, answers end to end, counters added up."""
    first = rollouts[0]
    if len(rollouts) == 1:
        return first
    stats = {name: sum(rollout.stats[name] for rollout in rollouts) for name in first.stats}
    stats |= {name: max(rollout.stats[name] for rollout in rollouts) for name in _LARGEST}
    stats["tokens_per_second"] = stats["generated_tokens"] / stats["seconds"]
    completions = tuple(completion for rollout in rollouts for completion in rollout.completions)
    return replace(first, completions=completions, stats=stats)
