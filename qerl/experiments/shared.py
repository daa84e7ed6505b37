"""The evaluation before training, made once for all cells that begin from one base: they would answer alike, to the bit.

Before training the adapters add exactly 0, so a greedy evaluation without noise depends on the base, the questions and the
policy alone. It is kept in the matrix folder under the hash of all of these, of machine and versions; a cell that needs one
which another process is making waits for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qerl.config.schema import Config
from qerl.env_info import collect_env
from qerl.experiments.cells import flat_settings
from qerl.metrics.files import output_errors, whole_folder, write_json
from qerl.metrics.run_dir import RunDir
from qerl.train.loop import Trainer
from qerl.train.stop import StopRequest

LOOK_SECONDS = 0.1
FOLDER = ".before"
"""Folder of the matrix folder with the evaluations before training; it does not go to another machine."""
SAME_SECTIONS = ("eval.", "reward.", "model.", "rollout.", "train.mode")
INDIFFERENT = ("model.path", "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p")
"""Of these sections, what an evaluation does not depend on: weights go by their hash, and evaluations have a sampler of their own."""
SAME_ENVIRONMENT = ("commit", "modified", "cuda", "gpus", "versions")


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
    with _alone(kept.with_suffix(".lock"), trainer, stop):
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
def _alone(path: Path, trainer: Trainer, stop: StopRequest) -> Iterator[None]:
    """One process at a time; others wait. The lock ends with the process, however that ends. A file system without locks has
    none, and then an evaluation may be made twice."""
    with output_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        waited = False
        while _is_taken(file):
            if not waited:
                trainer.progress.note("waiting for the evaluation before training that another cell is making")
                waited = True
            if stop.requested:
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
