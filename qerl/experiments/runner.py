"""Running a matrix: cell after cell, going on where it stopped, keeping what failed."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qerl.errors import ConfigError, QerlError, RunFolderError, RunStopped, nearest
from qerl.experiments.cells import Cell
from qerl.experiments.choice import choose
from qerl.experiments.final import evaluate_trained, from_trainer, reopen, wanted
from qerl.experiments.plan import Plan, open_plan, record_plan
from qerl.experiments.pool import Pool, visible_devices
from qerl.experiments.process import run_child
from qerl.experiments.shared import take_over_before
from qerl.experiments.summary import write_cell_summary
from qerl.experiments.temperature import find_temperature, initial_entropy
from qerl.metrics.files import whole_folder
from qerl.metrics.run_dir import RunDir
from qerl.train.portable import write_portable_run
from qerl.train.run import train
from qerl.train.stop import Deadline

PORTABLE = "portable"
"""Folder of the matrix folder with what goes to another machine."""
FAILURES = (QerlError, RuntimeError, ArithmeticError, AssertionError)
"""What ends a cell and not the matrix: refused settings, numbers that are not finite, memory that ran out, broken invariants."""
RESERVED_SECONDS = 20.0
"""Kept back from a time limit for the checkpoint, its portable form and the summaries."""
DONE = ("finished", "failed", "invalid")
UNDONE = ("stopped", "trained", "running")
"""States in which a cell ends when time is up."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """How a matrix is run."""

    only: tuple[str, ...] = ()
    """Names of cells; empty runs all."""
    max_minutes: float | None = None
    one_process: bool = False
    """Run the cells in this process; otherwise each has one of its own."""
    jobs: int = 1
    """Cells at one time, each in a process of its own."""
    retry: bool = False
    """Run failed cells again, from their last checkpoint if they have one."""
    strict: bool = False
    """Run nothing if a cell is invalid."""
    match_only: bool = False
    """Find the temperatures and stop."""
    portable: bool = True
    """Write ``portable/`` at the end."""


def run_matrix(path: Path, settings: Sequence[str], out: Path | None, orders: Orders, say: Say) -> Plan:
    """Run what is left of a matrix and return its plan with the new states in its manifest.

    Raises:
        ConfigError: the matrix or the orders are refused.
        RunStopped: SIGINT or SIGTERM ended it; what was reached is kept.
    """
    deadline = Deadline(None if orders.max_minutes is None else 60 * orders.max_minutes - RESERVED_SECONDS)
    # A cell's own process leaves out what the one that started it has looked at.
    plan = open_plan(path, settings, out, data=orders.portable)
    _check_orders(plan, orders)
    if orders.portable:
        record_plan(plan)
    for cell in plan.cells:
        if cell.problem is not None:
            say(f"{cell.name}: invalid, left out: {cell.problem}")
    plan = _find_temperatures(plan, orders, say)
    stopped: RunStopped | None = None
    if not orders.match_only:
        try:
            plan = (
                _run_here(plan, orders, deadline, say) if orders.one_process else _run_pool(plan, orders, deadline, say)
            )
        except RunStopped as stop:
            stopped = stop
    if orders.portable:
        _write_portable(plan)
    if stopped is not None:
        raise RunStopped(f"{stopped}. The same matrix command goes on", stopped.exit_code - 128)
    return plan


def _run_here(plan: Plan, orders: Orders, deadline: Deadline, say: Say) -> Plan:
    """One cell after another in this process."""
    tried: set[str] = set()
    while True:
        plan, due = _what_is_due(plan, orders, say, tried)
        if not due or not _has_time(plan, deadline, say):
            return plan
        tried.add(due[0].name)
        state = run_cell(plan, due[0], deadline, own_process=not orders.portable)
        say(f"{due[0].name}: {state}")
        if state in UNDONE:
            return plan


def _run_pool(plan: Plan, orders: Orders, deadline: Deadline, say: Say) -> Plan:
    """Every cell in a process of its own, as many at one time as ``jobs`` says."""
    pool = Pool(plan, orders.jobs, visible_devices() if orders.jobs > 1 else ())
    tried: set[str] = set()
    over, look = False, True
    with pool.passing_signals_on() as stopping:
        while True:
            over = over or stopping()
            if look and not over and pool.has_room and (not pool.running or _common_part_is_made(plan)):
                plan, due = _what_is_due(plan, orders, say, tried)
                look = bool(due)
                if due and _has_time(plan, deadline, say):
                    left = deadline.seconds_left()
                    tried.add(due[0].name)
                    seconds = None if left is None else left + RESERVED_SECONDS
                    pool.start(due[0], ["--retry"] if orders.retry else [], seconds)
                    continue
                over = bool(due)
            if not pool.running:
                return plan
            pool.wait()
            for cell, error in pool.take_ended():
                state = _ended(plan, cell, error)
                say(f"{cell.name}: {state}")
                look, over = True, over or state in UNDONE


def _common_part_is_made(plan: Plan) -> bool:
    """Whether a cell has made its first step: what all cells share, the probe set, is then there to be taken over."""
    begun = [run for cell in plan.cells if (run := plan.run(cell)).metrics_path.exists()]
    for run in begun:
        _share_probe(plan, run)
    return bool(begun)


def _what_is_due(plan: Plan, orders: Orders, say: Say, tried: Collection[str]) -> tuple[Plan, list[Cell]]:
    """The plan with what trials have chosen since, and the cells that are to be run now."""
    plan = _settle_choices(plan, orders, say)
    return plan, [cell for cell in _selected(plan, orders) if cell.name not in tried and _is_due(plan, cell, orders)]


def _check_orders(plan: Plan, orders: Orders) -> None:
    if orders.jobs > 1 and orders.one_process:
        raise ConfigError("cells in one process run one after another", got=f"--jobs {orders.jobs} --one-process")
    names = [cell.name for cell in plan.cells]
    for name in orders.only:
        if name not in names:
            near = nearest(name, names)
            raise ConfigError(
                "the matrix has no such cell", got=name, remedy=f"Did you mean {near}?" if near else "See --dry-run"
            )
    invalid = [cell.name for cell in plan.cells if cell.problem is not None]
    if orders.strict and invalid:
        problems = "\n  - ".join(f"{cell.name}: {cell.problem}" for cell in plan.cells if cell.problem is not None)
        raise ConfigError(f"{len(invalid)} of {len(names)} cells cannot run:\n  - {problems}")


def _selected(plan: Plan, orders: Orders) -> list[Cell]:
    return [cell for cell in plan.cells if not orders.only or cell.name in orders.only]


def _is_due(plan: Plan, cell: Cell, orders: Orders) -> bool:
    state = plan.state(cell)
    return cell.problem is None and not cell.pending and (state not in DONE or (state == "failed" and orders.retry))


def _has_time(plan: Plan, deadline: Deadline, say: Say) -> bool:
    """Whether a cell can be set up, evaluated and make a few steps, going by the cells before it; says so if not."""
    left = deadline.seconds_left()
    if left is None:
        return True
    known = []
    for cell in plan.cells:
        rows = plan.run(cell).read_metrics()[:2] if plan.run(cell).metrics_path.exists() else []
        known += [float(row["time/elapsed"]) + 3 * float(row["time/step"]) for row in rows[1:] if "time/elapsed" in row]
    enough = left > max(known, default=0.0)
    if not enough:
        say("time is up; the same command goes on")
    return enough


def _ended(plan: Plan, cell: Cell, error: str | None) -> str:
    """State of a cell whose process has ended, and why badly."""
    state = plan.state(cell)
    if state == "running" or (state == "waiting" and error is not None):
        # The process ended without a word of its own: killed, or out of memory.
        plan.manifest.set_state(cell.name, "failed", error=error or "the process ended without a result")
        write_cell_summary(plan, cell)
    return plan.state(cell)


def run_cell(plan: Plan, cell: Cell, deadline: Deadline, *, own_process: bool) -> str:
    """Run, or go on with, one cell in this process, which may be its own; returns its new state. What fails is kept.

    Raises:
        RunStopped: a signal ended it, after a step or at once; its state is ``stopped``.
    """
    assert cell.config is not None
    run = plan.run(cell)
    _refuse_strangers(plan, cell, run)
    plan.manifest.set_state(cell.name, "running", error=None, own_process=own_process)
    try:
        state = _train_and_evaluate(plan, cell, run, deadline)
        plan.manifest.set_state(cell.name, state)
    except RunStopped:
        plan.manifest.set_state(cell.name, "stopped")
        write_cell_summary(plan, cell)
        raise
    except FAILURES as error:
        what = str(error) or type(error).__name__
        plan.manifest.set_state(cell.name, "failed", error=f"{type(error).__name__}: {what}"[:2000])
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    write_cell_summary(plan, cell)
    return plan.state(cell)


def _train_and_evaluate(plan: Plan, cell: Cell, run: RunDir, deadline: Deadline) -> Any:
    # Trials are judged by their evaluation after training alone.
    config, specs = cell.config, () if cell.phase == "tune" else plan.matrix.final
    assert config is not None
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    done = {"finals": True}

    def time_for(seconds: float) -> bool:
        left = deadline.seconds_left()
        return left is None or left > seconds

    summary = run.read_json(run.summary_path) if run.holds_a_run() else None
    if summary is not None and summary["status"] == "finished":
        if len(run.read_json(run.final_path) or {}) < len(wanted(specs, config)):
            done["finals"] = evaluate_trained(reopen(config, run), specs, time_for)
    else:
        resume = _prepare(plan, run)
        try:
            train(
                config,
                resume=resume,
                deadline=deadline,
                before=lambda trainer: take_over_before(trainer, (plan.run(c) for c in plan.cells if c != cell)),
                after=lambda trainer: done.update(finals=evaluate_trained(from_trainer(trainer), specs, time_for)),
            )
        finally:
            _share_probe(plan, run)
        if (run.read_json(run.summary_path) or {}).get("status") != "finished":
            return "stopped"
    return "finished" if done["finals"] else "trained"


def _refuse_strangers(plan: Plan, cell: Cell, run: RunDir) -> None:
    """A folder of the cell's name that the matrix has not made is left alone.

    Raises:
        RunFolderError: there is one, with something in it.
    """
    if plan.state(cell) == "waiting" and run.path.exists() and any(run.path.iterdir()):
        raise RunFolderError(
            "the cell's folder holds something that is not the matrix's",
            got=run.path,
            remedy="Move it away, or choose another --out",
        )


def _prepare(plan: Plan, run: RunDir) -> bool:
    """Whether to go on from a checkpoint. A start that never saved is begun anew; every cell gets the matrix's probe set."""
    if run.holds_a_run() and run.latest_checkpoint() is not None:
        return True
    if run.path.exists():
        shutil.rmtree(run.path)
    shared = RunDir(plan.out).probe_path
    if shared.exists():
        run.path.mkdir(parents=True)
        shutil.copyfile(shared, run.probe_path)
    return False


def _share_probe(plan: Plan, run: RunDir) -> None:
    """The first cell's probe set becomes that of all: entropies are compared on one set."""
    shared = RunDir(plan.out).probe_path
    if run.probe_path.exists() and not shared.exists():
        shutil.copyfile(run.probe_path, shared)


def _find_temperatures(plan: Plan, orders: Orders, say: Say) -> Plan:
    """Find what ``match_temperature`` asks for and is not known yet; one search a group, for all its seeds."""
    open_groups: dict[str, Cell] = {}
    for cell in _selected(plan, orders):
        open_choice = cell.phase == "final" and not cell.axes and bool(plan.matrix.axes_of(cell.arm))
        asks = cell.pending and cell.problem is None and cell.arm.match_temperature is not None and not open_choice
        if asks and plan.state(cell) not in DONE:
            open_groups.setdefault(cell.group, cell)
    if not open_groups:
        return plan
    if not orders.one_process:
        arguments = ["--match", *(part for cell in open_groups.values() for part in ("--cell", cell.name))]
        error = run_child(plan, arguments, None)
        if error is not None:
            say(error)
    else:
        for group, cell in open_groups.items():
            _match_group(plan, group, cell)
    matched = plan.manifest.read()["matched"]
    for group, cell in open_groups.items():
        found = matched.get(group)
        if found is None:
            say(f"{group}: no temperature found: {plan.manifest.cell(cell.name).get('error')}")
        else:
            say(
                f"{group}: temperature {found['temperature']:.4f} has the entropy of {found['arm']}, {found['entropy']:.4f} nats"
            )
    return open_plan(plan.path, plan.settings, plan.out, data=False)


def _match_group(plan: Plan, group: str, cell: Cell) -> None:
    """Find the temperature of a group and record it; all its cells fail if there is none."""
    try:
        found = _find(plan, cell)
    except FAILURES as error:
        for other in plan.cells:
            if other.group == group:
                plan.manifest.set_state(other.name, "failed", error=f"its temperature was not found: {error}")
        return
    with plan.manifest.change() as value:
        value["matched"][group] = found


def _find(plan: Plan, cell: Cell) -> dict[str, Any]:
    """The temperature of a cell's group: its reference is the cell of the matched arm at the same axis values."""
    match = cell.arm.match_temperature
    assert match is not None and cell.config is not None
    reference = next(
        (c for c in plan.cells if c.arm.name == match.arm and c.axes == cell.axes and c.phase == cell.phase), None
    )
    if reference is None or reference.config is None or reference.problem is not None:
        raise ConfigError("the arm whose entropy is matched has no valid cell at these axis values", got=match.arm)
    target = initial_entropy(reference.config, RunDir(plan.out), draws=match.draws)
    gc.collect()
    found = find_temperature(cell.config, RunDir(plan.out), target, match)
    gc.collect()
    return found.to_dict() | {"arm": match.arm}


def _settle_choices(plan: Plan, orders: Orders, say: Say) -> Plan:
    """Choose the settings of arms whose trials have all ended (best_recipe)."""
    chosen = choose(plan)
    known = plan.manifest.read()["choices"]
    fresh = {arm: choice for arm, choice in chosen.items() if arm not in known}
    if not fresh:
        return plan
    with plan.manifest.change() as value:
        value["choices"] |= fresh
    for arm, choice in fresh.items():
        if choice["axes"] is None:
            for cell in plan.cells:
                if cell.arm.name == arm and cell.phase == "final":
                    plan.manifest.set_state(cell.name, "failed", error="none of its trials finished")
        say(f"{arm}: chose {choice['axes']} among {choice['trials']} trials ({choice['failed']} failed)")
    plan = open_plan(plan.path, plan.settings, plan.out, data=False)
    return _find_temperatures(plan, orders, say)


def _write_portable(plan: Plan) -> None:
    """``portable/``: the matrix folder without what is large; cells that are not done have their checkpoint in it."""
    with whole_folder(plan.out / PORTABLE) as folder:
        for path in (plan.manifest.path, RunDir(plan.out).probe_path):
            if path.exists():
                shutil.copyfile(path, folder / path.name)
        for cell in plan.cells:
            run = plan.run(cell)
            if run.holds_a_run():
                # Full-parameter checkpoints have no portable form: such a cell goes on only where it is.
                small = plan.state(cell) not in DONE and cell.config is not None and cell.config.train.mode != "full"
                write_portable_run(run, folder / cell.name, checkpoint=small)
            elif run.cell_path.exists():
                (folder / cell.name).mkdir()
                shutil.copyfile(run.cell_path, folder / cell.name / run.cell_path.name)
