"""An arm of one matrix as what the arms of other matrices are compared with. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qerl.errors import ConfigError
from qerl.experiments.cells import FIXED, FIXED_MECHANISM
from qerl.experiments.compare import accuracy_after
from qerl.experiments.folders import Collection
from qerl.report.text import flatten, plain

NO_POLICY = ("eval.every",)
"""Settings below ``FIXED`` that change no training, question or answer."""


def against(collection: Collection, reference: str) -> Collection:
    """The other matrices of a collection, each with the reference arm as its first one and with all differences taken to it.

    The scatter of seeds is pooled over the arms of both matrices. Courses on the probe set of the reference are left out, for each
    matrix has a probe set of its own.

    Args:
        collection: of two or more matrices under protocol mechanism.
        reference: ``MATRIX/ARM``.

    Raises:
        ConfigError: there is no such arm, no other matrix, or what must be equal for a comparison is not.
    """
    name, _, arm = reference.partition("/")
    own = [cell for cell in collection.cells if cell.get("matrix") == name]
    chosen = [cell for cell in own if cell.get("arm") == arm and not cell.get("axes")]
    others = [matrix for matrix in collection.plans if matrix != name]
    if not chosen or not others:
        arms = dict.fromkeys(f"{cell.get('matrix')}/{cell.get('arm')}" for cell in collection.cells)
        raise ConfigError(
            "no such arm to compare with" if not chosen else "no other matrix to compare with that arm",
            got=reference,
            expected=f"one of {', '.join(arms)}, and a second matrix",
        )
    begun = [cell for cell in chosen if cell.get("config")]
    if not begun:
        raise ConfigError(
            "the arm to compare with has no run yet", got=reference, remedy="Compare once one of its cells has begun"
        )
    rest: dict[str, list[float]] = {}
    for cell in own:
        after = accuracy_after(cell)
        if cell.get("arm") != arm and after is not None:
            rest.setdefault(str(cell["run"]).rpartition("-s")[0], []).append(after)
    cells: list[dict[str, Any]] = []
    plans = {}
    for matrix in others:
        known = collection.plans[matrix]
        part = [cell for cell in collection.cells if cell.get("matrix") == matrix]
        _check_comparable(begun[0], part, known.get("plan") or {}, name)
        cells += [_moved(cell, matrix, name) for cell in chosen] + part
        first = f"{name}/{arm}"
        pairs = [{"first": first, "second": other, "difference": None} for other in _arms(part)]
        plans[matrix] = {**known, "detectable": pairs, "scatter": list(rest.values())}
    return replace(collection, cells=tuple(cells), plans=plans)


def _arms(cells: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(str(cell["arm"]) for cell in cells))


def _moved(cell: dict[str, Any], matrix: str, origin: str) -> dict[str, Any]:
    """A cell of the reference in another matrix, under a name that tells where it is from."""
    return {
        **cell,
        "matrix": matrix,
        "run": f"{origin}/{cell['run']}",
        "arm": f"{origin}/{cell['arm']}",
        "label": f"{cell.get('label') or cell['arm']} (of {origin})",
        "curves": {key: curve for key, curve in cell["curves"].items() if not key.startswith("probe/")},
    }


def _check_comparable(first: dict[str, Any], cells: list[dict[str, Any]], plan: Mapping[str, Any], origin: str) -> None:
    """One data order, token budget, evaluation and optimizer; what the other matrix itself varies is excepted."""
    if {first.get("protocol"), plan.get("protocol")} != {"mechanism"}:
        raise ConfigError(
            "arms are compared across matrices under protocol mechanism alone", got=str(plan.get("protocol"))
        )
    varied = {*plan.get("vary", ()), *(plan.get("axes") or {})}
    fixed = (*FIXED, *FIXED_MECHANISM)
    settings = flatten(first["config"])
    problems: dict[str, str] = {}
    for cell in cells:
        for key, value in flatten(cell.get("config") or {}).items():
            if key in varied or key in NO_POLICY or not any(key == f or key.startswith(f"{f}.") for f in fixed):
                continue
            if settings.get(key) != value:
                problems[key] = f"{key} {plain(settings.get(key))} against {plain(value)}"
    if problems:
        raise ConfigError(
            f"the matrix cannot be compared with an arm of {origin}",
            got="; ".join(problems.values()),
            expected="one data order, token budget, evaluation and optimizer",
        )
