"""Evaluations of a trained model beside the one its configuration declares: several samples, or with noise."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qerl.config.schema import Config
from qerl.errors import RunFolderError
from qerl.eval.evaluate import evaluate
from qerl.eval.files import suite_name
from qerl.experiments.schema import FinalConfig
from qerl.experiments.summary import stored_summary
from qerl.metrics.run_dir import RunDir
from qerl.model.aqn import Noise
from qerl.records import Prompt
from qerl.reward.compose import Rewarder
from qerl.train.loop import Trainer
from qerl.train.noise.director import NoiseDirector, load_sum
from qerl.train.portable import expand_portable, is_portable
from qerl.train.prompts import load_prompts
from qerl.train.resume import read_state
from qerl.train.session import Session, open_session

TimeFor = Callable[[float], bool]
"""Whether there is time for something that takes so many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A model after its last step, and what evaluating it needs."""

    config: Config
    run: RunDir
    session: Session
    train_prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    rewarder: Rewarder
    noise_state: Mapping[str, Any]
    noise_total: Mapping[Any, Any]
    step: int


def wanted(specs: Sequence[FinalConfig], config: Config) -> list[FinalConfig]:
    """The evaluations that this run can have: those under noise need a run trained with it."""
    return [spec for spec in specs if spec.noise == "off" or config.aqn.enabled]


def missing(run: RunDir, specs: Sequence[FinalConfig], config: Config) -> list[FinalConfig]:
    """Of these, what ``final.json`` lacks, or the summary that is kept in place of the run."""
    stored = stored_summary(run.path)
    made: Mapping[str, Any] = (run.read_json(run.final_path) or {}) if stored is None else stored["final"]
    return [spec for spec in wanted(specs, config) if spec.name not in made]


class _Stopped(Exception):
    """An evaluation was given up."""


def evaluate_trained(
    trained: Trained, specs: Sequence[FinalConfig], time_for: TimeFor, stopped: Callable[[], bool]
) -> bool:
    """Make the evaluations that ``final.json`` lacks, as long as there is time; whether all are there.

    Args:
        trained: the model.
        specs: what is asked for.
        time_for: an evaluation is taken to need the longest of those so far, times its samples and by its questions.
        stopped: whether to end now. One that is at work is given up then, for it may take minutes, and made anew later.
    """
    run, config = trained.run, trained.config
    results: dict[str, Any] = run.read_json(run.final_path) or {}
    each = max([float(row.get("time/evaluate") or 0.0) for row in run.read_metrics()] or [0.0]) / config.eval.samples
    for spec in missing(run, specs, config):
        prompts, too_long = _questions(trained, spec)
        if not time_for(each * spec.samples * len(prompts) / max(len(trained.eval_prompts), 1)):
            return False
        started = time.perf_counter()

        def look(*counts: int) -> None:
            if stopped():
                raise _Stopped

        changes = {"temperature": spec.temperature, "top_p": spec.top_p, "samples": spec.samples, "noise": False}
        try:
            result = evaluate(
                trained.session.engine,
                prompts,
                trained.rewarder,
                eval_cfg=config.eval.model_copy(update=changes),
                seed=config.train.seed,
                max_new_tokens=config.eval.max_new_tokens or config.rollout.max_new_tokens,
                noise=_noise(trained, spec),
                on_progress=look,
            )
        except _Stopped:
            return False
        run.write_final_evaluation(spec.name, result.rows)
        seconds = time.perf_counter() - started
        asked = {} if spec.data is None else {"data": suite_name(spec.data), "too_long": too_long}
        results[spec.name] = result.to_dict() | asked | {"step": trained.step, "seconds": seconds}
        run.write_json(run.final_path, results)
    return True


def _questions(trained: Trained, spec: FinalConfig) -> tuple[Sequence[Prompt], int]:
    """What is asked, and how many questions are left out as too long."""
    if spec.data is None:
        return trained.eval_prompts, 0
    prompts, too_long, _ = load_prompts(trained.config, trained.session.tokenizer, spec.data, "test", None)
    return prompts, too_long


def from_trainer(trainer: Trainer) -> Trained:
    """The live model of a run that has just made its last step."""
    return Trained(
        config=trainer.config,
        run=trainer.run,
        session=trainer.session,
        train_prompts=trainer.noise.prompts,
        eval_prompts=trainer.eval_prompts,
        rewarder=trainer.rewarder,
        noise_state=trainer.noise.state_dict(),
        noise_total=trainer.noise.total,
        step=trainer.state.step,
    )


def reopen(config: Config, run: RunDir) -> Trained:
    """The model of a run whose last checkpoint is that of its last step.

    Raises:
        RunFolderError: there is no such checkpoint.
    """
    folder = run.latest_checkpoint()
    if folder is None:
        raise RunFolderError("the run has no checkpoint to evaluate", got=run.path)
    if is_portable(folder):
        expand_portable(folder)
    state = read_state(folder)
    if config.train.mode == "full":
        # A checkpoint of full mode is a whole model.
        session = open_session(
            config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
        )
    else:
        session = open_session(config, adapter=folder)
    train_prompts, _, _ = load_prompts(config, session.tokenizer, config.data.train, "train", None, training=True)
    eval_prompts, _, _ = load_prompts(config, session.tokenizer, config.data.eval, "test", config.data.eval_limit)
    return Trained(
        config=config,
        run=run,
        session=session,
        train_prompts=train_prompts,
        eval_prompts=eval_prompts,
        rewarder=Rewarder(config.reward, config.rollout.max_new_tokens),
        noise_state=state.noise,
        noise_total=load_sum(folder, config, session),
        step=state.step,
    )


def _noise(trained: Trained, spec: FinalConfig) -> Noise | None:
    """Noise of the first noisy or of the last stage, keyed as evaluations are."""
    if spec.noise == "off":
        return None
    config = trained.config
    planned, stages = config.planned_updates, config.aqn.num_stages
    completed = -(-planned // stages) if spec.noise == "first" else planned
    noisy = config.model_copy(update={"eval": config.eval.model_copy(update={"noise": True, "samples": spec.samples})})
    director = NoiseDirector(noisy, trained.session, trained.train_prompts, trained.noise_state, trained.noise_total)
    return director.evaluation(step=trained.step, completed=completed)
