"""Finding the key a user meant.

A misspelled key is compared with all dotted keys, and by its last part alone, so that ``rollout.tempurature`` and a bare
``lr`` are both understood. Names used by TRL, verl and PEFT are known too. A suggestion is only ever shown, never applied.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

ALIASES = {
    "num_generations": "rollout.group_size",
    "n": "rollout.group_size",
    "train_batch_size": "rollout.prompts_per_step",
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "epsilon": "objective.clip_low",
    "epsilon_high": "objective.clip_high",
    "clip_ratio_low": "objective.clip_low",
    "clip_ratio_high": "objective.clip_high",
    "delta": "objective.dual_clip",
    "clip_ratio_c": "objective.dual_clip",
    "importance_sampling_level": "objective.type",
    "vllm_importance_sampling_mode": "objective.is_mode",
    "vllm_importance_sampling_clip_max": "objective.is_cap",
    "vllm_importance_sampling_clip_min": "objective.is_floor",
    "use_dynamic_sampling": "objective.dynamic_sampling",
    "max_num_gen_batches": "objective.dynamic_sampling_max_rounds",
    "beta": "objective.kl_coef",
    "loss_type": "objective.type",
    "loss_agg_mode": "objective.type",
    "scale_rewards": "objective.advantage",
    "adv_estimator": "objective.advantage",
    "mask_truncated_completions": "objective.mask_truncated",
    "learning_rate": "optim.lr",
    "num_iterations": "optim.updates_per_rollout",
    "ppo_epochs": "optim.updates_per_rollout",
    "lr_scheduler_type": "optim.schedule",
    "max_steps": "train.steps",
    "gradient_checkpointing": "train.checkpointing",
    "save_steps": "train.save_every",
    "save_total_limit": "train.keep_checkpoints",
    "eval_steps": "eval.every",
    "reward_funcs": "reward.functions",
    "reward_weights": "reward.weights",
    "lora_alpha": "lora.alpha",
    "lora_rank": "lora.rank",
    "r": "lora.rank",
    "target_modules": "lora.targets",
    "report_to": "log.backends",
    "output_dir": "run.dir",
    "run_name": "run.name",
    "model_name_or_path": "model.path",
}
"""Names in TRL, verl and PEFT -> our key."""

_CLOSE_ENOUGH = 0.62
_OTHER_SECTION_PENALTY = 0.1


def suggest_key(name: str, known: Iterable[str]) -> str | None:
    """The known dotted key closest to ``name``, or None when nothing is close."""
    known = list(known)
    leaf = name.rpartition(".")[2]
    if leaf in ALIASES and ALIASES[leaf] in known:
        return ALIASES[leaf]
    best = max(known, key=lambda key: _score(name, key), default=None)
    return best if best is not None and _score(name, best) >= _CLOSE_ENOUGH else None


def _score(name: str, key: str) -> float:
    section, _, leaf = name.rpartition(".")
    key_section, _, key_leaf = key.rpartition(".")
    by_leaf = _similarity(leaf, key_leaf)
    if section and section != key_section:
        by_leaf -= _OTHER_SECTION_PENALTY
    return max(_similarity(name, key) - _OTHER_SECTION_PENALTY, by_leaf)


def _similarity(left: str, right: str) -> float:
    return SequenceMatcher(None, left, right, autojunk=False).ratio()
