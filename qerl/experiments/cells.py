"""From a matrix file to its cells: one configuration each, with what they may and may not differ in. Free of torch."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from qerl.config.fields import all_keys
from qerl.config.load import load_config
from qerl.config.schema import Config
from qerl.config.section import Section
from qerl.config.suggest import suggest_key
from qerl.config.yaml_io import parse_yaml
from qerl.errors import ConfigError, nearest
from qerl.experiments.schema import (
    ArmConfig,
    DetectConfig,
    FinalConfig,
    MatchConfig,
    MatrixConfig,
    Setting,
    TargetConfig,
    TuningConfig,
)

Phase = Literal["run", "tune", "final"]
"""``run``: a cell of a mechanism matrix. ``tune`` and ``final``: trials of a best_recipe matrix, and what they chose."""
FIXED = (
    "model.path",
    "data",
    "reward",
    "rollout.prompts_per_step",
    "rollout.group_size",
    "rollout.max_prompt_tokens",
    "rollout.max_new_tokens",
    "train.steps",
    "optim.updates_per_rollout",
    "eval",
)
"""Keys, and sections, that are equal in all cells: data order, token budget and evaluation. Axes may change them."""
FIXED_MECHANISM = ("optim",)
"""Also equal under protocol mechanism."""
SECTIONS: dict[str, type[Section]] = {
    "arms": ArmConfig,
    "match_temperature": MatchConfig,
    "final": FinalConfig,
    "target": TargetConfig,
    "detect": DetectConfig,
    "tuning": TuningConfig,
}
"""Key of a matrix file -> what may stand below it."""
BELONG_TO_THE_MATRIX = ("train.seed", "run.dir", "run.name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of a matrix."""

    name: str
    """Folder name: arm, axis values, phase and seed, separated by ``-``."""
    arm: ArmConfig
    seed: int
    phase: Phase
    axes: dict[str, Any]
    """Axis values of this cell; of a final cell those its arm chose, empty while the choice is open."""
    group: str
    """Name without the seed: cells of one group differ by the seed alone."""
    config: Config | None
    """None when the settings are refused."""
    problem: str | None
    """Why the cell cannot run; None when nothing is known against it."""
    pending: bool = False
    """Waits for the trials of its arm (best_recipe) or for its temperature."""


def load_matrix(path: Path) -> MatrixConfig:
    """Read and check a matrix file.

    Raises:
        ConfigError: the file cannot be read, or something in it is refused; every problem is named.
    """
    if not path.is_file():
        near = nearest(path.name, (p.name for p in path.parent.glob("*.y*ml"))) if path.parent.is_dir() else None
        remedy = f"Did you mean {path.parent / near}?" if near else "configs/matrix/ holds the matrices"
        raise ConfigError(f"matrix file {path} does not exist", remedy=remedy)
    try:
        values, lines = parse_yaml(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not valid YAML", got=" ".join(str(error).split())) from None
    try:
        return MatrixConfig.model_validate_json(json.dumps(values))
    except ValidationError as error:
        # A list whose entries are refused counts as too short as well.
        details = [detail for detail in error.errors() if not (detail["type"] == "too_short" and detail["input"])]
        problems = list(dict.fromkeys(_complaint(detail, lines) for detail in details))
        raise ConfigError(f"{path} is no matrix:" + "".join(f"\n  - {text}" for text in problems)) from None


def _complaint(detail: Any, lines: Mapping[tuple[str, ...], int]) -> str:
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    place = ".".join(map(str, detail["loc"]))
    line = next(
        (lines[key] for n in range(len(detail["loc"]), 0, -1) if (key := _texts(detail["loc"][:n])) in lines), 0
    )
    where = f"{place} (line {line})" if line else place or "the file"
    if detail["type"] == "extra_forbidden":
        near = nearest(str(detail["loc"][-1]), _fields(detail["loc"]))
        return f"unknown key {where}" + (f"; did you mean {near}?" if near else "")
    if detail["type"] == "missing":
        return f"{place} is missing"
    return f"{where}: {detail['msg']}, got {str(detail['input'])[:80]!r}"


def _texts(parts: Sequence[Any]) -> tuple[str, ...]:
    return tuple(map(str, parts))


def _fields(place: Sequence[Any]) -> list[str]:
    """Keys that are known where an unknown one stands."""
    names = [part for part in place[:-1] if isinstance(part, str)]
    section = SECTIONS.get(names[-1], MatrixConfig) if names else MatrixConfig
    return list(section.model_fields)


def expand(
    matrix: MatrixConfig,
    path: Path,
    settings: Sequence[str],
    out: Path,
    *,
    choices: Mapping[str, Mapping[str, Any]] | None = None,
    temperatures: Mapping[str, float] | None = None,
) -> list[Cell]:
    """All cells, in the order they run in: one seed of every arm before the next; trials before final runs.

    Args:
        matrix: the checked file.
        path: where it stands; ``base`` is relative to it.
        settings: ``key=value`` for all cells, from the command line.
        out: folder that holds the cells' run folders.
        choices: arm -> axis values that its trials chose (best_recipe).
        temperatures: group -> temperature found for it.

    Raises:
        ConfigError: a setting belongs to the matrix or to its arms, or cells differ where the protocol forbids it.
    """
    _check_settings(matrix, settings)
    cells = [
        _cell(matrix, path.parent / matrix.base, settings, out, arm, seed, phase, axes, choices, temperatures)
        for phase in (("run",) if matrix.protocol == "mechanism" else ("tune", "final"))
        for arm, seed, axes in _points(matrix, phase, choices or {})
    ]
    names = [cell.name for cell in cells]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError("two cells have one name", got=", ".join(twice), remedy="Take equal axis values out")
    _check_equal(matrix, cells)
    return cells


def _points(
    matrix: MatrixConfig, phase: str, choices: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[ArmConfig, int, dict[str, Any]]]:
    """Arm, seed and axis values of each cell of a phase: the n-th seeds of all arms before the next ones."""
    tuning = matrix.tuning.seeds if matrix.tuning is not None else ()
    longest = max(len(matrix.seeds_of(arm)) for arm in matrix.arms)
    for index in range(len(tuning) if phase == "tune" else longest):
        for arm in matrix.arms:
            seeds = tuning if phase == "tune" else matrix.seeds_of(arm)
            if index >= len(seeds):
                continue
            if phase == "final":
                yield arm, seeds[index], dict(choices.get(arm.name, {}))
                continue
            axes = matrix.axes_of(arm)
            for values in itertools.product(*axes.values()):
                yield arm, seeds[index], dict(zip(axes, values, strict=True))


def _cell(
    matrix: MatrixConfig,
    base: Path,
    settings: Sequence[str],
    out: Path,
    arm: ArmConfig,
    seed: int,
    phase: Any,
    axes: dict[str, Any],
    choices: Mapping[str, Mapping[str, Any]] | None,
    temperatures: Mapping[str, float] | None,
) -> Cell:
    open_choice = phase == "final" and arm.name not in (choices or {}) and bool(matrix.axes_of(arm))
    # While its choice is open a cell is checked with the first values its arm will try.
    tried = {key: values[0] for key, values in matrix.axes_of(arm).items()} if open_choice else axes
    parts = [arm.name, *(f"{key.rpartition('.')[2]}{_slug(value)}" for key, value in axes.items() if phase != "final")]
    parts += [] if phase == "run" else [phase]
    group = "-".join(parts)
    changes: Setting = {
        **matrix.set,
        **(matrix.tuning.set if phase == "tune" and matrix.tuning else {}),
        **arm.set,
        **tried,
    }
    found = (temperatures or {}).get(group)
    if found is not None:
        changes["rollout.temperature"] = found
    overrides = [*map(_override, changes.items()), *settings]
    name = f"{group}-s{seed}"
    overrides += [f"train.seed={seed}", f"run.dir={out}", f"run.name={name}"]
    try:
        config, problem = load_config(base, overrides), None
    except ConfigError as error:
        config, problem = None, str(error)
    pending = open_choice or (arm.match_temperature is not None and found is None)
    return Cell(
        name=name,
        arm=arm,
        seed=seed,
        phase=phase,
        axes=axes,
        group=group,
        config=config,
        problem=problem,
        pending=pending,
    )


def _override(item: tuple[str, Any]) -> str:
    key, value = item
    known = all_keys().get(key)
    typed = isinstance(value, str) and known is not None and known.is_text
    return f"{key}={value if typed else json.dumps(value)}"


def _slug(value: Any) -> str:
    # In short where that is the value, so that two values never share a name.
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return re.sub(r"[^A-Za-z0-9_.+-]+", "_", text)


def _check_settings(matrix: MatrixConfig, settings: Sequence[str]) -> None:
    """Refuse settings that the matrix makes itself, unknown keys, and command-line settings that would undo an arm."""
    by_arm = {key for arm in matrix.arms for key in (*arm.set, *(arm.axes or {}))} | set(matrix.axes)
    in_file = {*by_arm, *matrix.set, *(matrix.tuning.set if matrix.tuning else ())}
    given = [setting.partition("=")[0].strip() for setting in settings]
    for key in [*in_file, *given]:
        if key in BELONG_TO_THE_MATRIX:
            raise ConfigError(f"{key} is set by the matrix", remedy="Use seeds, and --out for the folder")
    for key in sorted(in_file):
        if key not in all_keys() and not key.startswith("quant.overrides."):
            near = suggest_key(key, all_keys())
            raise ConfigError(f"unknown key {key} in the matrix", remedy=f"Did you mean {near}?" if near else None)
    for key in given:
        if key in by_arm:
            raise ConfigError(f"{key} is what the arms differ in", got=f"{key}=… for all cells", remedy="Leave it out")


def _check_equal(matrix: MatrixConfig, cells: Sequence[Cell]) -> None:
    """Refuse a matrix whose cells differ in data order, token budget, evaluation or (mechanism) optimizer."""
    fixed = FIXED + (FIXED_MECHANISM if matrix.protocol == "mechanism" else ())
    by_axes = {*matrix.axes, *(key for arm in matrix.arms for key in arm.axes or {})}
    problems = []
    for phase in ("run", "tune", "final"):
        part = [cell for cell in cells if cell.phase == phase and cell.config is not None]
        for cell in part[1:]:
            for key in _differing(part[0].config, cell.config, fixed):
                if key not in by_axes and key not in matrix.vary:
                    problems.append((key, part[0].arm.name, cell.arm.name))
    if problems:
        shown = "; ".join(f"{key} ({first} against {second})" for key, first, second in dict.fromkeys(problems))
        raise ConfigError(
            f"arms of one {matrix.protocol} matrix differ in what must be equal",
            got=shown,
            expected="one data order, token budget and evaluation"
            + (", and one optimizer" if matrix.protocol == "mechanism" else ""),
            remedy="Set it for all cells, make it an axis, or use another matrix",
        )


def _differing(first: Config | None, second: Config | None, fixed: Sequence[str]) -> list[str]:
    assert first is not None and second is not None
    a, b = flat_settings(first), flat_settings(second)
    return [key for key in a if any(key == f or key.startswith(f"{f}.") for f in fixed) and a[key] != b[key]]


def flat_settings(config: Config) -> dict[str, Any]:
    """Dotted key -> value of every setting."""
    values: dict[str, Any] = config.model_dump(mode="json")
    found = {}
    for key in all_keys():
        value: Any = values
        for part in key.split("."):
            value = value[part]
        found[key] = value
    return found
