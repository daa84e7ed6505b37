"""The evaluation before training, made once for all cells that begin from one base: they would answer alike, to the bit.

Before training the adapters add exactly 0, so a greedy evaluation without noise depends on the base, the questions and the
policy alone. It is taken over only where all of these are the same by identity, on the same machine and versions.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qerl.config.load import load_config
from qerl.env_info import collect_env
from qerl.errors import CheckpointError
from qerl.experiments.cells import flat_settings
from qerl.metrics.run_dir import RunDir
from qerl.train.loop import Trainer
from qerl.train.resume import TrainState, read_state

SAME_SECTIONS = ("eval.", "reward.")
SAME_SETTINGS = ("model.dtype", "rollout.max_new_tokens", "rollout.max_prompt_tokens", "train.mode")
SAME_ENVIRONMENT = ("commit", "modified", "cuda", "gpus", "versions")


def take_over_before(trainer: Trainer, others: Iterable[RunDir]) -> dict[str, float] | None:
    """The metrics of an evaluation before training that another run has made, with its answers copied; None if there is none.

    Args:
        trainer: a run at step 0; its state gets the evaluation, with ``taken_from``.
        others: run folders to look in.
    """
    config = trainer.config
    if config.eval.temperature != 0 or config.eval.noise or not config.eval.before:
        return None
    for run in others:
        state = _state(run)
        if state is None or not _same(trainer, run, state):
            continue
        first = run.read_metrics()[0]
        trainer.run.evaluations_dir.mkdir(exist_ok=True)
        shutil.copyfile(_answers(run), _answers(trainer.run))
        found: dict[str, Any] = state.evaluations["before"]
        trainer.state.evaluations["before"] = found | {"taken_from": run.path.name}
        trainer.progress.note(f"evaluation before: {found['accuracy']:.1%}, taken from {run.path.name}")
        return {key: float(value) for key, value in first.items() if key.startswith("eval/") and value is not None}
    return None


def _state(run: RunDir) -> TrainState | None:
    """State of a run that has an evaluation before training of its own; None for any other."""
    newest = run.latest_checkpoint() if run.holds_a_run() else None
    if newest is None or not _answers(run).exists():
        return None
    try:
        state = read_state(newest)
    except CheckpointError:
        return None
    before = state.evaluations.get("before")
    # From where it was made, not from where it was taken over; and not from elsewhere, where answers are left behind.
    return None if before is None or "taken_from" in before or state.portable else state


def _same(trainer: Trainer, run: RunDir, state: TrainState) -> bool:
    """Whether base, questions, policy, machine and versions are those of the run."""
    if (state.base_hash, state.eval_prompts) != (trainer.state.base_hash, trainer.state.eval_prompts):
        return False
    stored, own = flat_settings(load_config(run.config_path, [])), flat_settings(trainer.config)
    if any(stored[key] != own[key] for key in own if key in SAME_SETTINGS or key.startswith(SAME_SECTIONS)):
        return False
    there, here = run.read_json(run.env_path) or {}, collect_env()
    return all(there.get(name) == here[name] for name in SAME_ENVIRONMENT)


def _answers(run: RunDir) -> Path:
    return run.evaluations_dir / "step-000000.jsonl"
