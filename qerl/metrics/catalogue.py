"""Every metric there is: its name, unit and meaning, in one table.

A key that is not in the table cannot be written (`metrics.writer`), and ``docs/metrics.md`` is printed from it::

    python -m qerl.metrics.catalogue > docs/metrics.md

Names are TRL's where TRL has one. A name with a ``{placeholder}`` stands for a family, such as
``rewards/{function}/mean``.
"""

from __future__ import annotations

import re
from functools import cache

from qerl.errors import nearest
from qerl.metrics.diagnostics_catalogue import DIAGNOSTICS
from qerl.metrics.machine_catalogue import MACHINE
from qerl.metrics.metric import Alarm, Metric, Severity, section
from qerl.metrics.noise_catalogue import AQN

_PROGRESS = section(
    "Progress",
    ("step", "steps", "Rollout steps completed, this one included. 0 is the line of the evaluation before training."),
    ("policy_version", "updates", "Optimizer updates completed, those of this step included."),
    ("epoch", "epochs", "Passes over the training prompts that have been drawn so far."),
    ("num_tokens", "tokens", "Prompt and answer tokens processed since the start of the run (cumulative)."),
    ("tokens/prompt", "tokens", "Prompt tokens of this step, counted once an answer."),
    ("tokens/completion", "tokens", "Answer tokens of this step."),
    ("dropped_prompts", "prompts", "Training prompts left out for being longer than `rollout.max_prompt_tokens`."),
    (
        "resumes/portable",
        "resumes",
        "Times the run went on from a portable checkpoint so far; present when above 0: the run is then not bit-exact.",
    ),
)

_REWARD = section(
    "Reward",
    ("reward", "1", "Mean reward (weighted sum with shaping) over the scored answers of the step."),
    ("reward_std", "1", "Population standard deviation of the reward over the scored answers of the step."),
    ("rewards/{function}/mean", "1", "Mean of one reward function, before its weight, over the answers it scored."),
    ("rewards/{function}/std", "1", "Population standard deviation of one reward function over the answers it scored."),
    (
        "accuracy",
        "fraction",
        "Correct answers over scored answers; decided by the accuracy function alone, never by shaping.",
    ),
    (
        "within_group_reward_variance",
        "1",
        "Population variance of the reward within a group, averaged over the groups with a scored answer.",
    ),
    ("frac_reward_zero_std", "fraction", "Groups in which all rewards are equal: they give no gradient."),
)

_GROUPS = section(
    "Groups and outcomes",
    ("groups/mixed", "fraction", "Groups with both correct and incorrect answers: the ones that teach."),
    ("groups/all_correct", "fraction", "Groups in which every scored answer is correct."),
    ("groups/all_wrong", "fraction", "Groups without a correct answer that are neither all truncated nor unscorable."),
    ("groups/all_truncated", "fraction", "Groups in which every scored answer was cut off and none is correct."),
    ("groups/unscorable", "fraction", "Groups in which no answer could be scored."),
    ("outcomes/correct", "fraction", "Answers that are correct."),
    ("outcomes/wrong", "fraction", "Answers that hold an answer, and a wrong one."),
    ("outcomes/unparsable", "fraction", "Finished answers in which no answer was found."),
    ("outcomes/truncated", "fraction", "Incorrect answers that reached `rollout.max_new_tokens` without stopping."),
    (
        "outcomes/unscorable",
        "fraction",
        "Answers whose reward function failed or timed out; they leave the group statistics.",
    ),
)

_DYNAMIC = section(
    "Dynamic sampling",
    (
        "sampling/refill_rounds",
        "rounds",
        "Rounds of sampling beyond the first; present, as the other rows here, with `objective.dynamic_sampling`.",
    ),
    ("sampling/groups_kept", "groups", "Informative groups that were trained on."),
    (
        "sampling/groups_dropped",
        "groups",
        "Other groups of the step. They count in the reward, group, outcome and answer metrics, and not in the loss.",
    ),
    ("sampling/tokens_wasted", "tokens", "Answer tokens of the groups that were dropped."),
)

_COMPLETIONS = section(
    "Answers",
    ("completions/mean_length", "tokens", "Mean answer length."),
    ("completions/min_length", "tokens", "Shortest answer."),
    ("completions/max_length", "tokens", "Longest answer."),
    ("completions/clipped_ratio", "fraction", "Answers that stopped only because of `rollout.max_new_tokens`."),
    ("completions/mean_terminated_length", "tokens", "Mean length of the answers that ended by themselves."),
    ("completions/min_terminated_length", "tokens", "Shortest answer that ended by itself."),
    ("completions/max_terminated_length", "tokens", "Longest answer that ended by itself."),
)

_LEARNING = section(
    "Learning",
    ("loss", "1", "The objective that is minimized, averaged over the updates of the step."),
    (
        "entropy",
        "nats",
        (
            "Entropy of softmax(logits / T) with full support, in the trainer's pass (noise as `objective.noise` says) at the "
            "parameters that sampled: averaged over all answer tokens of the first mini-batch of the step."
        ),
    ),
    ("grad_norm", "1", "Global gradient norm before clipping, averaged over the updates of the step."),
    ("learning_rate", "1", "Learning rate of the last update."),
    (
        "kl",
        "nats",
        "Estimate (`objective.kl_estimator`) of the KL divergence to the reference policy, a token; present when `objective.kl_coef` > 0.",
    ),
    ("clip_ratio/low_mean", "fraction", "Answer tokens whose ratio fell below 1 - clip_low with a negative advantage."),
    (
        "clip_ratio/high_mean",
        "fraction",
        "Answer tokens whose ratio rose above 1 + clip_high with a positive advantage; with `cispo`, above clip_high at either sign.",
    ),
    ("clip_ratio/region_mean", "fraction", "Answer tokens clipped on either side."),
    (
        "clip_ratio/dual_mean",
        "fraction",
        "Answer tokens whose ratio rose above `objective.dual_clip` with a negative advantage; present when it is on.",
    ),
    (
        "ratio/min",
        "1",
        "Smallest ratio to the denominator policy over the tokens in the loss, all updates of the step.",
    ),
    ("ratio/mean", "1", "Mean of that ratio; exactly 1 for one update a step with `objective.denominator=recomputed`."),
    ("ratio/max", "1", "Largest such ratio."),
    ("updates", "updates", "Optimizer updates made in this step."),
    (
        "on_policy",
        "1",
        (
            "1 when adapter version, norms, base weights, noise key, sampler transform, kernels and cache state of the policy that "
            "sampled and of the one trained are the same in every update of the step, else 0. A ratio of 1 does not say so."
        ),
    ),
    (
        "skipped_updates",
        "updates",
        "Mini-batches of this step in which no answer is in the loss, so without an update.",
    ),
    (
        "nonfinite_updates",
        "updates",
        "Updates of this step left out because the gradient held NaN or infinity (`optim.nonfinite=skip`); their batches are in nonfinite/.",
    ),
    ("tokens/loss", "tokens", "Answer tokens that entered the loss."),
    ("tokens/effective", "tokens", "Those of them whose advantage is not 0: what the gradient is made of."),
    (
        "importance_weight/mean",
        "1",
        (
            "Mean of the bounded importance weight pi_old / pi_behavior over the tokens in the loss (`objective.is_level=sequence`: "
            "over the answers), all updates of the step; present when `objective.is_cap` is on."
        ),
    ),
    ("importance_weight/max", "1", "Largest such weight."),
    (
        "importance_weight/affected",
        "fraction",
        "Tokens (or answers) whose weight lay outside `objective.is_floor` and `is_cap` and was truncated or masked.",
    ),
)

_MISMATCH = section(
    "Mismatch between engine and trainer",
    (
        "sampling/sampling_logp_difference/mean",
        "nats",
        (
            "Mean |log-prob in the trainer - log-prob recorded by the engine| over the answer tokens before the first update "
            "(the first mini-batch), where both have the same parameters."
        ),
    ),
    ("sampling/sampling_logp_difference/max", "nats", "Largest such difference."),
    (
        "sampling/importance_sampling_ratio/min",
        "1",
        "Smallest ratio w of trainer to engine probability of a token, over the same tokens.",
    ),
    ("sampling/importance_sampling_ratio/mean", "1", "Mean of that ratio."),
    ("sampling/importance_sampling_ratio/max", "1", "Largest such ratio."),
    ("mismatch_kl", "nats", "KL(engine || trainer), a token: k3 estimate, mean of w - 1 - log w."),
    ("mean_abs_prob_difference", "1", "Mean |p_trainer - p_engine| of the chosen tokens, over the same tokens."),
    ("max_abs_prob_difference", "1", "Largest |p_trainer - p_engine| of a chosen token."),
    (
        "effective_sample_size",
        "fraction",
        "(sum w)^2 / (n sum w^2) over the same tokens; 1 when trainer and engine agree.",
    ),
)

_EVAL = section(
    "Held-out evaluation",
    (
        "eval/accuracy",
        "fraction",
        "Correct over scored answers under the declared evaluation policy (with several samples: avg@k).",
    ),
    (
        "eval/accuracy_low",
        "fraction",
        "Lower end of its interval over questions, not over seeds, at `eval.confidence`: Wilson, or bootstrap with several samples.",
    ),
    ("eval/accuracy_high", "fraction", "Upper end of that interval."),
    ("eval/truncated", "fraction", "Answers that reached the length limit, correct ones included."),
    ("eval/unparsable", "fraction", "Finished answers in which no answer was found."),
    ("eval/unscorable", "fraction", "Answers whose scoring failed or timed out."),
    ("eval/mean_length", "tokens", "Mean answer length."),
    ("eval/count", "questions", "Questions evaluated."),
    (
        "eval/noisy_accuracy",
        "fraction",
        "Accuracy with the noise of training, mean over `eval.noisy_draws` keys; after the last step, where `eval/accuracy` is clean.",
    ),
    (
        "eval/noise_difference",
        "fraction",
        "`eval/noisy_accuracy` minus `eval/accuracy`, over the questions that both could score.",
    ),
)

METRICS: tuple[Metric, ...] = (
    *_PROGRESS,
    *_REWARD,
    *_GROUPS,
    *_DYNAMIC,
    *_COMPLETIONS,
    *_LEARNING,
    *_MISMATCH,
    *DIAGNOSTICS,
    *AQN,
    *_EVAL,
    *MACHINE,
)
"""All metrics, in the order of the documentation."""

_LEVELS: tuple[tuple[float, Severity, str], ...] = (
    (0.005, "warning", "Engine and trainer disagree more than rounding explains (same noise on both sides)."),
    (
        0.01,
        "fault",
        "The trainer optimizes another policy than the one that sampled: look for a layout, cache or mask fault.",
    ),
)
ALARMS: tuple[Alarm, ...] = tuple(
    Alarm(metric=metric, level=level, severity=severity, meaning=meaning, same_noise_only=same_noise_only)
    for metric, same_noise_only in (
        ("mean_abs_prob_difference", True),
        ("mismatch/kernel/mean_abs_prob_difference", False),
    )
    for level, severity, meaning in _LEVELS
)
"""Alarm lines, mildest first for each metric. They are for the kernel term alone: the noise itself gives about .017 at
sigma .05. `mean_abs_prob_difference` is that term only while both sides see the same noise."""


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], Metric], ...]:
    """Names with a placeholder, as regular expressions."""
    families = [metric for metric in METRICS if "{" in metric.name]
    return tuple((re.compile(re.sub(r"\\\{\w+\\\}", "(.+)", re.escape(metric.name))), metric) for metric in families)


@cache
def lookup(key: str) -> Metric:
    """The catalogue's row for a metric key.

    Raises:
        KeyError: no row matches; the message names the nearest one. A fault of the program, not of its user.
    """
    for metric in METRICS:
        if metric.name == key:
            return metric
    for pattern, metric in _patterns():
        if pattern.fullmatch(key):
            return metric
    close = nearest(key, [metric.name for metric in METRICS])
    hint = f"; the nearest is {close!r}" if close else ""
    raise KeyError(f"metric {key!r} is not in qerl/metrics/catalogue.py{hint}: add it there with its unit and meaning")


def is_reproducible(key: str) -> bool:
    """Whether the same seed on the same machine must give the same value to the bit.

    Raises:
        KeyError: the key is not in the catalogue.
    """
    return lookup(key).kind == "value"


def to_markdown() -> str:
    """The text of ``docs/metrics.md``."""
    lines = [
        "# Metrics",
        "",
        (
            "Every key of `metrics.jsonl`, generated from `qerl/metrics/catalogue.py` by "
            "`python -m qerl.metrics.catalogue > docs/metrics.md`."
        ),
        "",
        (
            "One line a step. Names are TRL's where TRL has one. Kind `value`: the same seed on the same machine gives the "
            "same number to the bit; `timing`, `throughput` and `memory` depend on the machine and the moment. "
            "A number that is not finite is written as `null`."
        ),
    ]
    for heading in dict.fromkeys(metric.section for metric in METRICS):
        lines += ["", f"## {heading}", "", "| key | unit | kind | meaning |", "|---|---|---|---|"]
        rows = [metric for metric in METRICS if metric.section == heading]
        lines += [
            f"| `{row.name}` | {row.unit} | {row.kind} | {row.meaning.replace('|', chr(92) + '|')} |" for row in rows
        ]
    lines += [
        "",
        "## Alarm lines",
        "",
        (
            "They are for the difference between engine and trainer at the same noise. With `objective.noise=absent` the noise "
            "itself moves `mean_abs_prob_difference` (about .017 at sigma .05), so its lines do not apply then; those of "
            "`mismatch/kernel/mean_abs_prob_difference` always do."
        ),
        "",
        "| metric | above | severity | meaning |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{alarm.metric}` | {alarm.level:g} | {alarm.severity} | {alarm.meaning} |" for alarm in ALARMS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(to_markdown(), end="")
