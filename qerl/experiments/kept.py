"""A cell of which the summary alone is kept counts as a result of the matrix: its settings must be those that the matrix has now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.errors import ConfigError
from qerl.experiments.summary import PATHS, SUMMARY_FILE, stored_summary
from qerl.train.resume import differences, flat

if TYPE_CHECKING:
    from qerl.experiments.plan import Plan

COUNT = ("finished", "failed")
"""States in which what a summary says counts: of the others the cell begins anew."""


def check_kept(plan: Plan, wanted: set[str]) -> None:
    """Refuse a matrix that has changed since the results that are kept of it, as `plan` does where runs are.

    Of a path its last part is all that a summary holds, and counts. A setting that one of the two versions does not have is left out.

    Args:
        plan: the matrix.
        wanted: names of the cells to look at.

    Raises:
        ConfigError: a cell was made with other settings.
        RunFolderError: a summary is damaged.
    """
    for cell in plan.cells:
        if cell.name not in wanted or cell.config is None or cell.pending or plan.state(cell) not in COUNT:
            continue
        folder = plan.run(cell).path
        stored = stored_summary(folder)
        if stored is None or not stored.get("config"):
            continue
        before, after = _shown(stored["config"]), _shown(cell.config.model_dump(mode="json"))
        both = before.keys() & after.keys()
        changed = list(differences({key: before[key] for key in both}, {key: after[key] for key in both}).values())
        if before.get("model.path", after["model.path"]) != after["model.path"]:
            # A run that goes on has its base checked by hash; of this one the name is left.
            changed.append(f"model.path: {before['model.path']} -> {after['model.path']}")
        if changed:
            raise ConfigError(
                f"cell {cell.name} is kept of a run with other settings",
                got=", ".join(changed),
                expected=f"those of {folder / SUMMARY_FILE}",
                remedy="Give the command the settings that it had, choose another --out for the changed matrix, or remove the cell's folder "
                "to make it again",
            )


def _shown(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value, of paths the last part."""
    found = flat(config)
    return found | {key: Path(found[key]).name for key in PATHS if isinstance(found.get(key), str)}
