"""Known ways in which a run looks alive and learns nothing, in words with the likely cause."""

from __future__ import annotations

from collections.abc import Mapping

from qerl.config.schema import Config
from qerl.metrics.catalogue import ALARMS

MOST = 0.9
"""Share from which "nearly all" is said."""


def config_warnings(config: Config) -> list[str]:
    """Legal settings that a user should know the price of."""
    found = []
    rollout, objective = config.rollout, config.objective
    if rollout.top_p < 1.0 or rollout.top_k > 0 or rollout.min_p > 0.0:
        found.append(
            "rollout.top_p/top_k/min_p cut the sampler's support: probability outside it cannot be recovered by the ratio, "
            "so the gradient is biased. Use top_p=1, top_k=0, min_p=0 to be exact."
        )
    if objective.noise == "absent" and objective.denominator == "behavior":
        found.append(
            "objective.noise=absent with denominator=behavior divides the clean policy by the noisy one, so clipping acts as a "
            "noise filter: for ablation only (docs/objectives.md)."
        )
    return found


def step_warnings(config: Config, metrics: Mapping[str, float]) -> list[str]:
    """What this step's metrics say is wrong. Texts are stable, so that each is shown once a run."""
    found = []
    if metrics.get("reward") is None:
        found.append(
            "No answer of a step could be scored: look at the notes under completions/ for the reward's own error."
        )
    elif metrics["accuracy"] == 0.0:
        found.append(_why_nothing_is_right(config, metrics))
    if metrics["completions/clipped_ratio"] == 1.0:
        found.append(
            "No answer stopped by itself: every one reached rollout.max_new_tokens. Raise it, or check that the chat template "
            "and the EOS ids fit this checkpoint."
        )
    if metrics.get("frac_reward_zero_std") == 1.0:
        found.append(
            "All groups of a step have equal rewards: no gradient. The task is too hard or too easy for the model as it is."
        )
    if config.objective.noise == "replayed" or metrics["aqn/sigma"] == 0.0:
        found += [
            f"{alarm.severity}: {alarm.metric} is above {alarm.level}: {alarm.meaning}"
            for alarm in ALARMS
            if metrics.get(alarm.metric, 0.0) > alarm.level
        ]
    return found


def _why_nothing_is_right(config: Config, metrics: Mapping[str, float]) -> str:
    if metrics["outcomes/truncated"] >= MOST:
        cause = f"nearly all answers were cut at rollout.max_new_tokens={config.rollout.max_new_tokens}: raise it"
    elif metrics["outcomes/unparsable"] >= MOST:
        cause = "nearly all answers hold no answer that can be read: ask for a form such as \\boxed{} in data.prompt_template"
    elif metrics["outcomes/unscorable"] >= MOST:
        cause = "nearly all answers are unscorable: look at the notes under completions/"
    else:
        cause = "answers are read and wrong: the task may be too hard for this model"
    return f"Accuracy is 0 in a step; {cause}."
