"""A model ready for use: checkpoint, tokenizer and engine opened from one configuration.

Training, evaluation and rollouts from the command line all start here, so that they cannot differ in how a model is
loaded. The engine reads the very tensors that the trainer changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from qerl import memory
from qerl.config.schema import Config
from qerl.errors import ConfigError
from qerl.kernels import dispatch
from qerl.model.checkpoint import load_adapter, load_model, resolve_model_path
from qerl.model.decoder import Decoder
from qerl.model.spec import ModelSpec
from qerl.model.tokenizer import Tokenizer, load_tokenizer
from qerl.rollout.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The live objects of one model."""

    config: Config
    """As asked for, with ``quant.dense_cache`` decided."""
    model_path: Path
    model: Decoder
    tokenizer: Tokenizer
    engine: Engine
    device: torch.device

    @property
    def kernels(self) -> dict[str, str]:
        """Operation -> implementation that runs on this device."""
        return {op: dispatch.resolve(op, self.device) for op in dispatch.OPERATIONS}


def open_session(
    config: Config, *, adapter: Path | None = None, trainable: bool = True, keep_reference_norms: bool = False
) -> Session:
    """Load the model, tokenizer and engine that ``config`` names.

    Args:
        config: a full configuration; ``model``, ``quant``, ``lora``, ``rollout`` and ``train.seed`` are read.
        adapter: folder of a PEFT adapter to load on top (needs ``trainable``).
        trainable: attach what ``train.mode`` trains; without, the model is the plain base.
        keep_reference_norms: keep float32 copies of the initial norm scales for the KL reference.

    Raises:
        ConfigError: no model path, an unknown device, sequences longer than the model's positions, or keys and values of one that
            have no room.
        CheckpointError: the folder or the adapter cannot be read.
    """
    full = trainable and config.train.mode == "full"
    model_path = require_model_path(config)
    device = resolve_device(config.model.device)
    spec = ModelSpec.from_folder(model_path)
    check_lengths(config, spec)
    memory.check_cache(config, spec, device.type)
    budget = memory.budget_of(config, device)
    config = memory.settle_copies(config, spec, None if budget is None else budget.size, device_type=device.type)
    tokenizer = load_tokenizer(model_path)
    model = load_model(
        model_path,
        quant=config.quant,
        lora=config.lora if trainable and not full else None,
        dtype=getattr(torch, config.model.dtype),
        float32_stream=config.model.stream_dtype == "float32",
        float16_attention=config.model.attention_dtype == "float16",
        device=device,
        seed=config.train.seed,
        keep_reference_norms=keep_reference_norms,
        full=full,
    )
    if adapter is not None:
        load_adapter(model, adapter)
    # Without a plan (train.fit) the engine takes what it finds free, once copies of weights are there.
    planned = config.rollout.keep_cache != "auto" or config.rollout.kv_cache_gb != "auto"
    # The CPU's cache is not in pages unless shapes are static, and these settings are of a GPU.
    paged = device.type == "cuda" or config.rollout.static_shapes
    engine = Engine(
        model,
        tokenizer,
        max_num_seqs=config.decode_slots,
        device=device,
        expected_tokens=_longest(config),
        max_model_len=_longest(config) if config.rollout.static_shapes else None,
        static_shapes=config.rollout.static_shapes,
        kv_format=config.rollout.kv_format,
        read_together=config.reads_together and paged,
        lends=config.rollout.keep_cache == "off",
        kv_bytes=memory.kv_bytes(config, spec, device.type) if planned and paged else None,
    )
    return Session(config=config, model_path=model_path, model=model, tokenizer=tokenizer, engine=engine, device=device)


def require_model_path(config: Config, *, weights: bool = True) -> Path:
    """The model folder of a configuration.

    Args:
        config: names it in ``model.path``.
        weights: they will be read; False where ``config.json`` alone is.

    Raises:
        ConfigError: ``model.path`` is not set.
        CheckpointError: there is no such folder.
    """
    if config.model.path is None:
        raise ConfigError(
            "model.path is not set",
            expected="a model folder, a NAME under $QERL_MODELS, or `demo`",
            remedy="Add model.path=… to the command line",
        )
    return resolve_model_path(config.model.path, weights=weights)


def resolve_device(name: str) -> torch.device:
    """``auto`` is CUDA when there is one, else the CPU.

    Raises:
        ConfigError: the name is not a device, or CUDA is asked for and absent.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError("model.device is not a device", got=name, expected="auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device asks for CUDA and torch sees none", got=name, remedy="Use model.device=cpu")
    return device


def fit_lengths(config: Config, spec: ModelSpec) -> tuple[Config, list[str]]:
    """Shorten length settings that nobody has set to what the model has positions for.

    ``rollout.max_prompt_tokens`` and ``rollout.max_new_tokens`` keep their proportion when neither is set; one that is set stays,
    and the other gets what is left. What still does not fit is refused by :func:`check_lengths`.

    Returns:
        The configuration, and a note on what was shortened (none or one).

    Raises:
        ConfigError: the shortened answers are no longer than ``reward.overlong.buffer_tokens``.
    """
    rollout, room = config.rollout, spec.max_positions
    prompt, answer = rollout.max_prompt_tokens, rollout.max_new_tokens
    declared = config.eval.max_new_tokens or 0
    free = {"max_prompt_tokens", "max_new_tokens"} - rollout.model_fields_set
    if prompt + max(answer, declared) <= room or not free:
        return config, []
    if len(free) == 2:
        prompt = min(prompt, room * prompt // (prompt + answer), max(room - declared, 1))
    elif "max_prompt_tokens" in free:
        prompt = min(prompt, room - max(answer, declared))
    if "max_new_tokens" in free:
        answer = min(answer, room - prompt)
    if min(prompt, answer) < 1:
        return config, []
    overlong = config.reward.overlong
    if overlong.enabled and overlong.buffer_tokens >= answer:
        raise ConfigError(
            "reward.overlong.buffer_tokens must be smaller than the longest answer",
            got=f"buffer_tokens={overlong.buffer_tokens}, and the model's {room} positions leave {answer} tokens for an answer",
            remedy="Set reward.overlong.buffer_tokens",
        )
    changes = {"max_prompt_tokens": prompt, "max_new_tokens": answer}
    changes = {name: value for name, value in changes.items() if value != getattr(rollout, name)}
    shown = " and ".join(
        f"rollout.{name}={value} (default {getattr(rollout, name)})" for name, value in changes.items()
    )
    fitted = config.model_copy(update={"rollout": rollout.model_copy(update=changes)})
    return fitted, [f"The model has {room} positions: {shown}."]


def check_lengths(config: Config, spec: ModelSpec) -> None:
    """Refuse sequences that the model has no positions for.

    Raises:
        ConfigError: the longest prompt plus the longest answer exceeds ``max_position_embeddings``.
    """
    longest = _longest(config)
    if longest > spec.max_positions:
        raise ConfigError(
            "rollout.max_prompt_tokens + max_new_tokens exceeds the model's positions",
            got=longest,
            expected=f"at most {spec.max_positions}",
            remedy="Shorten one of them, or leave both unset",
        )


def _longest(config: Config) -> int:
    """Tokens of the longest prompt and the longest answer together."""
    return config.rollout.max_prompt_tokens + max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0)
