"""Running a matrix: cell after cell, going on where it stopped, keeping what failed."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qerl.errors import ConfigError, RunStopped, nearest
from qerl.experiments.beside import check_shares
from qerl.experiments.cells import Cell
from qerl.experiments.choice import fresh_choices, is_cut, is_taken_up, record_choices, waits_for_trials
from qerl.experiments.final import missing
from qerl.experiments.matched import fingerprint, reference_of
from qerl.experiments.one_cell import FAILURES, lock, refuse_strangers, run_cell, settle_folder
from qerl.experiments.plan import Plan, open_plan, record_plan
from qerl.experiments.pool import Pool, visible_devices
from qerl.experiments.portable import DONE, Portable
from qerl.experiments.process import AGAIN, Ending, run_child
from qerl.experiments.summary import write_cell_summary
from qerl.experiments.temperature import find_temperature, initial_entropy
from qerl.metrics.files import remove_leftovers
from qerl.metrics.run_dir import RunDir
from qerl.metrics.run_lock import is_held
from qerl.train.stop import Deadline

RESERVED_SECONDS = 20.0
"""Kept back from a time limit for the checkpoint, its portable form and the summaries."""
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
    give_up: bool = False
    """Run trials that the machine ended no more: they count against their combinations (best_recipe)."""
    strict: bool = False
    """Run nothing if a cell is invalid."""
    match_only: bool = False
    """Find the temperatures and stop."""
    portable: bool = True
    """Keep ``portable/`` up to date while the matrix runs, and at its end."""
    started_by: int | None = None
    """Number of the process that has started this one for one cell, or for a search: it has recorded the plan and looked at the data, and
    writes ``portable/`` as long as it is there. None: nobody has."""

    @property
    def own_process(self) -> bool:
        """Whether this process is there for one cell, or for a search, alone."""
        return self.started_by is not None


def run_matrix(path: Path, settings: Sequence[str], out: Path | None, orders: Orders, say: Say) -> Plan:
    """Run what is left of a matrix and return its plan with the new states in its manifest.

    Raises:
        ConfigError: the matrix or the orders are refused.
        RunFolderError: a folder that a cell needs is not the matrix's, or is damaged; no cell was begun.
        RunStopped: a signal ended it; what was reached is kept.
    """
    deadline = Deadline(None if orders.max_minutes is None else 60 * orders.max_minutes - RESERVED_SECONDS)
    plan = open_plan(path, settings, out, data=not orders.own_process, only=orders.only if orders.own_process else None)
    for text in check_orders(plan, orders):
        say(text)
    if not orders.own_process:
        record_plan(plan)
        remove_leftovers(plan.out)
        for cell in plan.cells:
            settle_folder(plan, cell)
        for cell in _selected(plan, orders):
            if _is_open(plan, cell, orders) and not is_held(lock(plan, cell).folder):
                refuse_strangers(plan, cell)
    for cell in _selected(plan, orders) if orders.give_up else ():
        if is_cut(plan, cell):
            plan.manifest.note(cell.name, given_up=True)
    for cell in plan.cells:
        if cell.problem is not None:
            say(f"{cell.name}: invalid, left out: {cell.problem}")
    for cell in _selected(plan, orders):
        names = _missing_finals(plan, cell) if plan.state(cell) == "finished" else []
        if names and not _lacks_finals(plan, cell):
            say(f"{cell.name}: finished without {', '.join(names)}, and its checkpoint is not here to make up for it")
    if orders.match_only or orders.one_process:
        plan = _find_temperatures(plan, orders, deadline, say)
    stopped: RunStopped | None = None
    with Portable(plan, wanted=orders.portable and not orders.own_process) as portable:
        if not orders.match_only:
            run = _run_here if orders.one_process else _run_pool
            try:
                plan = run(plan, orders, deadline, say, portable)
            except RunStopped as stop:
                stopped = stop
    if orders.portable and orders.own_process and not orders.match_only and os.getppid() != orders.started_by:
        # The matrix was killed, and cannot carry what it has started.
        with Portable(replace(plan, cells=tuple(_selected(plan, orders))), wanted=True):
            pass
    if stopped is not None:
        raise stopped
    return plan


def _run_here(plan: Plan, orders: Orders, deadline: Deadline, say: Say, portable: Portable) -> Plan:
    """One cell after another in this process."""
    tried: set[str] = set()
    while True:
        plan = _settle_choices(plan, orders, deadline, say)
        due = [cell for cell in _selected(plan, orders) if cell.name not in tried and _is_due(plan, cell, orders)]
        if not due or not _has_time(plan, deadline, say):
            return plan
        tried.add(due[0].name)
        state = run_cell(plan, due[0], deadline, own_process=orders.own_process)
        portable.take(due[0])
        say(f"{due[0].name}: {state}")
        if state in UNDONE:
            return plan


def _run_pool(plan: Plan, orders: Orders, deadline: Deadline, say: Say, portable: Portable) -> Plan:
    """Every cell in a process of its own, as many at one time as ``jobs`` says."""
    devices = visible_devices()
    # One cell at a time may take any GPU; where only one is visible its name tells it from another command's.
    pool = Pool(plan, orders.jobs, devices if orders.jobs > 1 or len(devices) == 1 else ())
    tried: set[str] = set()
    """Cells that were begun, and groups whose temperature was asked for."""
    crowded: dict[str, bool] = {}
    """Cells that found no memory beside others, and whether they are still to be run once more: by themselves, after all others."""
    over, look = False, True
    with pool.passing_signals_on() as stopping:
        while True:
            over = over or stopping()
            if look and not over and pool.has_room and (not pool.running or _common_part_is_made(plan)):
                plan = _settle_choices(plan, orders, deadline, say)
                due = _due_in_pool(plan, orders, tried)
                if not due and pool.has_idle_device:
                    due = [cell for cell in plan.cells if crowded.get(cell.name)][:1]
                    crowded |= {cell.name: False for cell in due}
                look = bool(due)
                if due and is_held(lock(plan, due[0]).folder):
                    tried.add(due[0].name)
                    say(f"{due[0].name}: another process is at work on it, left out")
                    continue
                if due and _has_time(plan, deadline, say):
                    left = deadline.seconds_left()
                    if due[0].pending:
                        tried.add(due[0].group)
                        pool.start(due[0], ["--match"], None, search=True)
                        continue
                    tried.add(due[0].name)
                    if plan.state(due[0]) == "running":
                        # Of a process that is gone; whatever becomes of the new one, this is not its state.
                        plan.manifest.set_state(due[0].name, "stopped")
                    seconds = None if left is None else left + RESERVED_SECONDS
                    more = (["--retry"] if orders.retry else []) + ([] if orders.portable else ["--no-portable"])
                    pool.start(due[0], more, seconds)
                    continue
                over = bool(due)
            if not pool.running:
                return plan
            pool.wait()
            portable.look_at(entry.cell for entry in pool.running if not entry.search)
            for entry, ending in pool.take_ended():
                look = True
                if entry.search:
                    plan = _searched(plan, entry.cell, ending, say)
                    continue
                state = _ended(plan, entry.cell, ending)
                portable.take(entry.cell)
                error = plan.manifest.cell(entry.cell.name).get("error") if state == "failed" else None
                again = f"{AGAIN if is_taken_up(plan, entry.cell) else '--retry'} runs it again"
                if state == "failed" and plan.is_crowded(entry.cell) and crowded.setdefault(entry.cell.name, True):
                    again = "It is run once more when a GPU is free"
                say(f"{entry.cell.name}: {state}" + (f": {error}. {again}" if error else ""))
                over = over or state in UNDONE


def _common_part_is_made(plan: Plan) -> bool:
    """Whether what all cells share, the probe set, is there, or none asks for it: the first cell makes it before all else."""
    asked = any(cell.config is not None and cell.config.diagnostics.every for cell in plan.cells)
    return not asked or RunDir(plan.out).probe_path.exists()


def _due_in_pool(plan: Plan, orders: Orders, tried: Collection[str]) -> list[Cell]:
    """Cells that can be run now, in their order; a pending one stands for the search for its temperature."""
    left = [cell for cell in _selected(plan, orders) if cell.name not in tried]
    return [
        cell
        for cell in left
        if _is_due(plan, cell, orders) or (cell.group not in tried and _asks_for_temperature(plan, cell, orders))
    ]


def _searched(plan: Plan, cell: Cell, ending: Ending, say: Say) -> Plan:
    """The plan with what a search has found; says what that is."""
    if ending.code not in (0, 1):
        if not ending.by_request:
            say(f"{cell.group}: no temperature found: {ending.words}")
        return plan
    _say_temperatures(plan, [cell], say)
    return open_plan(plan.path, plan.settings, plan.out, data=False)


def check_orders(plan: Plan, orders: Orders) -> list[str]:
    """Refuse orders that the plan cannot follow; returns what is to be known of the others.

    Raises:
        ConfigError: an unknown cell, orders that exclude each other, cells that would take each other's memory, or with ``strict`` a cell that
            cannot run.
    """
    if orders.jobs > 1 and orders.one_process:
        raise ConfigError("cells in one process run one after another", got=f"--jobs {orders.jobs} --one-process")
    if orders.retry and orders.give_up:
        raise ConfigError("failed trials are run again or given up", got="--retry --give-up", remedy="Leave one out")
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
    if orders.jobs == 1:
        return []
    due = [cell for cell in _selected(plan, orders) if _is_open(plan, cell, orders)]
    return check_shares(due, orders.jobs, len(visible_devices()))


def _selected(plan: Plan, orders: Orders) -> list[Cell]:
    """The cells asked for: in the order in which they were named, or all in the matrix's."""
    by_name = {cell.name: cell for cell in plan.cells}
    return [by_name[name] for name in dict.fromkeys(orders.only or by_name)]


def _is_due(plan: Plan, cell: Cell, orders: Orders) -> bool:
    return cell.problem is None and not cell.pending and _is_open(plan, cell, orders)


def _is_open(plan: Plan, cell: Cell, orders: Orders) -> bool:
    state = plan.state(cell)
    again = state == "failed" and (orders.retry or is_taken_up(plan, cell))
    return state not in DONE or again or (state == "finished" and _lacks_finals(plan, cell))


def _lacks_finals(plan: Plan, cell: Cell) -> bool:
    """Whether a finished cell lacks an evaluation that the matrix asks for by now, and its model is here to make it."""
    return plan.run(cell).latest_checkpoint() is not None and bool(_missing_finals(plan, cell))


def _missing_finals(plan: Plan, cell: Cell) -> list[str]:
    """Evaluations that a cell with all its steps has not had."""
    if cell.phase == "tune" or cell.config is None:
        return []
    return [spec.name for spec in missing(plan.run(cell), plan.matrix.final, cell.config)]


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


def _ended(plan: Plan, cell: Cell, ending: Ending) -> str:
    """State of a cell whose process has ended."""
    state = plan.state(cell)
    if is_held(lock(plan, cell).folder):
        return "another process is at work on it"
    if state == "running" and ending.by_request:
        plan.manifest.set_state(cell.name, "stopped")
        write_cell_summary(plan, cell)
    elif state == "running" or (ending.code not in (0, 1) and not ending.by_request and state not in DONE):
        # The process ended without a word of its own: killed, or out of memory.
        plan.manifest.set_state(cell.name, "failed", error=ending.words)
        write_cell_summary(plan, cell)
    return plan.state(cell)


def _asks_for_temperature(plan: Plan, cell: Cell, orders: Orders) -> bool:
    """Whether a cell waits for its temperature alone."""
    asks = cell.pending and cell.problem is None and cell.arm.match_temperature is not None
    return asks and not waits_for_trials(plan, cell) and _is_open(plan, cell, orders)


def _find_temperatures(plan: Plan, orders: Orders, deadline: Deadline, say: Say) -> Plan:
    """Find what ``match_temperature`` asks for and is not known yet; one search a group, for all its seeds. A search that has begun is
    finished, whatever the deadline."""
    open_groups: dict[str, Cell] = {}
    for cell in _selected(plan, orders):
        if _asks_for_temperature(plan, cell, orders):
            open_groups.setdefault(cell.group, cell)
    left = deadline.seconds_left()
    if not open_groups or (left is not None and left <= 0):
        return plan
    if not orders.one_process:
        arguments = ["--match", *(part for cell in open_groups.values() for part in ("--cell", cell.name))]
        error = run_child(plan, arguments)
        if error is not None:
            say(f"temperatures were not found: {error}")
            return plan
    else:
        for group, cell in open_groups.items():
            _match_group(plan, group, cell)
    _say_temperatures(plan, list(open_groups.values()), say)
    return open_plan(plan.path, plan.settings, plan.out, data=False)


def _say_temperatures(plan: Plan, cells: Sequence[Cell], say: Say) -> None:
    matched = plan.manifest.read()["matched"]
    for cell in cells:
        found = matched.get(cell.group)
        if found is None:
            say(f"{cell.group}: no temperature found: {plan.manifest.cell(cell.name).get('error')}")
        else:
            say(
                f"{cell.group}: temperature {found['temperature']:.4f} has the entropy of {found['arm']}, {found['entropy']:.4f} nats"
            )


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
        # The first of two searches at one time counts: cells may have been begun with what it found.
        if value["matched"].get(group, {}).get("of") != found["of"]:
            value["matched"][group] = found


def _find(plan: Plan, cell: Cell) -> dict[str, Any]:
    """The temperature of a cell's group: its reference is the cell of the matched arm at the same axis values."""
    match = cell.arm.match_temperature
    assert match is not None and cell.config is not None
    reference = reference_of(plan.cells, cell)
    if reference is None or reference.config is None or reference.problem is not None:
        raise ConfigError("the arm whose entropy is matched has no valid cell at these axis values", got=match.arm)
    target = initial_entropy(reference.config, RunDir(plan.out), draws=match.draws)
    gc.collect()
    found = find_temperature(cell.config, RunDir(plan.out), target, match)
    gc.collect()
    return found.to_dict() | {"arm": match.arm, "of": fingerprint(cell, reference, plan.out)}


def _settle_choices(plan: Plan, orders: Orders, deadline: Deadline, say: Say) -> Plan:
    """Choose the settings of arms whose trials have all ended (best_recipe), and take over what another command has chosen. A process
    that is there for one cell leaves it to the command that looks at all."""
    if orders.own_process:
        return plan
    known = plan.manifest.read()["choices"]
    fresh = fresh_choices(plan, known)
    news = any(waits_for_trials(plan, cell) and known.get(cell.arm.name, {}).get("axes") for cell in plan.cells)
    if not fresh:
        return open_plan(plan.path, plan.settings, plan.out, data=False) if news else plan
    for text in record_choices(plan, fresh):
        say(text)
    plan = open_plan(plan.path, plan.settings, plan.out, data=False)
    # Beside running cells it is searched for when its turn comes.
    return _find_temperatures(plan, orders, deadline, say) if orders.one_process else plan
