"""best_recipe: which trial of each arm is trained anew. One rule for all arms; collapsed trials count as trials."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

from qerl.errors import ConfigError
from qerl.experiments.summary import stored_summary
from qerl.metrics.run_dir import RunDir

if TYPE_CHECKING:
    from qerl.experiments.cells import Cell
    from qerl.experiments.plan import Plan

NO_TRIAL = "none of its trials finished"
"""Error of the final runs of an arm that could not choose."""


def is_cut(plan: Plan, cell: Cell) -> bool:
    """Whether a trial was ended by the machine (a kill, memory, a full disk) and not by its training: it says nothing of its recipe, and
    is run again, unless it was given up. One without a temperature has not begun."""
    failed = cell.phase == "tune" and plan.state(cell) == "failed" and not cell.pending
    entry = plan.manifest.cell(cell.name)
    return failed and not entry.get("collapse") and not entry.get("given_up")


def is_taken_up(plan: Plan, cell: Cell) -> bool:
    """Whether a failed cell is run again by the same command: what ended it was none of its own."""
    return is_cut(plan, cell) or plan.is_crowded(cell)


def waits_for_trials(plan: Plan, cell: Cell) -> bool:
    """Whether a cell of a final run has no settings yet, for its arm has not chosen."""
    return cell.pending and cell.phase == "final" and not cell.axes and bool(plan.matrix.axes_of(cell.arm))


def waiting_arms(plan: Plan) -> list[str]:
    """A line for each arm that has not chosen because trials were cut: what it waits for, and what to do."""
    lines = []
    for arm in plan.matrix.arms:
        cells = [cell for cell in plan.cells if cell.arm.name == arm.name]
        cut = [cell.name for cell in cells if is_cut(plan, cell)]
        if cut and any(waits_for_trials(plan, cell) for cell in cells):
            lines.append(
                f"{arm.name} waits for trials that the machine ended: {', '.join(cut)}. The same command runs them again; "
                "--give-up counts them against their combinations"
            )
    return lines


def choose(plan: Plan) -> dict[str, dict[str, Any]]:
    """Arm -> its choice, for every arm whose trials have all ended, none of them cut; empty for other protocols.

    A recipe is one combination of axis values, its score the mean of the last accuracies of its trials over the tuning
    seeds. A recipe with a failed trial cannot be chosen; the first of equals is.

    Returns:
        ``axes`` (None when no recipe can be chosen), ``score``, ``trials``, ``failed``, ``scores`` by group.
    """
    found: dict[str, dict[str, Any]] = {}
    for arm in plan.matrix.arms:
        trials = [cell for cell in plan.cells if cell.arm.name == arm.name and cell.phase == "tune"]
        states = [plan.state(cell) for cell in trials]
        ended = all(state in ("finished", "failed", "invalid") for state in states)
        if not trials or not ended or any(is_cut(plan, cell) for cell in trials):
            continue
        scores: dict[str, list[float | None]] = {}
        axes: dict[str, dict[str, Any]] = {}
        for cell, state in zip(trials, states, strict=True):
            score = _accuracy_after(plan.run(cell)) if state == "finished" else None
            scores.setdefault(cell.group, []).append(score)
            axes[cell.group] = cell.axes
        found[arm.name] = best_recipe(scores, axes)
    return found


def fresh_choices(plan: Plan, known: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Arm -> its choice, for those that have none among ``known``, or that could choose nothing and can now, for trials were run again."""
    return {
        arm: choice
        for arm, choice in choose(plan).items()
        if arm not in known or (known[arm]["axes"] is None and choice["axes"] is not None)
    }


def record_choices(plan: Plan, fresh: Mapping[str, dict[str, Any]]) -> list[str]:
    """Write choices into the manifest; a line of each. The final runs of an arm that has none fail, and wait when it has one."""
    with plan.manifest.change() as value:
        value["choices"] |= fresh
    for arm, choice in fresh.items():
        own = [cell for cell in plan.cells if cell.arm.name == arm]
        collapsed = all(plan.manifest.cell(cell.name).get("collapse") for cell in own if cell.phase == "tune")
        for cell in [cell for cell in own if cell.phase == "final"]:
            if choice["axes"] is None:
                plan.manifest.set_state(cell.name, "failed", error=NO_TRIAL, collapse=collapsed or None)
            elif plan.manifest.cell(cell.name).get("error") == NO_TRIAL:
                plan.manifest.set_state(cell.name, "waiting", error=None, collapse=None)
    return [
        f"{arm}: chose {choice['axes']} among {choice['trials']} trials ({choice['failed']} failed)"
        for arm, choice in fresh.items()
    ]


def check_choices(plan: Plan, known: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a matrix whose arms would now try something else than what they have chosen among.

    Args:
        plan: the matrix.
        known: arm -> its choice.

    Raises:
        ConfigError: trials have been added or taken away.
    """
    for arm, choice in known.items():
        groups = [cell.group for cell in plan.cells if cell.arm.name == arm and cell.phase == "tune"]
        if groups and (len(groups) != choice["trials"] or not set(choice.get("scores", ())) <= set(groups)):
            raise ConfigError(
                f"arm {arm} has chosen its settings among other trials",
                got=f"{len(groups)} trials: {', '.join(dict.fromkeys(groups))}",
                expected=f"the {choice['trials']} trials of which it chose {choice['axes']}",
                remedy="Choose another --out for the changed matrix",
            )


def _accuracy_after(run: RunDir) -> float | None:
    """Accuracy of a finished trial after its last step, from its run or from the summary that is kept in its place."""
    stored = stored_summary(run.path)
    if stored is not None:
        return next(
            (float(point["accuracy"]) for point in stored["evaluations"] if point["step"] == stored["steps"]), None
        )
    after = (run.read_json(run.summary_path) or {}).get("evaluation", {}).get("after")
    return None if after is None else float(after["accuracy"])


def best_recipe(scores: dict[str, list[float | None]], axes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The choice among recipes.

    Args:
        scores: recipe -> accuracy of each trial, None for one that failed.
        axes: recipe -> its axis values.
    """
    means = {
        name: fmean(value for value in values if value is not None)
        for name, values in scores.items()
        if None not in values and values
    }
    best = max(means, key=lambda name: means[name], default=None)
    return {
        "axes": None if best is None else axes[best],
        "score": None if best is None else means[best],
        "trials": sum(map(len, scores.values())),
        "failed": sum(value is None for values in scores.values() for value in values),
        "scores": means,
    }
