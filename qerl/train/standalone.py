"""What a run, model or adapter on the command line is, and sampling outside a training run: ``qerl rollout``.

A target is a run folder (its resolved configuration and its newest checkpoint), a configuration file, or a model folder
or name. A model without a configuration is taken as it is stored: a quantized folder stays packed, any other stays
unquantized. Noise is off unless ``eval.noise`` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qerl.config.load import dump_config, load_config
from qerl.config.schema import Config
from qerl.env_info import collect_env
from qerl.errors import CheckpointError, ConfigError, RunFolderError
from qerl.metrics.behavior import behavior_rows
from qerl.metrics.files import check_writable
from qerl.metrics.run_dir import RunDir
from qerl.model.checkpoint import adapter_hash, adapter_lora_config, base_hash, norm_hash, resolve_model_path
from qerl.model.spec import ModelSpec
from qerl.records import Completion, Group, PolicyState, Rollout, SamplingSpec
from qerl.reward.compose import Rewarder
from qerl.rollout.engine import ProgressCallback
from qerl.train.prompts import SOURCES, load_prompts
from qerl.train.resume import read_state
from qerl.train.run import run_facts
from qerl.train.session import Session, fit_lengths, open_session, require_model_path
from qerl.train.warnings import preemption_warning

SAMPLING_STREAM = "standalone"
"""Random stream of ``qerl rollout``; training and evaluation have their own."""


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


def sample_target(
    target: Target,
    *,
    samples: int | None,
    limit: int | None,
    out: Path,
    warn: Callable[[str], None],
    on_progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Sample answers to each prompt of ``data.train``, score them, and write the behavior records.

    Args:
        target: what to sample from.
        samples: answers per prompt; None takes ``rollout.group_size``.
        limit: only the first prompts.
        out: folder to write; it gets ``config.resolved.yaml``, ``env.json`` and ``rollouts/rollout-000000.parquet``.
        warn: told what the user should know.
        on_progress: passed to the engine.

    Returns:
        ``path`` of the parquet file, ``answers``, ``accuracy`` (None when nothing was scorable), and the engine's counters.

    Raises:
        ConfigError: there is no data.
        RunFolderError: ``out`` already holds a run.
        OutputError: ``out`` cannot be written; checked first.
    """
    config = target.config
    if config.data.train is None:
        raise ConfigError("there is no data to answer", expected=SOURCES, remedy="Add --data")
    run = RunDir(out)
    check_writable(out, folder=True)
    run.refuse_a_run(remedy="Choose another --out, or delete the folder")
    samples = samples or config.rollout.group_size
    session = open_target(target)
    prompts, _, notes = load_prompts(config, session.tokenizer, config.data.train, "train", limit)
    sampling = SamplingSpec(
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        min_p=config.rollout.min_p,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=config.train.seed,
        stream=SAMPLING_STREAM,
    )
    completions, stats = session.engine.generate(prompts, sampling, group_size=samples, on_progress=on_progress)
    with Rewarder(config.reward, config.rollout.max_new_tokens) as rewarder:
        scores = rewarder.score(completions)
        crowded = preemption_warning(stats["preemptions"], len(completions))
        for text in [*target.notes, *notes, *rewarder.take_warnings(), *filter(None, [crowded])]:
            warn(text)
    weights_hash = base_hash(session.model)
    rollout = _record(target, session, sampling, samples, completions, stats, weights_hash)
    groups = [
        Group(prompt=prompt, completions=completions[i : i + samples], scores=tuple(scores[i : i + samples]))
        for i, prompt in zip(range(0, len(completions), samples), prompts, strict=True)
    ]
    run = RunDir.create(out)
    path = run.write_rollout_parquet(
        0, behavior_rows(rollout, groups, [False] * len(groups)), run_facts=run_facts(session, weights_hash)
    )
    run.write_json(run.env_path, collect_env())
    run.write_text(run.config_path, dump_config(session.config))
    scorable = [score.outcome.value for score in scores if score.reward is not None]
    accuracy = scorable.count("correct") / len(scorable) if scorable else None
    return {**stats, "path": path, "answers": len(completions), "accuracy": accuracy}


def _record(
    target: Target,
    session: Session,
    sampling: SamplingSpec,
    samples: int,
    completions: tuple[Completion, ...],
    stats: dict[str, float],
    weights_hash: str,
) -> Rollout:
    """The answers with the identity of the policy they came from; its noise is off."""
    policy = PolicyState(
        policy_version=target.updates,
        adapter_hash=adapter_hash(session.model),
        norm_hash=norm_hash(session.model),
        base_format=target.config.quant.storage(target.config.quant.format),
        base_hash=weights_hash,
        noise=None,
    )
    return Rollout(
        index=0,
        group_size=samples,
        completions=completions,
        sampling=sampling,
        policy=policy,
        engine=session.engine.name,
        kernels=session.kernels,
        cache_state="empty",
        stats=stats,
    )
