"""Metrics of one step from its records (``metrics/catalogue.py`` gives every key's unit and meaning)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qerl import memory
from qerl.objective.batch import Sample
from qerl.objective.filtering import kind_fractions
from qerl.records import Group, Outcome, Rollout, Score
from qerl.units import GB


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Reward, accuracy, outcomes and group kinds."""
    scores = [score for group in groups for score in group.scores]
    rewards = [score.reward for score in scores if score.reward is not None]
    result: dict[str, float] = {}
    if rewards:
        result["reward"] = _mean(rewards)
        result["reward_std"] = _std(rewards)
        result["accuracy"] = sum(s.outcome is Outcome.CORRECT for s in scores) / len(rewards)
    result |= _reward_parts(scores)
    by_group = [[s.reward for s in group.scores if s.reward is not None] for group in groups]
    by_group = [values for values in by_group if values]
    if by_group:
        result["within_group_reward_variance"] = _mean([_std(values) ** 2 for values in by_group])
        result["frac_reward_zero_std"] = sum(max(v) == min(v) for v in by_group) / len(by_group)
    result |= {f"groups/{kind.value}": share for kind, share in kind_fractions(groups).items()}
    result |= {f"outcomes/{o.value}": sum(s.outcome is o for s in scores) / len(scores) for o in Outcome}
    return result


def _reward_parts(scores: Sequence[Score]) -> dict[str, float]:
    result = {}
    for name in scores[0].parts:
        values = [value for score in scores if (value := score.parts.get(name)) is not None]
        if values:
            result[f"rewards/{name}/mean"] = _mean(values)
            result[f"rewards/{name}/std"] = _std(values)
    return result


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """Lengths and token counts."""
    lengths = [len(completion.token_ids) for completion in rollout.completions]
    ended = [len(c.token_ids) for c in rollout.completions if c.stop_reason == "stop"]
    result = {
        "tokens/prompt": sum(len(completion.prompt.token_ids) for completion in rollout.completions),
        "tokens/completion": sum(lengths),
        "completions/mean_length": _mean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": 1.0 - len(ended) / len(lengths),
    }
    if ended:
        result["completions/mean_terminated_length"] = _mean(ended)
        result["completions/min_terminated_length"] = min(ended)
        result["completions/max_terminated_length"] = max(ended)
    return result


def sample_metrics(samples: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Answer tokens in the loss, and those of them that carry a signal."""
    in_loss = [sample for group in samples for sample in group if sample.in_loss]
    return {
        "tokens/loss": sum(len(sample.completion.token_ids) for sample in in_loss),
        "tokens/effective": sum(len(s.completion.token_ids) for s in in_loss if s.advantage != 0.0),
    }


def memory_metrics(peaks: memory.PhasePeaks) -> dict[str, float]:
    """Peaks so far, and by phase of the step that ends, in GB (1e9 bytes)."""
    result = {"memory/rss_gb": memory.process_bytes()["rss_peak"] / GB}
    result |= {f"memory/{name.removesuffix('_peak')}_gb": size / GB for name, size in peaks.overall.items()}
    if peaks.run:
        result["memory/larger_passes"] = peaks.larger_passes
    for phase, figures in peaks.end_step().items():
        result |= {f"memory/{phase}/{kind}_gb": size / GB for kind, size in figures.items()}
    return result


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
