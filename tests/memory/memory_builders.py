"""Shapes of published models, and configurations to plan."""

from __future__ import annotations

from qerl.config.load import load_config
from qerl.memory import Budget
from qerl.model.spec import ModelSpec
from qerl.units import GB

_QWEN = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
_SHAPES = {
    "0.5b": (896, 4864, 24, 14, 2),
    "1.5b": (1536, 8960, 28, 12, 2),
    "3b": (2048, 11008, 36, 16, 2),
    "7b": (3584, 18944, 28, 28, 4),
    "14b": (5120, 13824, 48, 40, 8),
    "32b": (5120, 27648, 64, 40, 8),
}
"""Hidden size, inner width, layers, query heads, key/value heads of Qwen2.5."""


def qwen_config(size):
    """The contents of a ``config.json``."""
    hidden, inner, layers, heads, kv_heads = _SHAPES[size]
    small = {"tie_word_embeddings": True, "vocab_size": 151936} if size in ("0.5b", "1.5b", "3b") else {}
    return {
        **_QWEN,
        **small,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def qwen(size):
    return ModelSpec.from_config(qwen_config(size))


GRPO_STEP = (
    "rollout.prompts_per_step=1",
    "rollout.group_size=8",
    "rollout.max_prompt_tokens=128",
    "rollout.max_new_tokens=2048",
    "train.token_budget=8192",
    "train.checkpointing=full",
    "rollout.keep_cache=off",
)
"""Eight answers of 2048 new tokens, micro-batches of 8k tokens, rank 32, everything recomputed; phases share memory."""


def budget(gigabytes):
    return Budget(size=int(gigabytes * GB), source="test")


def configured(*settings):
    return load_config(None, list(settings))
