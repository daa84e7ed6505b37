"""Which temperatures that were found for arms still hold: those found under the settings and on the probe set of now."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl.config.schema import Config
from qerl.experiments.cells import Cell, flat_settings
from qerl.experiments.manifest import UNBEGUN
from qerl.experiments.summary import stored_summary
from qerl.metrics.run_dir import RunDir

ENTROPY_SETTINGS = (
    "model.",
    "quant.",
    "aqn.",
    "data.",
    "diagnostics.probe",
    "rollout.temperature",
    "rollout.group_size",
    "train.steps",
    "train.seed",
    "optim.updates_per_rollout",
)
"""What an entropy before training depends on: the base, its noise with its stages and draws, and the contexts."""
PLACES = ("model.path", "model.device", "data.train", "data.eval", "diagnostics.probe")
"""Of these the last part of a path counts: a matrix may go on on another machine."""


def reference_of(cells: Sequence[Cell], cell: Cell) -> Cell | None:
    """The cell whose entropy another one's temperature is matched to: of the arm that it names, at the same axis values."""
    match = cell.arm.match_temperature
    if match is None:
        return None
    return next((c for c in cells if c.arm.name == match.arm and c.axes == cell.axes and c.phase == cell.phase), None)


def fingerprint(cell: Cell, reference: Cell, out: Path) -> str | None:
    """Short hash of what a matched temperature depends on; None while there is no probe set, or settings are refused.

    Args:
        cell: of the group whose temperature it is; its own ``rollout.temperature`` does not count.
        reference: see :func:`reference_of`.
        out: the matrix folder.
    """
    probe = RunDir(out).probe_path
    if cell.config is None or reference.config is None or cell.arm.match_temperature is None or not probe.exists():
        return None
    own = {
        key: value for key, value in _settings(cell.config).items() if key not in ("rollout.temperature", "train.seed")
    }
    parts = [
        own,
        _settings(reference.config),
        cell.arm.match_temperature.model_dump(mode="json"),
        hashlib.sha256(probe.read_bytes()).hexdigest(),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def outdated(cells: Sequence[Cell], matched: Mapping[str, Mapping[str, Any]], out: Path) -> set[str]:
    """Groups whose temperature was found under other settings, or on another probe set. One that a cell was begun at stays: the
    group's other seeds are to have the same.
    """
    found = set()
    for cell in cells:
        reference = reference_of(cells, cell)
        if reference is None or cell.group not in matched:
            continue
        begun = any(_has_begun(out / other.name) for other in cells if other.group == cell.group)
        if not begun and fingerprint(cell, reference, out) != matched[cell.group].get("of"):
            found.add(cell.group)
    return found


def _has_begun(folder: Path) -> bool:
    """Whether a cell's folder holds a run, or the summary of one."""
    stored = stored_summary(folder)
    return RunDir(folder).holds_a_run() if stored is None else stored["state"] not in UNBEGUN


def _settings(config: Config) -> dict[str, Any]:
    found = {key: value for key, value in flat_settings(config).items() if key.startswith(ENTROPY_SETTINGS)}
    return found | {key: Path(str(found[key])).name for key in PLACES if found.get(key) is not None}
