"""One cell of a matrix: training, the evaluations after it, and what is kept of it, whatever became of it."""

from __future__ import annotations

import gc
import os
import shutil

import torch

from qerl.errors import DeviceMemoryError, QerlError, RunFolderError, RunStopped, TrainingError
from qerl.experiments.cells import Cell
from qerl.experiments.final import Trained, evaluate_trained, from_trainer, missing, reopen
from qerl.experiments.manifest import UNBEGUN, State, work_folder
from qerl.experiments.plan import Plan
from qerl.experiments.process import AGAIN
from qerl.experiments.shared import evaluate_before, take_probe
from qerl.experiments.summary import SUMMARY_FILE, stored_summary, write_cell_summary
from qerl.metrics.files import is_temporary
from qerl.metrics.run_dir import RunDir
from qerl.metrics.run_lock import LOCK_NAME, RunLock, is_held
from qerl.train.fit import within_budget
from qerl.train.run import train
from qerl.train.stop import Deadline, StopRequest

FAILURES = (QerlError, RuntimeError, MemoryError, ArithmeticError, AssertionError)
"""What ends a cell and not the matrix: refused settings, numbers that are not finite, memory that ran out, broken invariants."""
COLLAPSES = (TrainingError, ArithmeticError)
"""Of these, what says something of the arm: its training could not go on. The others say something of the machine or of the program."""


def lock(plan: Plan, cell: Cell) -> RunLock:
    """What one process alone may hold that works on a cell."""
    return RunLock(work_folder(plan.out, cell.name), "cell", "Wait until it ends, or stop that process")


def run_cell(plan: Plan, cell: Cell, deadline: Deadline, *, own_process: bool) -> str:
    """Run, or go on with, one cell in this process, which may be its own; returns its new state. What fails is kept.

    Raises:
        RunStopped: a signal ended it, after a step or at once; its state is ``stopped``, or ``trained`` after the last step.
        RunFolderError: another process is at work on it, or its folder is not the matrix's; nothing is changed.
    """
    with lock(plan, cell):
        return _run_locked(plan, cell, deadline, own_process=own_process)


def _run_locked(plan: Plan, cell: Cell, deadline: Deadline, *, own_process: bool) -> str:
    assert cell.config is not None
    run = plan.run(cell)
    refuse_strangers(plan, cell)
    plan.manifest.set_state(
        cell.name, "running", error=None, collapse=None, given_up=None, crowded=None, own_process=own_process
    )
    _mark_sharing(plan, cell)
    try:
        state = _train_and_evaluate(plan, cell, run, deadline)
        plan.manifest.set_state(cell.name, state)
    except RunStopped:
        plan.manifest.set_state(cell.name, "trained" if has_all_steps(run) else "stopped")
        write_cell_summary(plan, cell)
        raise
    except FAILURES as error:
        what = str(error) or type(error).__name__
        error_text = f"{type(error).__name__}: {what}"[:2000]
        collapse, crowded = isinstance(error, COLLAPSES), isinstance(error, DeviceMemoryError) and error.crowded
        facts = {"error": error_text, "collapse": collapse or None, "crowded": crowded or None}
        plan.manifest.set_state(cell.name, "failed", **facts)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    write_cell_summary(plan, cell)
    return plan.state(cell)


def _train_and_evaluate(plan: Plan, cell: Cell, run: RunDir, deadline: Deadline) -> State:
    # Trials are judged by their evaluation after training alone.
    config, specs = cell.config, () if cell.phase == "tune" else plan.matrix.final
    assert config is not None
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    done, signal_number = True, None

    def finals(trained: Trained, stop: StopRequest) -> None:
        """Those that there is time for, until a signal comes."""
        nonlocal done, signal_number

        def time_for(seconds: float) -> bool:
            left = deadline.seconds_left()
            return not stop.requested and (left is None or left > seconds)

        done = evaluate_trained(trained, specs, time_for, lambda: stop.requested)
        signal_number = stop.signal_number

    if has_all_steps(run):
        if missing(run, specs, config):
            with within_budget(config), StopRequest(lambda text: None) as stop:
                finals(reopen(config, run), stop)
    else:
        train(
            config,
            resume=_prepare(run),
            deadline=deadline,
            begin=lambda trainer, stop: take_probe(trainer, stop, plan.out),
            before=lambda trainer, stop: evaluate_before(trainer, stop, plan.out),
            after=lambda trainer, stop: finals(from_trainer(trainer), stop),
            again=AGAIN,
        )
        if not has_all_steps(run):
            return "stopped"
    if signal_number is not None and not done:
        raise RunStopped(f"stopped between evaluations of the trained model. {AGAIN} goes on", signal_number)
    return "finished" if done else "trained"


def _mark_sharing(plan: Plan, cell: Cell) -> None:
    """Mark this cell and those beside it on its device, of whatever command: their times are not their own.

    Of two that begin together each holds its lock before it looks, so that at least the later one sees the other.
    """
    names = plan.manifest.at_work(plan.manifest.cell(cell.name).get("device"))
    if set(names) - {cell.name}:
        plan.manifest.note_sharing([cell.name, *names])


def settle_folder(plan: Plan, cell: Cell) -> None:
    """What a kill or a copy left of a cell that no process is at work on is made whole, and its state that of its folder: of a matrix
    that was copied while it ran, the manifest may be older than a cell, or newer. A finished cell may have its summary alone.

    Raises:
        OutputError: the folder cannot be written.
        RunFolderError: something that is no folder has its name, or the summary that is kept in place of its run is damaged; nothing is
            changed.
    """
    run, state = plan.run(cell), plan.state(cell)
    if os.path.lexists(run.path) and not run.path.is_dir():
        raise RunFolderError(
            "something that is no folder has the name of a cell's",
            got=run.path,
            remedy="Move it away, or choose another --out",
        )
    run.recover()
    stored = stored_summary(run.path)
    kept = stored is not None and stored["state"] == state == "finished"
    begun = state == "waiting" and run.config_path.exists()
    undone = state in ("trained", "finished") and not (kept or has_all_steps(run))
    if (begun or undone) and not is_held(lock(plan, cell).folder):
        plan.manifest.set_state(cell.name, "stopped")


def has_all_steps(run: RunDir) -> bool:
    """Whether a run has made its last step and said so."""
    return run.holds_a_run() and (run.read_json(run.summary_path) or {}).get("status") == "finished"


def refuse_strangers(plan: Plan, cell: Cell) -> None:
    """A folder that the matrix has not made is left alone, and so is what a link leads to: beginning a cell anew removes its folder. The
    summary of a cell that never began is nothing.

    Raises:
        RunFolderError: there is one, with something in it.
    """
    run = plan.run(cell)
    names = {path.name for path in run.path.iterdir() if not is_temporary(path)} if run.path.exists() else set()
    if not names or run.latest_checkpoint() is not None:
        return
    stored = stored_summary(run.path)
    if plan.state(cell) == "waiting":
        own = names == {SUMMARY_FILE} and stored is not None and stored["state"] in UNBEGUN
    else:
        own = run.holds_a_run() or run.cell_path.exists() or stored is not None or names == {LOCK_NAME}
    if not own:
        raise RunFolderError(
            "the cell's folder holds something that is not the matrix's",
            got=run.path,
            remedy="Move it away, or choose another --out",
        )
    if run.path.is_symlink():
        raise RunFolderError(
            "the cell is to begin anew, and its folder is a link to another",
            got=f"{run.path} -> {run.path.readlink()}",
            expected="a folder that may be removed, or a link to an empty one",
            remedy="Remove the link, or what is in that folder",
        )


def _prepare(run: RunDir) -> bool:
    """Whether to go on from a checkpoint. A start that never saved is begun anew.

    Raises:
        RunFolderError: there is a checkpoint, and not what its run was: it is not thrown away.
    """
    saved = run.latest_checkpoint()
    if saved is not None and not run.holds_a_run():
        raise RunFolderError(
            "the cell has a checkpoint and has lost its settings",
            got=saved,
            expected=f"{run.config_path.name} in its folder",
            remedy="Copy it again from portable/ or where it was whole, or remove the folder to begin anew",
        )
    if saved is not None:
        return True
    # An empty folder may be a link to another disk.
    if run.path.exists() and any(run.path.iterdir()):
        shutil.rmtree(run.path)
    return False
