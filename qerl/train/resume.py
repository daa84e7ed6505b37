"""Checkpoints: everything that the next step depends on, saved and restored as one.

``checkpoint-N/`` holds the adapter in PEFT's layout (float32 masters), or in full mode the whole model as an ordinary
Hugging Face folder; ``optimizer.pt`` with the moments (and the masters of narrower weights); and ``trainer_state.json``
with the counters; accumulated noise has its sum beside them. All randomness is keyed by (seed, counters), so the counters are the random state. The folder is
written under a temporary name and renamed when it is whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.config.schema import Config
from qerl.errors import CheckpointError, ConfigError
from qerl.metrics.files import cannot_write, whole_folder
from qerl.metrics.run_dir import RunDir
from qerl.model.aqn import Place
from qerl.model.checkpoint import load_adapter, load_weights, save_adapter, save_model
from qerl.model.decoder import Decoder
from qerl.train.noise.director import save_sum
from qerl.train.optimizer import MasterOptimizer

STATE_VERSION = 2
MAY_DIFFER = (
    "log",
    "run",
    "model.path",
    "model.device",
    "train.save_every",
    "train.keep_checkpoints",
    "train.checkpointing",
    "train.activation_offloading",
    "train.memory_budget",
    "rollout.kv_cache_gb",
    "rollout.keep_cache",
)
"""Settings that may change when a run is resumed; every other one is part of what the run means."""
PLANNED = (
    "train.checkpointing",
    "train.token_budget",
    "rollout.kv_cache_gb",
    "rollout.keep_cache",
    "quant.dense_cache",
)
"""Settings that ``auto`` leaves to the memory plan (``train.fit``); a run keeps what its first plan made of them."""


@dataclass(slots=True, kw_only=True)
class TrainState:
    """Counters of a run. Mutable: the loop advances them."""

    step: int = 0
    """Completed rollout steps; the rollout index of step s is s."""
    updates: int = 0
    """Completed optimizer updates."""
    tokens: int = 0
    """Prompt and answer tokens of all rollouts so far."""
    completion_tokens: int = 0
    sampler: dict[str, Any] = field(default_factory=dict)
    """Cursor of the data order."""
    noise: dict[str, Any] = field(default_factory=dict)
    """What the noise of the next rollout depends on (``train.noise.director``)."""
    evaluations: dict[str, Any] = field(default_factory=dict)
    """Step -> evaluation."""
    noisy: dict[str, Any] | None = None
    """The evaluation with noise after training, against the clean one (``eval.noise.NoiseSpread``), and its step."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    wall_seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    """Keys of those warnings."""
    on_policy_steps: int = 0
    """Steps whose updates were all on-policy by identity (``train.on_policy``)."""
    off_policy: dict[str, Any] = field(default_factory=dict)
    """Why others were not: reason -> steps, first step, detail."""
    base_hash: str = ""
    portable: list[int] = field(default_factory=list)
    """Steps after which the run went on from a portable checkpoint, and so not to the bit (``train.portable``)."""
    eval_prompts: str = ""
    """Fingerprint of the evaluation prompts; that of the training prompts is in ``sampler``."""


def save_checkpoint(
    folder: Path,
    model: Decoder,
    optimizer: MasterOptimizer,
    state: TrainState,
    config: Config,
    base_path: Path,
    *,
    noise_sum: Mapping[Place, Tensor],
) -> None:
    """Write ``folder`` whole or not at all.

    Raises:
        OutputError: the disk is full, or refuses for another reason.
    """
    with whole_folder(folder) as temporary:
        save_policy(model, temporary, base_path=base_path, config=config)
        try:
            torch.save(optimizer.state_dict(), temporary / "optimizer.pt")
        except RuntimeError as error:
            # How torch reports a disk that is full.
            raise cannot_write(folder, error) from error
        save_sum(temporary, noise_sum)
        payload = {"version": STATE_VERSION, **asdict(state)}
        (temporary / "trainer_state.json").write_text(json.dumps(payload, indent=1) + "\n")


def save_policy(model: Decoder, folder: Path, *, base_path: Path, config: Config) -> None:
    """Write what is trained: the adapter, or in full mode the whole model."""
    if model.full:
        save_model(model, folder, source=base_path)
    else:
        save_adapter(model, folder, base_path=str(base_path), lora=config.lora)


def prune_checkpoints(run: RunDir, keep: int) -> None:
    """Remove the oldest checkpoints beyond the newest ``keep``; 0 keeps all."""
    if keep:
        for _, folder in run.checkpoints()[:-keep]:
            shutil.rmtree(folder)


def load_checkpoint(folder: Path, model: Decoder, optimizer: MasterOptimizer) -> TrainState:
    """Restore what is trained and the optimizer in place and return the counters.

    Raises:
        CheckpointError: a file is missing or does not fit this model, or the base weights are not the ones trained on.
    """
    state = read_state(folder)
    if model.full:
        load_weights(model, folder)
    else:
        load_adapter(model, folder)
    path = folder / "optimizer.pt"
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        optimizer.load_state_dict(saved)
    except Exception as error:  # noqa: BLE001 (a damaged pickle can end in nearly any exception)
        raise CheckpointError(
            "the optimizer state cannot be read",
            got=f"{path}: {str(error).strip() or type(error).__name__}",
            remedy="Resume from an older checkpoint by deleting this one",
        ) from None
    return state


def read_state(folder: Path) -> TrainState:
    """Counters of a checkpoint.

    Raises:
        CheckpointError: the file is missing, damaged, or of another version.
    """
    path = folder / "trainer_state.json"
    try:
        payload = json.loads(path.read_text())
        version = payload.pop("version")
        if version != STATE_VERSION:
            raise CheckpointError(
                "the checkpoint was written by another version", got=version, expected=str(STATE_VERSION)
            )
        return TrainState(**payload)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "the trainer state cannot be read",
            got=f"{path}: {error}",
            remedy="Resume from an older checkpoint by deleting this one",
        ) from None


def adopt_plan(saved: Config, current: Config) -> Config:
    """The current settings with what they leave to the plan as the run had it, so that it goes on as it was."""
    values = current.model_dump()
    before = saved.model_dump()
    for key in PLANNED:
        section, _, name = key.partition(".")
        if values[section][name] == "auto":
            values[section][name] = before[section][name]
    return Config.model_validate(values)


def check_same_config(saved: Config, current: Config) -> None:
    """Refuse to resume a run under other settings. ``train.steps`` may grow: the run becomes longer.

    Raises:
        ConfigError: a setting outside :data:`MAY_DIFFER` differs; all of them are named.
    """
    before, after = flat(saved.model_dump()), flat(current.model_dump())
    longer = after["train.steps"] > before["train.steps"]
    changed = [text for key, text in differences(before, after).items() if not (key == "train.steps" and longer)]
    if changed:
        raise ConfigError(
            "a run cannot be resumed under other settings",
            got=", ".join(changed),
            expected="those of its config.resolved.yaml",
            remedy="Resume with the same settings, or start a new run under another run.name",
        )


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Key -> both values of each setting that is part of what a run means and differs; what a plan made of ``auto`` does not.

    Args:
        before: dotted key -> value, as of :func:`flat`.
        after: the same of other settings.
    """
    return {
        key: f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
        and not any(key == p or key.startswith(p + ".") for p in MAY_DIFFER)
        and not (key in PLANNED and "auto" in (before.get(key), after.get(key)))
    }


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of a configuration by section; overrides of formats are one value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name != "quant.overrides":
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found
