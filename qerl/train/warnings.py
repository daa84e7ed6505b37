"""Known ways in which a run looks alive and learns nothing, in words with the likely cause.

``step_warnings`` reads the metrics of one step, ``trend_warnings`` those of the run so far, ``config_warnings`` and
``prompt_warnings`` what is known before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qerl.config.schema import Config
from qerl.env_info import cpu_multiplies_bfloat16
from qerl.errors import TrainingError
from qerl.metrics.catalogue import ALARMS
from qerl.model.spec import ModelSpec
from qerl.records import Prompt

WINDOW = 5
"""Steps in the mean at the beginning of a run, and at its present end, that a trend is read from."""
ENTROPY_UP = 1.1
"""Factor from which entropy has risen."""
SHARE_MOVED = 0.05
"""Change of a share (of groups, of answers) from which it has moved."""
SLOWER = 1.05
"""Factor from which seconds per token have grown."""

MANY_ANSWERS = 16_384
"""Answers a step from which a slip is likely."""
MANY_EPOCHS = 1_000
"""Passes over the training prompts from which a slip is likely."""
MANY_WEIGHTS = 50_000_000
"""Weights of linear layers from which the type that a CPU computes in decides how long a step takes."""
FEW_TOKENS = 4
"""Answer tokens below which hardly any answer is whole."""

MANY_PREEMPTED = 0.1
"""Preemptions an answer above which computing again is worth avoiding."""

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A warning; one of each key is shown a run, whatever numbers its text holds."""

    key: str
    text: str


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
    if objective.type == "gspo" and objective.denominator == "behavior" and config.model.dtype != "float32":
        found.append(
            "objective.type=gspo clips the mean log ratio of an answer at a few 1e-4, and with denominator=behavior engine and trainer "
            f"round apart by about as much in {config.model.dtype}: use objective.denominator=recomputed."
        )
    if objective.kl_coef > 0 and objective.kl_estimator == "k1":
        found.append(
            "objective.kl_estimator=k1 in the loss has a gradient that averages to zero: it adds noise and holds the policy back "
            "from nothing. Use k2 or k3."
        )
    if objective.is_cap == "unbounded":
        found.append(
            "objective.is_cap=unbounded lets the weight of a single token or answer be of any size, and dominate an update "
            "(importance_weight/max)."
        )
    return found


def size_warnings(config: Config, spec: ModelSpec, *, prompts: int) -> list[str]:
    """Sizes that are legal and probably a slip.

    Args:
        config: the whole configuration.
        spec: shapes of the model.
        prompts: training prompts there are.
    """
    found = []
    if config.train.mode == "lora" and config.lora.rank > spec.hidden_size:
        found.append(
            f"lora.rank={config.lora.rank} exceeds the model's width of {spec.hidden_size}: ranks above it add parameters and nothing "
            "that could be learned with them."
        )
    rollout = config.rollout
    if rollout.prompts_per_step > prompts:
        found.append(
            f"rollout.prompts_per_step={rollout.prompts_per_step} exceeds the {prompts} training prompts: every step asks some of them "
            "several times."
        )
    answers = rollout.prompts_per_step * rollout.group_size
    if answers > MANY_ANSWERS:
        found.append(
            f"A step samples {answers:,} answers (rollout.prompts_per_step x rollout.group_size); published runs use a few hundred."
        )
    epochs = config.train.steps * rollout.prompts_per_step / prompts
    if epochs > MANY_EPOCHS:
        found.append(
            f"train.steps={config.train.steps} passes over the {prompts} training prompts {epochs:,.0f} times "
            "(rollout.prompts_per_step a step)."
        )
    if config.rollout.max_new_tokens < FEW_TOKENS:
        found.append(
            f"rollout.max_new_tokens={rollout.max_new_tokens} leaves room for a word or two: nearly every answer will be cut off."
        )
    return found


def cpu_warnings(config: Config, spec: ModelSpec, device_type: str) -> list[str]:
    """A type of weights that costs a CPU most of its speed; a tiny model does not feel it."""
    weights = spec.num_layers * sum(group.out_features * group.in_features for group in spec.groups())
    if device_type != "cpu" or config.model.dtype != "bfloat16" or weights < MANY_WEIGHTS:
        return []
    if cpu_multiplies_bfloat16() is not False:
        return []
    return [
        (
            "model.dtype=bfloat16 on a CPU without instructions for it (AVX512_BF16, AMX): steps take two to three times as long as with "
            "model.dtype=float32, which needs twice the memory for what is not quantized (docs/rollout.md#memory-first-use-cpu)."
        )
    ]


def prompt_warnings(prompts: Sequence[Prompt], prompt_template: str) -> list[str]:
    """Rendered prompts that carry no marks of a chat."""
    bare = [p for p in prompts if p.text.strip() == prompt_template.replace("{question}", p.question).strip()]
    if not bare:
        return []
    return [
        (
            f"{_percent(len(bare) / len(prompts))} of the prompts reach the model without a chat template around them (prompt {bare[0].id}: "
            f"{bare[0].text[:60]!r}). An instruct model then rarely ends its answer: use the checkpoint with its own "
            "chat_template, or ignore this for a base model."
        )
    ]


def step_warnings(config: Config, metrics: Metrics) -> list[Notice]:
    """What this step's metrics say is wrong."""
    found = []
    if metrics.get("reward") is None:
        found.append(
            Notice(
                key="unscored",
                text="No answer of a step could be scored: look at the notes under completions/ for the reward's own error.",
            )
        )
    elif metrics["accuracy"] == 0.0:
        found.append(_nothing_right(config, metrics))
    if metrics["completions/clipped_ratio"] == 1.0:
        found.append(
            Notice(
                key="no_eos",
                text="No answer of a step stopped by itself: no EOS token was seen, every answer reached "
                f"rollout.max_new_tokens={config.rollout.max_new_tokens}. Raise it, or check that the chat template and the EOS "
                "ids fit this checkpoint (qerl validate).",
            )
        )
    if metrics.get("frac_reward_zero_std") == 1.0:
        found.append(_all_equal(metrics))
    # Dynamic sampling draws more prompts than it is asked for.
    drawn = metrics.get("sampling/groups_kept", 0.0) + metrics.get("sampling/groups_dropped", 0.0)
    answers = round(drawn or config.rollout.prompts_per_step) * config.rollout.group_size
    if text := preemption_warning(metrics.get("rollout/preemptions", 0.0), answers):
        found.append(Notice(key="preempted", text=text))
    same_noise = config.objective.noise == "replayed" or metrics["aqn/sigma"] == 0.0
    found += [
        Notice(
            key=f"{alarm.severity}/{alarm.metric}",
            text=f"{alarm.severity}: {alarm.metric} is {metrics[alarm.metric]:.3g}, above {alarm.level}: {alarm.meaning}",
        )
        for alarm in ALARMS
        if metrics.get(alarm.metric, 0.0) > alarm.level and (same_noise or not alarm.same_noise_only)
    ]
    return found


def preemption_warning(preemptions: float, answers: int) -> str | None:
    """What to do where many answers were computed again; None for few."""
    if preemptions <= MANY_PREEMPTED * answers:
        return None
    return (
        f"Answers were put back {preemptions:.0f} times, of {answers}, for want of room for keys and values, and computed again as far as they "
        "were: lower rollout.max_num_seqs, or give them more room (rollout.kv_cache_gb) or fewer bytes (rollout.kv_format)."
    )


def refuse_unscored(config: Config, history: Sequence[Metrics], note: str | None) -> None:
    """End a run whose reward does not work: it would go on to the last step and learn nothing.

    Args:
        config: ``reward.max_unscored_steps`` and what is named in the message.
        history: metrics of all steps, oldest first.
        note: why an answer could not be scored.

    Raises:
        TrainingError: no answer of the last steps could be scored.
    """
    limit = min(config.reward.max_unscored_steps, config.train.steps)
    last = history[-limit:] if limit else []
    if len(last) < max(limit, 1) or any(metrics.get("reward") is not None for metrics in last):
        return
    raise TrainingError(
        f"no answer of the last {limit} steps could be scored, so there is nothing to learn from",
        got=note or "no reason given",
        expected="a number from every one of reward.functions",
        remedy=f"Mend {', '.join(config.reward.functions)} (qerl validate checks it), or set reward.max_unscored_steps",
    )


def _nothing_right(config: Config, metrics: Metrics) -> Notice:
    causes = {
        "truncated": f"were cut at rollout.max_new_tokens={config.rollout.max_new_tokens} before an answer: raise it",
        "unparsable": "hold no answer that the parser finds: ask for a form such as \\boxed{} in data.prompt_template, or "
        "look at completions/",
        "unscorable": "could not be scored: look at the notes under completions/",
        "wrong": "are read and wrong: the task may be too hard for this model",
    }
    shares = {kind: metrics[f"outcomes/{kind}"] for kind in causes}
    # Of equal shares the one that has a remedy, which is named first above.
    kind = max(causes, key=lambda kind: shares[kind])
    others = ", ".join(f"{_percent(share)} {name}" for name, share in shares.items() if name != kind and share > 0)
    cause = f"{_percent(shares[kind])} of the answers {causes[kind]}" + (f" (beside {others})" if others else "")
    return Notice(key=f"nothing_right/{kind}", text=f"Accuracy is 0 in a step; {cause}.")


def _all_equal(metrics: Metrics) -> Notice:
    kinds = ("all_correct", "all_wrong", "all_truncated", "mixed")
    kind = max(kinds, key=lambda kind: metrics.get(f"groups/{kind}", 0.0))
    causes = {
        "all_correct": "the task is too easy for the model as it is",
        "all_wrong": "the task is too hard for the model as it is, or its answers all fail in form",
        "all_truncated": "every answer is cut off",
        "mixed": "right and wrong answers get the same reward: look at reward.functions and reward.weights",
    }
    return Notice(
        key=f"all_equal/{kind}",
        text=f"All groups of a step have equal rewards, so there is no gradient: {causes[kind]}.",
    )


def trend_warnings(config: Config, history: Sequence[Metrics]) -> list[Notice]:
    """What the steps so far say together: the first :data:`WINDOW` against the last.

    Args:
        config: names the likely cause.
        history: metrics of all steps, oldest first.
    """
    if len(history) < 2 * WINDOW:
        return []
    early, late = history[:WINDOW], history[-WINDOW:]
    found = (_entropy_without_signal(early, late), _gain_eaten(config, early, late))
    return [notice for notice in found if notice is not None]


def _entropy_without_signal(early: Sequence[Metrics], late: Sequence[Metrics]) -> Notice | None:
    entropy = _both(early, late, "entropy")
    mixed = _both(early, late, "groups/mixed")
    invalid = [_both(early, late, f"outcomes/{kind}") for kind in ("unparsable", "truncated")]
    if entropy is None or mixed is None or None in invalid:
        return None
    before, after = (1.0 - math.fsum(pair[i] for pair in invalid if pair) for i in (0, 1))
    rises = entropy[1] >= ENTROPY_UP * entropy[0]
    if not (rises and before - after >= SHARE_MOVED and mixed[1] - mixed[0] < SHARE_MOVED):
        return None
    return Notice(
        key="entropy_without_signal",
        text=f"Entropy rose from {entropy[0]:.3g} to {entropy[1]:.3g} nats while valid answers fell from {_percent(before)} to "
        f"{_percent(after)} and mixed groups did not grow ({_percent(mixed[0])} to {_percent(mixed[1])}): answers become "
        "noisier, not more varied in substance. Lower aqn.sigma_start, rollout.temperature or optim.lr.",
    )


def _gain_eaten(config: Config, early: Sequence[Metrics], late: Sequence[Metrics]) -> Notice | None:
    """More mixed groups a step, but not more a second."""
    mixed, seconds = _both(early, late, "groups/mixed"), _both(early, late, "time/step")
    tokens = _both(early, late, "tokens/completion")
    if mixed is None or seconds is None or tokens is None or min(*seconds, *tokens) <= 0:
        return None
    if mixed[1] - mixed[0] < SHARE_MOVED or mixed[1] / seconds[1] > mixed[0] / seconds[0]:
        return None
    start = f"Mixed groups rose from {_percent(mixed[0])} to {_percent(mixed[1])}, but a step now takes {seconds[1]:.3g} s instead of {seconds[0]:.3g} s, so there are not more of them a second: "
    if seconds[1] / tokens[1] < SLOWER * seconds[0] / tokens[0]:
        return Notice(
            key="gain_eaten/length",
            text=f"{start}answers grew from {tokens[0]:.0f} to {tokens[1]:.0f} tokens a step. Consider reward.overlong.",
        )
    stage, share = _slowest_growth(early, late, seconds[1])
    return Notice(key=f"gain_eaten/{stage}", text=f"{start}{_eaten_by(config, stage)} ({_percent(share)} of the step).")


_SWITCHING = ("noise", "save", "diagnostics", "switch")
_STAGES = ("rollout", "reward", "logprobs", "backward", "optimizer", *_SWITCHING)


def _slowest_growth(early: Sequence[Metrics], late: Sequence[Metrics], step_seconds: float) -> tuple[str, float]:
    """The stage whose seconds grew most, and its share of the step now."""
    pairs = {stage: _both(early, late, f"time/{stage}") or (0.0, 0.0) for stage in _STAGES}
    stage = max(_STAGES, key=lambda stage: pairs[stage][1] - pairs[stage][0])
    return stage, pairs[stage][1] / step_seconds


def _eaten_by(config: Config, stage: str) -> str:
    if stage == "switch":
        return "changing over between engine and trainer (stage switch) ate the gain; rollout.keep_cache=on has none of it where memory suffices"
    if stage in _SWITCHING:
        return f"switching between sampling and learning (stage {stage}) ate the gain; save or measure less often"
    if stage in ("logprobs", "backward") and config.quant.format != "bf16":
        return f"dequantizing {config.quant.format} weights in the trainer's passes (stage {stage}) ate the gain"
    return f"stage {stage} ate the gain"


def _both(early: Sequence[Metrics], late: Sequence[Metrics], key: str) -> tuple[float, float] | None:
    """Mean of a metric over each window; None unless every step has it."""
    means = []
    for rows in (early, late):
        values = [row.get(key) for row in rows]
        if any(value is None for value in values):
            return None
        means.append(math.fsum(value for value in values if value is not None) / len(values))
    return means[0], means[1]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
