"""What cells of a matrix have in common and one of them makes for all, of whatever command: the others wait and take it over.

**The probe set**, on which all entropies are taken. **The evaluation before training**, of cells that begin from one base: before
training the adapters add exactly 0, so a greedy evaluation without noise depends on the base, the questions and the policy
alone. It is kept in the matrix folder under the hash of all of these, of machine and versions.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qerl.config.schema import Config
from qerl.env_info import collect_env
from qerl.experiments.cells import flat_settings
from qerl.metrics.files import output_errors, whole_file, whole_folder, write_json
from qerl.metrics.run_dir import RunDir
from qerl.train.loop import Trainer
from qerl.train.stop import StopRequest

LOOK_SECONDS = 0.1
FOLDER = ".before"
"""Folder of the matrix folder with the evaluations before training; it does not go to another machine."""
PROBE_LOCK = ".probe.lock"
SAME_SECTIONS = ("eval.", "reward.", "model.", "rollout.", "train.mode")
INDIFFERENT = ("model.path", "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p")
"""Of these sections, what an evaluation does not depend on: weights go by their hash, and evaluations have a sampler of their own."""
SAME_ENVIRONMENT = ("commit", "modified", "cuda", "gpus", "versions")


def take_probe(trainer: Trainer, stop: StopRequest, matrix_folder: Path) -> None:
    """Give a new run the probe set of the matrix, which it makes if there is none.

    Args:
        trainer: a run at step 0.
        stop: ends the wait for another cell.
        matrix_folder: folder of the cells.

    Raises:
        OutputError: the folder cannot be written.
        KeyboardInterrupt: a stop was requested during the wait.
    """
    if not trainer.config.diagnostics.every:
        return
    with only_maker_of_probe(matrix_folder, trainer.progress.note, lambda: stop.requested) as shared:
        trainer.diagnostics.make_probe(shared)
    with whole_file(trainer.run.probe_path) as copy:
        shutil.copyfile(shared.probe_path, copy)


@contextmanager
def only_maker_of_probe(
    matrix_folder: Path, note: Callable[[str], None], stopped: Callable[[], bool] = lambda: False
) -> Iterator[RunDir]:
    """The matrix folder, whose probe set no other process makes meanwhile; with that of a cell where its own has been lost.

    Args:
        matrix_folder: folder of the cells.
        note: says that it waits.
        stopped: whether to give the wait up.

    Raises:
        OutputError: the folder cannot be written.
        KeyboardInterrupt: ``stopped`` says so during the wait.
    """
    shared = RunDir(matrix_folder)
    with _alone(matrix_folder / PROBE_LOCK, "the probe set", note, stopped):
        of_a_cell = next(iter(sorted(matrix_folder.glob(f"*/{shared.probe_path.name}"))), None)
        if of_a_cell is not None and not shared.probe_path.exists():
            with whole_file(shared.probe_path) as copy:
                shutil.copyfile(of_a_cell, copy)
        yield shared


def evaluate_before(trainer: Trainer, stop: StopRequest, matrix_folder: Path) -> dict[str, float]:
    """The metrics of the evaluation before training: made by this run, or by another cell of the same base and taken over with its
    answers (``taken_from`` in the run's state says from which).

    Args:
        trainer: a run at step 0; its state gets the evaluation.
        stop: ends the wait for another cell.
        matrix_folder: folder of the cells.

    Raises:
        OutputError: the folder cannot be written.
        KeyboardInterrupt: a stop was requested during the wait.
    """
    if not _is_shared(trainer.config):
        return trainer.evaluate("before")
    kept = matrix_folder / FOLDER / _identity(trainer)
    what = "the evaluation before training"
    with _alone(kept.with_suffix(".lock"), what, trainer.progress.note, lambda: stop.requested):
        if kept.is_dir():
            # What cannot be read is made again.
            with suppress(OSError, ValueError, KeyError, TypeError):
                return _take_over(trainer, kept)
        metrics = trainer.evaluate("before")
        with whole_folder(kept) as folder:
            shutil.copyfile(_answers(trainer.run), folder / "answers.jsonl")
            write_json(
                folder / "evaluation.json",
                {"run": trainer.run.path.name, "evaluation": trainer.state.evaluations["before"], "metrics": metrics},
            )
    return metrics


def _is_shared(config: Config) -> bool:
    return config.eval.temperature == 0 and not config.eval.noise


def _take_over(trainer: Trainer, kept: Path) -> dict[str, float]:
    value: dict[str, Any] = json.loads((kept / "evaluation.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = value["evaluation"]
    metrics = {key: float(number) for key, number in value["metrics"].items()}
    trainer.run.evaluations_dir.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(kept / "answers.jsonl", _answers(trainer.run))
    trainer.state.evaluations["before"] = found | {"taken_from": value["run"]}
    trainer.progress.note(f"evaluation before: {found['accuracy']:.1%}, taken from {value['run']}")
    return metrics


def _identity(trainer: Trainer) -> str:
    """Hash of all that the answers and their scores depend on."""
    settings = flat_settings(trainer.config)
    kept = {key: value for key, value in settings.items() if key.startswith(SAME_SECTIONS) and key not in INDIFFERENT}
    environment = collect_env()
    machine = {name: environment[name] for name in SAME_ENVIRONMENT}
    parts = [trainer.state.base_hash, trainer.state.eval_prompts, kept, machine]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


@contextmanager
def _alone(path: Path, what: str, note: Callable[[str], None], stopped: Callable[[], bool]) -> Iterator[None]:
    """One process at a time; others wait. The lock ends with the process, however that ends. A file system without locks has
    none, and then ``what`` may be made twice."""
    with output_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        waited = False
        while _is_taken(file):
            if not waited:
                note(f"waiting for {what} that another cell is making")
                waited = True
            if stopped():
                raise KeyboardInterrupt
            time.sleep(LOOK_SECONDS)
        yield
    finally:
        os.close(file)


def _is_taken(file: int) -> bool:
    """Whether another process holds the lock; if not, it is taken."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _answers(run: RunDir) -> Path:
    return run.evaluations_dir / "step-000000.jsonl"
