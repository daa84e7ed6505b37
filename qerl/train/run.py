"""A training run from configuration to report: set-up, the loop, the summary."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qerl import memory
from qerl.config.aqn import AqnConfig
from qerl.config.load import dump_config, load_config
from qerl.config.schema import Config
from qerl.data.prompts import PromptSampler, build_prompts
from qerl.data.tasks import load_rows
from qerl.env_info import collect_env
from qerl.errors import ConfigError, MissingDependencyError, QerlError, RunFolderError
from qerl.eval.evaluate import compare
from qerl.kernels.fp4_linear import layout_gate
from qerl.kernels.token_logprobs import head_gate
from qerl.metrics.console import Progress
from qerl.metrics.run_dir import RunDir
from qerl.metrics.writer import MetricsWriter
from qerl.model.checkpoint import base_hash
from qerl.report.html import write_report
from qerl.reward.compose import Rewarder
from qerl.train import on_policy
from qerl.train.diagnostics.observer import Diagnostics
from qerl.train.fit import settle_memory
from qerl.train.loop import Trainer
from qerl.train.noise.director import NoiseDirector, load_sum
from qerl.train.optimizer import MasterOptimizer, make_optimizer
from qerl.train.portable import expand_portable, is_portable
from qerl.train.resume import TrainState, check_same_config, load_checkpoint
from qerl.train.session import Session, open_session
from qerl.train.stop import Deadline, StopRequest
from qerl.train.timing import StageTimer
from qerl.train.warnings import prompt_warnings

SUMMARY_SCHEMA = 1


def train(
    config: Config,
    *,
    resume: bool = False,
    stop_after: int | None = None,
    deadline: Deadline | None = None,
    after: Callable[[Trainer], None] | None = None,
) -> Path:
    """Train as ``config`` says and return the run folder.

    Args:
        config: the whole configuration.
        resume: continue the run in the folder from its newest checkpoint.
        stop_after: end after this step with a checkpoint; the plan (schedules, noise stages) stays that of the whole run.
        deadline: end with a checkpoint after the step before which it is reached.
        after: called with the live trainer when the plan is finished, before the summary.

    Raises:
        QerlError: anything a user can cause; nothing is written before the configuration, model and data are known good.
    """
    check_trainable(config)
    folder = Path(config.run.dir) / config.run.name
    run = RunDir.open(folder) if resume else RunDir(folder)
    if not resume:
        run.refuse_a_run()
    config = settle_memory(config)
    if resume:
        check_same_config(load_config(run.config_path, []), config)
    began = time.perf_counter()
    session = open_session(config, keep_reference_norms=config.objective.kl_coef > 0)
    check_layout(session)
    existed = folder.exists()
    try:
        trainer = build_trainer(config, run, session, resume=resume, began=began)
    except QerlError:
        # A start that fails leaves no folder behind that would refuse the corrected command.
        if not resume and not existed:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    trainer.progress.start(header(config, session, trainer))
    with (
        trainer.writer,
        StopRequest(lambda: trainer.progress.note("stopping after this step; again to stop at once")) as stop,
    ):
        try:
            finished = trainer.fit(stop, stop_after, deadline)
            if finished and after is not None:
                after(trainer)
        except KeyboardInterrupt:
            trainer.progress.close()
            raise
    summary = write_summary(trainer, finished=finished)
    try:
        report = str(write_report(run.path))
    except MissingDependencyError as error:
        report = f"not written: {error}; then `qerl report {run.path}`"
    trainer.progress.finish(closing_lines(summary, run.path, report))
    return run.path


def check_trainable(config: Config) -> None:
    """What evaluation and rollouts allow and training does not.

    Raises:
        ConfigError: temperature 0, or no training data.
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
            expected="a file, a built-in data set, a NAME under $QERL_DATA, or a hub name",
            remedy="Add data.train=… to the command line",
        )


def build_trainer(config: Config, run: RunDir, session: Session, *, resume: bool, began: float) -> Trainer:
    """Data, optimizer and run folder; restores a checkpoint when resuming. Writes nothing before all of it is good."""
    train_prompts, dropped, notes = load_prompts(config, session, config.data.train, "train", None, training=True)
    eval_prompts: list[Any] = []
    if config.data.eval is not None:
        eval_prompts, _, _ = load_prompts(config, session, config.data.eval, "test", config.data.eval_limit)
    rewarder = Rewarder(config.reward, config.rollout.max_new_tokens)
    optimizer = make_optimizer(session.model.trainable_parameters(), config.optim)
    sampler = PromptSampler(train_prompts, config.train.seed)
    timer = StageTimer(session.device)
    weights_hash = base_hash(session.model)
    state = TrainState(base_hash=weights_hash)
    if resume:
        state = restore(run, session, optimizer, sampler, timer, weights_hash)
    noise_sum = load_sum(run.checkpoint(state.step), config, session) if resume else {}
    noise = NoiseDirector(config, session, train_prompts, state.noise, noise_sum)
    if not resume:
        run = RunDir.create(run.path)
        run.write_text(run.config_path, dump_config(config))
        run.write_json(run.env_path, collect_env())
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
    for text in [*session.model.spec.notes, *notes, *prompt_warnings(train_prompts, config.data.prompt_template)]:
        trainer.warn(text)
    return trainer


def load_prompts(
    config: Config, session: Session, source: str | None, split: str, limit: int | None, *, training: bool = False
) -> tuple[list[Any], int, list[str]]:
    """Rendered prompts of a data set, how many were too long, and what there is to warn of (of ``training`` on them too)."""
    assert source is not None
    loaded = load_rows(source, default_split=split)
    rows = loaded.rows[:limit] if limit else loaded.rows
    prompts, dropped = build_prompts(rows, session.tokenizer, config.data, config.rollout.max_prompt_tokens)
    notes = list(loaded.warnings) if training else []
    if dropped.too_long:
        notes.append(
            f"{dropped.too_long} of {len(rows)} prompts of {source} are longer than "
            f"rollout.max_prompt_tokens={config.rollout.max_prompt_tokens} and were left out"
        )
    return prompts, dropped.too_long, notes


def restore(
    run: RunDir,
    session: Session,
    optimizer: MasterOptimizer,
    sampler: PromptSampler,
    timer: StageTimer,
    weights_hash: str,
) -> TrainState:
    """Bring everything back to the newest checkpoint and the folder to its step.

    Raises:
        RunFolderError: there is no checkpoint, or the run is complete.
        ConfigError: the base weights are not those the run was trained on.
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
    if state.base_hash != weights_hash:
        raise ConfigError(
            "the base weights are not the ones this run was trained on",
            got=weights_hash,
            expected=state.base_hash,
            remedy="Give the model folder the run began with",
        )
    if state.step >= session.config.train.steps:
        raise RunFolderError(
            "the run is complete",
            got=f"checkpoint at step {state.step} of {session.config.train.steps}",
            remedy="Start a new run under another run.name",
        )
    sampler.load_state_dict(state.sampler)
    timer.total.update(state.stage_seconds)
    run.rewind(state.step, rollout=state.step)
    return state


def check_layout(session: Session) -> None:
    """Compare the kernel in use with the dequantized product, once for every projection shape and for a packed head (before step 0).

    Raises:
        LayoutGateError: they disagree.
    """
    seen = set()
    for linear in session.model.grouped_linears():
        key = (linear.weight.format, linear.weight.shape, linear.weight.segments)
        if key not in seen:
            seen.add(key)
            layout_gate(linear.weight, linear.name, dtype=session.model.dtype, dense_OI=linear.dense_OI)
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
        "evaluation": f"{len(trainer.eval_prompts)} held-out questions",
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


def closing_lines(summary: dict[str, Any], folder: Path, report: str) -> dict[str, Any]:
    """What the terminal shows after the last step."""
    lines: dict[str, Any] = {"status": f"{summary['status']} after step {summary['steps']}"}
    for moment in ("before", "after"):
        result = summary["evaluation"][moment]
        if result is not None:
            lines[f"accuracy {moment}"] = (
                f"{result['accuracy']:.1%} [{result['low']:.1%}, {result['high']:.1%}] on {result['count']} held-out questions"
            )
    noisy = summary["noisy"]
    if noisy is not None:
        against = noisy["against_clean"]
        lines["with noise"] = (
            f"{noisy['mean']:.1%} at sigma {noisy['sigma']:.3g}, {100 * against['difference']:+.1f} points "
            f"[{100 * against['low']:+.1f}, {100 * against['high']:+.1f}] from the clean policy"
        )
    lines |= {"seconds": f"{summary['wall_seconds']:.1f}", "run folder": folder, "report": report}
    if summary["status"] != "finished":
        lines["resume"] = "the same command with --resume"
    return lines


def paired_difference(trainer: Trainer) -> dict[str, Any] | None:
    """The evaluation after against the one before on the same questions; None unless both were made."""
    results = [
        result for moment in ("before", "after") if (result := trainer.state.evaluations.get(moment)) is not None
    ]
    if len(results) < 2:
        return None
    before, after = (trainer.run.read_evaluation(result["step"]) for result in results)
    return dict(compare(before, after, confidence=trainer.config.eval.confidence, seed=trainer.config.train.seed))


def write_summary(trainer: Trainer, *, finished: bool) -> dict[str, Any]:
    """``summary.json`` and ``memory.json``."""
    config, state, session = trainer.config, trainer.state, trainer.session
    state.wall_seconds += time.perf_counter() - trainer.began
    peaks = memory.process_bytes() | memory.device_bytes(session.device) | trainer.timer.peaks.overall
    ledger = memory.predict(config, session.model.spec, device_type=session.device.type)
    trainer.run.write_json(
        trainer.run.memory_path,
        {
            "predicted": ledger.owners(),
            "predicted_phases": {phase: dict(brought) for phase, brought in ledger.phases.items()},
            "predicted_peaks": {phase: ledger.total(phase) for phase in memory.PHASES},
            "measured_peaks": trainer.timer.peaks.run,
            "measured": memory.measure_resident(
                session.model,
                masters=trainer.optimizer.masters.values(),
                moments=trainer.optimizer.state_tensors(),
            )
            | {"kv_cache": trainer.peak_kv_bytes},
            "process": peaks,
        },
    )
    summary = {
        "schema": SUMMARY_SCHEMA,
        "run": config.run.name,
        "model": config.model.path,
        "status": "finished" if finished else "interrupted",
        "steps": state.step,
        "updates": state.updates,
        "evaluation": {"before": state.evaluations.get("before"), "after": state.evaluations.get("after")},
        "evaluations": state.evaluations,
        "paired": paired_difference(trainer),
        # A run that was made longer still knows the end it had.
        "noisy": state.noisy if state.noisy is not None and state.noisy["step"] == state.step else None,
        "bit_exact": not state.portable,
        "portable_resumes": state.portable,
        "wall_seconds": state.wall_seconds,
        "stage_seconds": dict(trainer.timer.total),
        "on_policy": on_policy.verdict(state.off_policy, state.on_policy_steps, state.step),
        "tokens": {
            "total": state.tokens,
            "completion": state.completion_tokens,
            "prompt": state.tokens - state.completion_tokens,
        },
        "peak_memory": peaks,
        "versions": collect_env()["versions"],
        "warnings": state.warnings,
    }
    trainer.run.write_json(trainer.run.summary_path, summary)
    return summary
