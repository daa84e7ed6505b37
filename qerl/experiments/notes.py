"""What a comparison stands on, and what keeps it from being clean, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.experiments.statistics import pooled_variance
from qerl.report.comparison import ArmRow
from qerl.report.text import brief, plain

if TYPE_CHECKING:
    from qerl.experiments.pairs import Cell

WHOLE = ("finished", "trained")
"""States of runs that made all their steps."""
ENDED = (*WHOLE, "failed")
"""States of runs that do not go on by themselves."""
PROBE_ENTROPY = "probe/entropy_conditional/by_token"
SAME_PROBE_SET = 0.01
"""The share by which entropies of one model on one probe set may differ, by the arithmetic of versions and machines."""


def policy(cells: Sequence[Cell]) -> str:
    """The evaluation policy of the cells in words; several are all named. Cells that were never evaluated have none."""
    texts = []
    for cell in [cell for cell in cells if cell["evaluations"]] or cells:
        stated, rollout = cell["config"].get("eval", {}), cell["config"].get("rollout", {})
        greedy = stated.get("temperature", 0.0) == 0
        how = "greedy" if greedy else f"temperature {plain(stated['temperature'])}"
        samples = stated.get("samples", 1)
        noise = "on" if stated.get("noise") else "off"
        count = next((point["count"] for point in cell["evaluations"] if point.get("count")), None)
        questions = f"{int(count)} questions of " if count else ""
        data = Path(str(cell["config"].get("data", {}).get("eval"))).name
        limit = stated.get("max_new_tokens") or rollout.get("max_new_tokens")
        texts.append(
            f"{questions}{data}, {how}, {samples} answer{'s' if samples > 1 else ''} a question of at most {limit} tokens, noise {noise}"
        )
    return "; ".join(dict.fromkeys(texts))


def notes(
    cells: Sequence[Cell], with_config: Sequence[Cell], arms: Sequence[ArmRow], plan: Mapping[str, Any]
) -> list[str]:
    """Cells without a result and why, and in what the others are not alike.

    Args:
        cells: all of the comparison.
        with_config: those whose settings are known.
        arms: what was made of them.
        plan: what the matrix states beforehand; empty for runs of no matrix.
    """
    found = _ended_badly(cells)
    early = sorted({(int(cell["as_of"]), int(cell["planned_steps"] or 0)) for cell in cells if cell.get("as_of")})
    found += [
        f"As of step {step} of {planned}: schedules of learning rate and noise are those of {planned} steps."
        for step, planned in early
        if step < planned
    ]
    open_cells = [str(cell["run"]) for cell in cells if cell["state"] not in (*ENDED, "invalid")]
    if open_cells:
        found.append(f"Not finished, and so without a result: {', '.join(open_cells)}.")
    carried = [str(cell["run"]) for cell in cells if cell.get("portable_resumes")]
    if carried:
        found.append(f"Went on from a portable checkpoint, and so not bit-exact: {', '.join(carried)}.")
    if any(cell.get("own_process") is False and not cell.get("devices") for cell in cells):
        found.append("Cells shared a process: the resident peak of each is that of all before it too.")
    found += _beside(cells)
    if len(policy(with_config).split("; ")) > 1:
        found.append(
            "The runs were not evaluated under one policy: arms that differ in it are not held against each other."
        )
    machines = {machine([cell]) for cell in cells if cell.get("machine")}
    if len(machines) > 1:
        found.append(
            f"The runs were made on different machines ({'; '.join(sorted(machines))}): times cannot be compared."
        )
    return [*found, *_one_seed(arms), *_commits(cells), *_probe_sets(cells), *_scatter(arms, plan)]


def _ended_badly(cells: Sequence[Cell]) -> list[str]:
    """Cells with an error; those that ended alike are named together."""
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for cell in cells:
        if cell.get("error"):
            failed = cell["state"] == "failed"
            how = "failed later" if cell.get("as_of") else "failed" if failed else f"is {cell['state']}"
            machine_did = failed and not cell.get("as_of") and not cell.get("collapse")
            groups.setdefault((how, brief(cell["error"]), machine_did), []).append(str(cell["run"]))
    found = []
    for (how, error, machine_did), names in groups.items():
        what = how if len(names) == 1 else how.replace("is ", "are ")
        whose = "its training: it counts" if len(names) == 1 else "their training: they count"
        remark = f" (not {whose} as open, not as collapsed)" if machine_did else ""
        found.append(f"{', '.join(names)} {what}: {error}{remark}")
    return found


def _beside(cells: Sequence[Cell]) -> list[str]:
    """Which cells have no times of their own."""
    begun = [cell for cell in cells if cell.get("steps")]
    beside = [str(cell["run"]) for cell in begun if cell.get("shared_device")]
    if not beside:
        return []
    if len(beside) == len(begun) > 1:
        return ["Every cell ran beside others on one device: all count without times."]
    return [f"Ran beside other cells on one device, and so counted without times: {', '.join(beside)}."]


def _one_seed(arms: Sequence[ArmRow]) -> list[str]:
    """Runs of one arm and one seed, as plain runs can be: on one machine they repeat each other, and are no further seeds."""
    repeated = []
    for arm in arms:
        by_seed: dict[int, list[str]] = {}
        for row in arm.seeds:
            if row.seed is not None:
                by_seed.setdefault(row.seed, []).append(row.name)
        repeated += [f"{', '.join(names)} (seed {seed})" for seed, names in by_seed.items() if len(names) > 1]
    if not repeated:
        return []
    return [
        f"Of the same settings and the same seed: {'; '.join(repeated)}. Each counts as a seed of its own, so intervals over seeds are too narrow."
    ]


def _commits(cells: Sequence[Cell]) -> list[str]:
    """Several versions of the code: the one of most cells, and which cells are of another."""
    made: dict[str, list[str]] = {}
    for cell in cells:
        commit = (cell.get("machine") or {}).get("commit")
        if commit and cell.get("steps"):
            made.setdefault(str(commit)[:7], []).append(str(cell["run"]))
    if len(made) < 2:
        return []
    first, *others = sorted(made, key=lambda commit: -len(made[commit]))
    named = "; ".join(f"at {commit} {', '.join(made[commit])}" for commit in others)
    return [f"Made by several versions of the code: at {first} {len(made[first])} cells, {named}."]


def _probe_sets(cells: Sequence[Cell]) -> list[str]:
    """Arms of several probe sets, as cells of several matrix folders have: before the first update an arm's model is one, and so is its
    entropy on one set."""
    before: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        steps, values = cell["curves"].get(PROBE_ENTROPY, ((), ()))
        if steps and steps[0] == 1:
            before.setdefault((str(cell["label"]), str(cell["axes"])), []).append(float(values[0]))
    several = [label for (label, _), found in before.items() if max(found) > (1 + SAME_PROBE_SET) * min(found)]
    if not several:
        return []
    arms = "; ".join(dict.fromkeys(several))
    return [
        f"Entropies on the probe set are of several sets and do not compare: seeds differ before training in {arms}."
    ]


def _scatter(arms: Sequence[ArmRow], plan: Mapping[str, Any]) -> list[str]:
    """Whether seeds scatter more than was stated beforehand: then what was stated to be detectable is too small."""
    stated = (plan.get("detect") or {}).get("sd")
    within, freedom = pooled_variance([arm.after.values for arm in arms if arm.after is not None])
    pooled = math.sqrt(within)
    if stated is None or not freedom or pooled <= stated:
        return []
    return [
        (
            f"Seeds scatter by {100 * pooled:.1f} points (pooled standard deviation, {freedom} degrees of freedom), more than the "
            f"{100 * stated:g} stated beforehand: only larger differences than stated can be found."
        )
    ]


def machine(cells: Sequence[Cell]) -> str:
    """The GPUs, or the processor, that the cells ran on."""
    found = []
    for cell in cells:
        known = cell.get("machine") or {}
        found.append(", ".join(known.get("gpus") or []) or str(known.get("cpu") or ""))
    return "; ".join(dict.fromkeys(text for text in found if text))
