"""A training run from configuration to report: set-up, the loop, the summary."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from qerl.config.aqn import AqnConfig
from qerl.config.load import dump_config, load_config
from qerl.config.schema import Config
from qerl.data.prompts import PromptSampler, fingerprint
from qerl.env_info import collect_env
from qerl.errors import ConfigError, DataError, MissingDependencyError, RunFolderError, RunStopped
from qerl.kernels.fp4_linear import layout_gate
from qerl.kernels.token_logprobs import head_gate
from qerl.metrics.console import Progress
from qerl.metrics.files import check_writable
from qerl.metrics.run_dir import RunDir
from qerl.metrics.run_lock import LOCK_NAME, RunLock
from qerl.metrics.writer import MetricsWriter, check_backends
from qerl.model.checkpoint import base_hash
from qerl.model.spec import ModelSpec
from qerl.records import Prompt
from qerl.report.html import write_report
from qerl.reward.compose import Rewarder
from qerl.train.diagnostics.observer import Diagnostics
from qerl.train.fit import machine_warnings, settle_memory, within_budget
from qerl.train.loop import Trainer
from qerl.train.noise.director import NoiseDirector, load_sum
from qerl.train.optimizer import MasterOptimizer, check_optimizer, make_optimizer
from qerl.train.portable import expand_portable, is_portable
from qerl.train.prompts import SOURCES, load_prompts
from qerl.train.ready import compile_kernels
from qerl.train.resume import TrainState, adopt_plan, check_same_config, load_checkpoint
from qerl.train.session import Session, fit_lengths, open_session, require_model_path
from qerl.train.stop import Deadline, StopRequest
from qerl.train.summary import closing_lines, write_summary
from qerl.train.timing import StageTimer
from qerl.train.warnings import cpu_warnings, prompt_warnings, size_warnings

NO_EVAL = "none, so there will be no held-out accuracy: data.eval=FILE gives it questions to be measured on"
RESUME = "The same command with --resume"


def train(
    config: Config,
    *,
    resume: bool = False,
    stop_after: int | None = None,
    deadline: Deadline | None = None,
    begin: Callable[[Trainer, StopRequest], None] | None = None,
    before: Callable[[Trainer, StopRequest], dict[str, float]] | None = None,
    after: Callable[[Trainer, StopRequest], None] | None = None,
    again: str | None = None,
) -> Path:
    """Train as ``config`` says and return the run folder.

    Args:
        config: the whole configuration.
        resume: continue the run in the folder from its newest checkpoint; a larger ``train.steps`` lengthens it.
        stop_after: end after this step with a checkpoint; the plan (schedules, noise stages) stays that of the whole run.
        deadline: end with a checkpoint after the step before which it is reached.
        begin: called with the live trainer of a new run, before all else that it does.
        before: makes the evaluation before training, or takes over one that is known (``Trainer.evaluate_before``).
        after: called with the live trainer when the plan is finished, before the summary.
        again: the command that goes on with a stopped run, for its last words; None is the same one with ``--resume``.

    Raises:
        QerlError: anything a user can cause; nothing is written before the configuration, model and data are known good.
        DeviceMemoryError: a GPU's memory ran out.
        RunStopped: a signal ended the run before its last step.
    """
    began = time.perf_counter()
    check_trainable(config)
    config, length_notes = fit_lengths(config, ModelSpec.from_folder(require_model_path(config)))
    folder = Path(config.run.dir) / config.run.name
    check_writable(folder, folder=True)
    run = RunDir.open(folder) if resume else RunDir(folder)
    if not resume:
        run.refuse_a_run()
    if resume:
        saved = load_config(run.config_path, [])
        config = adopt_plan(saved, config)
        check_same_config(saved, config)
    config = settle_memory(config)
    with within_budget(config), RunLock(folder) as lock:
        run.recover()
        kept = {path.name for path in folder.iterdir()} - {LOCK_NAME}
        try:
            session = open_session(config, keep_reference_norms=config.objective.kl_coef > 0)
            check_layout(session)
            late = compile_kernels(config, session.model)
            trainer = build_trainer(config, run, session, resume=resume, began=began)
            trainer.evaluate_before = before
        except BaseException:
            # A start that fails leaves nothing behind that would refuse the corrected command.
            if not resume:
                clear(folder, kept)
            raise
        for text in [*length_notes, *(note for note in (lock.note, late) if note)]:
            trainer.warn(text)
        trainer.progress.start(header(config, session, trainer))
        run_to_end(trainer, stop_after, deadline, begin, after, again)
    return run.path


def run_to_end(
    trainer: Trainer,
    stop_after: int | None,
    deadline: Deadline | None,
    begin: Callable[[Trainer, StopRequest], None] | None,
    after: Callable[[Trainer, StopRequest], None] | None,
    again: str | None,
) -> None:
    """The loop, the summary and the report, under signals that stop it; arguments as of :func:`train`.

    Raises:
        RunStopped: a signal ended the run: after a step, or at once when it came twice.
    """
    run, state = trainer.run, trainer.state
    with trainer.writer, trainer.rewarder, StopRequest(trainer.progress.say, lambda: lost(run, state.step)) as stop:
        try:
            if begin is not None and trainer.state.step == 0:
                begin(trainer, stop)
            finished = trainer.fit(stop, stop_after, deadline)
            if finished and after is not None:
                after(trainer, stop)
            summary = write_summary(trainer, finished=finished)
            try:
                report = str(write_report(trainer.run.path))
            except MissingDependencyError as error:
                report = f"not written: {error}; then `qerl report {trainer.run.path}`"
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt) and not stop.swallowed_by(error):
                raise
            raise RunStopped(stopped_at_once(run, state.step, again), stop.signal_number or signal.SIGINT) from None
        finally:
            trainer.progress.close()
    trainer.progress.finish(closing_lines(summary, trainer.run.path, report, again or RESUME))
    if stop.signal_number is not None and not finished:
        raise RunStopped(
            f"stopped by {signal.Signals(stop.signal_number).name} after step {trainer.state.step} of "
            f"{trainer.config.train.steps}, which is saved. {again or RESUME} goes on",
            stop.signal_number,
        )


def lost(run: RunDir, step: int) -> str:
    """What is lost of a run that stops at once, after ``step`` whole steps, in words."""
    newest = run.latest_checkpoint()
    if newest is None:
        return "the whole run, which has no checkpoint yet"
    return "the running step" if newest == run.checkpoint(step) else f"what came after {newest.name}"


def stopped_at_once(run: RunDir, step: int, again: str | None) -> str:
    """What to tell who has stopped a run in the middle of the step after ``step``; ``again`` as of :func:`train`."""
    newest = run.latest_checkpoint()
    if newest is None:
        anew = f"Delete {run.path} and start again" if again is None else f"{again} begins anew"
        return f"stopped at once: no checkpoint had been written. {anew}"
    return f"stopped at once: {lost(run, step)} is lost. {again or RESUME} goes on from {newest.name}"


def clear(folder: Path, kept: set[str]) -> None:
    """Remove what a start has written into a run folder; ``kept`` and the lock stay."""
    for path in folder.iterdir():
        if path.name not in kept and path.name != LOCK_NAME:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def check_trainable(config: Config) -> None:
    """What evaluation and rollouts allow and training does not, and packages that only training needs; before weights are read.

    Raises:
        ConfigError: temperature 0, no training data, or a backend of metrics that is not known.
        MissingDependencyError: ``optim.name`` or ``log.backends`` needs a package that is not installed.
    """
    if config.rollout.temperature == 0:
        raise ConfigError(
            "training needs samples that differ",
            got="rollout.temperature=0",
            expected="a temperature above 0",
            remedy="Use rollout.temperature=1.0",
        )
    if config.data.train is None:
        raise ConfigError(
            "data.train is not set",
            expected=SOURCES,
            remedy="Add data.train=… to the command line",
        )
    check_optimizer(config.optim)
    check_backends(config.log.backends)


def build_trainer(config: Config, run: RunDir, session: Session, *, resume: bool, began: float) -> Trainer:
    """Data, optimizer and run folder; restores a checkpoint when resuming. Writes nothing before all of it is good."""
    tokenizer = session.tokenizer
    train_prompts, dropped, notes = load_prompts(config, tokenizer, config.data.train, "train", None, training=True)
    eval_prompts: list[Prompt] = []
    if config.data.eval is not None:
        eval_prompts, _, _ = load_prompts(config, tokenizer, config.data.eval, "test", config.data.eval_limit)
    rewarder = Rewarder(config.reward, config.rollout.max_new_tokens)
    if session.device.type == "cuda":
        rewarder.warm_up()
    optimizer = make_optimizer(session.model.trainable_parameters(), config.optim)
    sampler = PromptSampler(train_prompts, config.train.seed)
    timer = StageTimer(session.device)
    weights_hash = base_hash(session.model)
    state = TrainState(base_hash=weights_hash, eval_prompts=fingerprint(eval_prompts))
    if resume:
        state = restore(run, session, optimizer, sampler, timer, expected=state)
    noise_sum = load_sum(run.checkpoint(state.step), config, session) if resume else {}
    noise = NoiseDirector(config, session, train_prompts, state.noise, noise_sum)
    if not resume:
        run = RunDir.create(run.path)
        run.write_text(run.config_path, dump_config(config))
        run.write_json(run.env_path, collect_env())
    elif (planned := load_config(run.config_path, []).train.steps) != config.train.steps:
        run.write_text(run.config_path, dump_config(config))
        notes.append(longer_note(planned, config.train.steps, state.step))
    progress = Progress(
        config.train.steps, config.log.progress, eval_every=config.eval.every, eval_after=config.eval.after
    )
    trainer = Trainer(
        config=config,
        run=run,
        session=session,
        optimizer=optimizer,
        sampler=sampler,
        eval_prompts=eval_prompts,
        rewarder=rewarder,
        writer=MetricsWriter(run, config.log.backends, config=config.model_dump(), completed_steps=state.step),
        progress=progress,
        state=state,
        timer=timer,
        noise=noise,
        diagnostics=Diagnostics(config, run, session, eval_prompts or train_prompts),
        history=[row for row in run.read_metrics() if row["step"] > 0],
        run_facts=run_facts(session, weights_hash),
        dropped_prompts=dropped,
        began=began,
    )
    bare = prompt_warnings(train_prompts, config.data.prompt_template)
    sizes = size_warnings(config, session.model.spec, prompts=len(train_prompts))
    on_cpu = [check(config, session.model.spec, session.device.type) for check in (cpu_warnings, machine_warnings)]
    for text in [*session.model.spec.notes, *notes, *bare, *sizes, *chain(*on_cpu)]:
        trainer.warn(text)
    return trainer


def longer_note(planned: int, steps: int, done: int) -> str:
    """What a run that is made longer must know of its schedules."""
    return (
        f"The run was planned for {planned} steps and now goes on to {steps}: from step {done + 1} on, learning rate and noise "
        f"are those of a run of {steps} steps, so both may jump there (docs/reliability.md)."
    )


def restore(
    run: RunDir,
    session: Session,
    optimizer: MasterOptimizer,
    sampler: PromptSampler,
    timer: StageTimer,
    *,
    expected: TrainState,
) -> TrainState:
    """Bring everything back to the newest checkpoint and the folder to its step.

    Args:
        run, session, optimizer, sampler, timer: brought back in place.
        expected: base hash and evaluation prompts of now.

    Raises:
        RunFolderError: there is no checkpoint, or the run is complete.
        ConfigError: the base weights are not those the run was trained on.
        DataError: the training or evaluation prompts are not those of the run.
    """
    folder = run.latest_checkpoint()
    if folder is None:
        raise RunFolderError(
            "there is no checkpoint to resume from",
            got=run.checkpoints_dir,
            remedy="Delete the run folder or choose another run.name, and start again",
        )
    if is_portable(folder):
        expand_portable(folder)
    state = load_checkpoint(folder, session.model, optimizer)
    if state.base_hash != expected.base_hash:
        raise ConfigError(
            "the base weights are not the ones this run was trained on",
            got=expected.base_hash,
            expected=state.base_hash,
            remedy="Give the model folder the run began with",
        )
    steps = session.config.train.steps
    if state.step >= steps:
        raise RunFolderError(
            "the run is complete",
            got=f"checkpoint at step {state.step} of {steps}",
            remedy=f"Make it longer with --resume train.steps=N, N above {state.step}, or start a new run under another run.name",
        )
    if state.eval_prompts != expected.eval_prompts:
        raise DataError(
            "the evaluation prompts are not those this run was evaluated on",
            got=f"hash {expected.eval_prompts} of ids, tokens and answers",
            expected=f"{state.eval_prompts}, as in the checkpoint",
            remedy="Bring back the file, tokenizer and chat template of the run, or start a new run",
        )
    sampler.load_state_dict(state.sampler)
    if "after" in state.evaluations:
        state.evaluations[f"step {state.step}"] = state.evaluations.pop("after")
    timer.total.update(state.stage_seconds)
    run.rewind(state.step, rollout=state.step)
    return state


def check_layout(session: Session) -> None:
    """Compare the kernel in use with the dequantized product, once for every projection shape with its type of outputs and for a packed head
    (before step 0).

    Raises:
        LayoutGateError: they disagree.
    """
    seen, dtype = set(), session.model.dtype
    for linear, output_dtype in session.model.products():
        weight = linear.weight
        key = (weight.format, weight.shape, weight.segments, output_dtype)
        if key not in seen:
            seen.add(key)
            layout_gate(weight, linear.name, dtype=dtype, output_dtype=output_dtype, dense_OI=linear.dense_OI)
    if session.model.packed_head is not None:
        head_gate(session.model.packed_head, dtype=session.model.dtype, dense_VD=session.model.dense_head)


def run_facts(session: Session, weights_hash: str) -> dict[str, str]:
    """What holds for the whole run, kept in every behavior-record file."""
    return {
        "model_path": str(session.model_path),
        "base_hash": weights_hash,
        "tokenizer_hash": session.tokenizer.tokenizer_hash,
        "template_hash": session.tokenizer.template_hash,
    }


def header(config: Config, session: Session, trainer: Trainer) -> dict[str, Any]:
    """What the terminal shows before the first step."""
    return {
        "run": str(trainer.run.path),
        "model": f"{config.model.path} ({config.quant.format} base, {config.model.dtype}, {session.device})",
        "trained": f"{sum(p.numel() for p in session.model.trainable_parameters().values()):,} parameters ({trained_line(config)})",
        "batch": f"{config.rollout.prompts_per_step} prompts x {config.rollout.group_size} answers",
        "objective": f"{config.objective.type}, denominator {config.objective.denominator}, "
        f"noise {config.objective.noise}",
        "noise": noise_line(config.aqn),
        "evaluation": f"{len(trainer.eval_prompts)} held-out questions" if config.data.eval is not None else NO_EVAL,
    }


def trained_line(config: Config) -> str:
    """What learns, in a few words."""
    if config.train.mode == "full":
        return "all weights"
    return f"LoRA rank {config.lora.rank}{', norms' if config.lora.train_norms else ''}"


def noise_line(aqn: AqnConfig) -> str:
    """The noise in one line; settings that differ from the plain scheme are named."""
    if not aqn.enabled:
        return "off"
    unit = "KL " if aqn.magnitude == "kl" else ""
    plain = AqnConfig()
    parts = [
        f"{name} {getattr(aqn, name)}"
        for name in ("scope", "mode", "sharing", "magnitude", "prompt")
        if getattr(aqn, name) != getattr(plain, name)
    ]
    if aqn.controller.enabled:
        parts.append("sigma by the controller")
    schedule = f"AQN {aqn.schedule} {unit}{aqn.sigma_start:g} -> {aqn.sigma_end:g}, {aqn.num_stages} stages"
    return ", ".join([schedule, *parts])
