"""Reading cells back: from matrix folders, from ``results/``, or from any run folders."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.errors import RunFolderError
from qerl.experiments.manifest import Manifest
from qerl.experiments.summary import SUMMARY_FILE, load_summary
from qerl.metrics.files import to_json, whole_file, write_json
from qerl.metrics.run_dir import MATRIX_NAME, RunDir

CELL_KEYS = (
    "state",
    "arm",
    "seed",
    "phase",
    "axes",
    "error",
    "collapse",
    "crowded",
    "given_up",
    "own_process",
    "shared_device",
)
"""What the manifest knows of a cell and ``results/`` keeps."""
PLAN_KEYS = ("schema", "matrix", "plan", "detectable", "matched", "choices")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """Cells that are looked at together."""

    cells: tuple[dict[str, Any], ...]
    """Summaries (``experiments.summary``), cells that never began among them."""
    plans: dict[str, dict[str, Any]]
    """Matrix name -> what its manifest says of the matrix as a whole."""


def holds_cells(path: Path) -> bool:
    """Whether a folder is a matrix folder, one of ``results/``, or one with runs in it."""
    return (path / MATRIX_NAME).exists() or (path.is_dir() and any(path.glob(f"*/{SUMMARY_FILE}")))


def read_cells(paths: Sequence[Path]) -> Collection:
    """Cells of matrix folders and of ``results/`` folders, and runs, those in a folder of runs too.

    Raises:
        RunFolderError: a folder holds neither, or two of them hold one run, which would count twice.
    """
    cells: list[dict[str, Any]] = []
    plans: dict[str, dict[str, Any]] = {}
    places: list[Path] = []
    for path in paths:
        if not holds_cells(path):
            _refuse_outer(path)
            cells.append(load_summary(path))
            places.append(path)
            continue
        known = Manifest(path).read() if (path / MATRIX_NAME).exists() else {"cells": {}}
        if "plan" in known:
            plans[str(known["matrix"])] = {key: known[key] for key in PLAN_KEYS if key in known}
        labels = {arm["name"]: arm.get("label") for arm in (known.get("plan") or {}).get("arms", ())}
        names = list(known["cells"]) or [folder.name for folder in sorted(path.iterdir()) if folder.is_dir()]
        for name in names:
            cell = _cell(path / name, known["cells"].get(name), labels)
            if cell is not None:
                cells.append(cell | {"matrix": known["matrix"]} if "matrix" in known else cell)
                places.append(path / name)
    _refuse_twice(cells, places)
    return Collection(cells=tuple(_told_apart(cells, places)), plans=plans)


def _refuse_outer(path: Path) -> None:
    """A folder of matrices is neither a matrix nor a run: say which ones it holds.

    Raises:
        RunFolderError: it is one.
    """
    inner = sorted(folder for folder in path.iterdir() if holds_cells(folder)) if path.is_dir() else []
    if inner and not RunDir(path).holds_a_run():
        raise RunFolderError(
            "the folder holds matrices, and no cells of its own",
            got=path,
            expected="runs, or folders of matrices",
            remedy=f"Give one of those in it, such as {inner[0]}",
        )


def _told_apart(cells: Sequence[dict[str, Any]], places: Sequence[Path]) -> list[dict[str, Any]]:
    """Runs of no matrix that have one name, and would be one arm, get as much of their path as none of the others has."""
    counts = Counter(cell["run"] for cell in cells if cell.get("matrix") is None)
    found = list(cells)
    for name in [name for name, count in counts.items() if count > 1]:
        alike = [index for index, cell in enumerate(cells) if cell.get("matrix") is None and cell["run"] == name]
        parts = [places[index].resolve().parts for index in alike]
        depth = next(
            depth for depth in range(1, max(map(len, parts)) + 1) if len({p[-depth:] for p in parts}) == len(parts)
        )
        for index, part in zip(alike, parts, strict=True):
            own = "/".join(part[-depth:])
            found[index] = cells[index] | {"run": own, "arm": own, "label": own}
    return found


def _refuse_twice(cells: Sequence[dict[str, Any]], places: Sequence[Path]) -> None:
    """Cells are told apart by matrix and name, runs of no matrix by their folder."""
    first: dict[tuple[str, str], Path] = {}
    for cell, place in zip(cells, places, strict=True):
        matrix = cell.get("matrix")
        key = (f"{matrix}", str(cell["run"])) if matrix is not None else ("", str(place.resolve()))
        if key in first:
            raise RunFolderError(
                "one run would count twice",
                got=f"{'/'.join(key).removeprefix('/')} in {first[key]} and {place}",
                expected="each run once",
                remedy="Give one of the folders",
            )
        first[key] = place


def _cell(folder: Path, entry: dict[str, Any] | None, labels: Mapping[str, str | None]) -> dict[str, Any] | None:
    """Summary of one cell; of one that never began what the manifest says; None for a folder that is no cell."""
    if RunDir(folder).cell_path.exists() or (folder / SUMMARY_FILE).exists() or RunDir(folder).holds_a_run():
        summary = load_summary(folder)
        return summary if entry is None else summary | _known(folder.name, entry, summary, labels)
    if entry is None:
        return None
    empty = {"evaluations": [], "final": {}, "questions": {}, "curves": {}, "steps": 0, "warnings": [], "config": None}
    return empty | {"matched": None, "protocol": None} | _known(folder.name, entry, {}, labels)


def _known(
    name: str, entry: dict[str, Any], summary: dict[str, Any], labels: Mapping[str, str | None]
) -> dict[str, Any]:
    """What the manifest knows better than a summary that may be older."""
    facts = {key: entry[key] for key in CELL_KEYS if key in entry}
    own = summary.get("label") if summary.get("arm") == facts.get("arm") and summary.get("steps") else None
    label = own or labels.get(str(facts.get("arm"))) or facts.get("arm")
    error = entry.get("error") or entry.get("problem") or summary.get("error")
    return facts | {"run": name, "label": label, "error": error}


def export_summaries(collection: Collection, results: Path) -> list[Path]:
    """Write ``results/<matrix>/<cell>/summary.json`` for every cell of a matrix, and ``results/<matrix>/matrix.json``.

    Raises:
        RunFolderError: a cell belongs to no matrix, or a run is where its summary would be written; nothing is changed.
    """
    written = []
    for cell in collection.cells:
        if cell.get("matrix") is None:
            raise RunFolderError("the run belongs to no matrix", got=cell["run"], remedy="Give a matrix folder")
        run = RunDir(results / cell["matrix"] / cell["run"])
        if run.holds_a_run() or run.cell_path.exists():
            # Its own summary.json says how far it came.
            raise RunFolderError(
                "the summaries would be written into the runs themselves",
                got=run.path,
                expected="a folder of summaries, or none",
                remedy="Give --write another folder",
            )
    for cell in collection.cells:
        path = results / cell["matrix"] / cell["run"] / SUMMARY_FILE
        with whole_file(path) as temporary:
            temporary.write_text(_compact(cell), encoding="utf-8")
        written.append(path)
    for name, plan in collection.plans.items():
        states = {cell["run"]: _state(cell) for cell in collection.cells if cell["matrix"] == name}
        write_json(results / name / MATRIX_NAME, plan | {"cells": states})
        written.append(results / name / MATRIX_NAME)
    return written


def _state(cell: dict[str, Any]) -> dict[str, Any]:
    return {key: cell[key] for key in CELL_KEYS if cell.get(key) is not None}


def _compact(cell: dict[str, Any]) -> str:
    """As JSON, with curves in one line each: a summary is read by people too, and one number a line would hide the rest."""
    value = to_json(cell)
    curves = value.pop("curves", {})
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    lines = ",\n".join(
        f"  {json.dumps(key)}: {json.dumps(curve, separators=(',', ':'), allow_nan=False)}"
        for key, curve in curves.items()
    )
    return text[:-2] + ',\n "curves": {' + (f"\n{lines}\n }}" if lines else "}") + "\n}\n"
