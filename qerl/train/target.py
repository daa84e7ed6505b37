"""What a run, model or adapter on the command line is, and how it is loaded.

A target is a run folder (its resolved configuration and its newest checkpoint), a configuration file, or a model folder
or name. A model without a configuration is taken as it is stored: a quantized folder stays packed, any other stays
unquantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qerl.config.load import load_config
from qerl.config.schema import Config
from qerl.errors import CheckpointError, ConfigError, RunFolderError
from qerl.metrics.run_dir import RunDir
from qerl.model.checkpoint import adapter_lora_config, resolve_model_path
from qerl.model.spec import ModelSpec
from qerl.train.resume import read_state
from qerl.train.session import Session, fit_lengths, open_session, require_model_path

UNQUANTIZED = (
    "The model is taken unquantized (bf16), as it is stored; add quant.format=nvfp4 to take it as training does."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A policy that can be loaded."""

    config: Config
    adapter: Path | None
    updates: int
    """Optimizer updates behind the adapter, 0 without one or when unknown."""
    description: str
    notes: tuple[str, ...] = ()
    """What the user should know of how it is loaded."""


def resolve_target(
    target: str,
    settings: Sequence[str] = (),
    *,
    config_file: str | None = None,
    checkpoint: int | None = None,
    adapter: Path | None = None,
    base: bool = False,
) -> Target:
    """Find out what ``target`` is and how it is to be loaded.

    Args:
        target: run folder, configuration file, model folder, model name, or ``demo``.
        settings: ``key=value`` overrides.
        config_file: configuration for a model target.
        checkpoint: step of a run's checkpoint; None takes the newest.
        adapter: PEFT folder to load on a model or configuration target.
        base: leave a run's adapter out.

    Raises:
        ConfigError: options that do not go together.
        RunFolderError: the run has no such checkpoint.
        CheckpointError: there is no such model.
    """
    found = _find_target(target, settings, config_file, checkpoint, adapter, base)
    config, notes = fit_lengths(found.config, ModelSpec.from_folder(require_model_path(found.config)))
    return replace(found, config=config, notes=(*found.notes, *notes))


def _find_target(
    target: str,
    settings: Sequence[str],
    config_file: str | None,
    checkpoint: int | None,
    adapter: Path | None,
    base: bool,
) -> Target:
    """What ``target`` is, with lengths as they are configured."""
    if base and checkpoint is not None:
        raise ConfigError(
            "--base leaves the adapter out, and --checkpoint chooses one",
            got=f"--base --checkpoint {checkpoint}",
            remedy="Give one of them",
        )
    if RunDir(target).holds_a_run():
        if config_file is not None or adapter is not None:
            raise ConfigError(
                f"{target} is a run folder, which brings its own configuration and adapter",
                got=config_file or f"--adapter {adapter}",
                remedy="Give settings as key=value, and a checkpoint as --checkpoint N",
            )
        return _run_target(RunDir(target), settings, checkpoint, base)
    if checkpoint is not None or base:
        raise ConfigError(
            "--checkpoint and --base belong to a run folder", got=target, remedy="Use --adapter DIR with a model folder"
        )
    if target.endswith((".yaml", ".yml")):
        config = load_config(target, settings)
        return _model_target(config, adapter, config.model.path or "")
    try:
        path = resolve_model_path(target)
    except CheckpointError as error:
        raise CheckpointError(
            "there is no such run, and no such model",
            got=error.got,
            expected=f"the folder of a run, {error.expected}",
            remedy=error.remedy,
        ) from None
    given = any(setting.startswith(("quant.format=", "quant=")) for setting in settings)
    stored = ModelSpec.from_folder(path).stored_format or "bf16"
    as_stored = config_file is None and not given
    quant = [f"quant.format={stored}"] if as_stored else []
    found = _model_target(load_config(config_file, [*quant, f"model.path={target}", *settings]), adapter, target)
    return replace(found, notes=(UNQUANTIZED,)) if as_stored and stored == "bf16" else found


def _run_target(run: RunDir, settings: Sequence[str], checkpoint: int | None, base: bool) -> Target:
    config = load_config(run.config_path, settings)
    if base:
        return Target(config=config, adapter=None, updates=0, description=f"{run.path}, base without adapter")
    steps = [step for step, _ in run.checkpoints()]
    folder = run.latest_checkpoint() if checkpoint is None else run.checkpoint(checkpoint)
    if folder is None or not folder.is_dir():
        raise RunFolderError(
            "the run has no such checkpoint" if steps else "the run has no checkpoint",
            got=folder,
            expected=f"a step of {', '.join(map(str, steps))}" if steps else None,
            remedy="Name another with --checkpoint" if steps else "Wait for one (train.save_every), or resume the run",
        )
    adapter: Path | None = folder
    if config.train.mode == "full":
        # A checkpoint of full mode is the whole model.
        adapter = None
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
    return Target(
        config=config, adapter=adapter, updates=read_state(folder).updates, description=f"{run.path}, {folder.name}"
    )


def _model_target(config: Config, adapter: Path | None, name: str) -> Target:
    if adapter is None:
        return Target(config=config, adapter=None, updates=0, description=name)
    lora = adapter_lora_config(adapter)
    train = config.train.model_copy(update={"mode": "lora"})
    config = config.model_copy(update={"lora": lora, "train": train})
    return Target(config=config, adapter=adapter, updates=0, description=f"{name} with adapter {adapter}")


def open_target(target: Target) -> Session:
    """Load the target; without an adapter the model is the plain base."""
    return open_session(target.config, adapter=target.adapter, trainable=target.adapter is not None)
