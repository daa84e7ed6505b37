"""What files of a matrix must hold to be read: summaries of cells and the manifest. Checked when they are read, so that what a disk, a
copy or an editor has damaged is one message that names the file and the place, and no result.

Only what is read is named; more may be there, and what older versions did not write may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Len
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from qerl.errors import RunFolderError

Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0)]


class _Stored(BaseModel):
    """JSON takes no number for another type; it has no numbers that are not finite, of which `metrics.files` makes null."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


def _of_one_length(curve: list[list[float]]) -> list[list[float]]:
    if len(curve[0]) != len(curve[1]) or not curve[0]:
        raise ValueError(f"{len(curve[0])} steps and {len(curve[1])} values")
    return curve


def _rising(points: list[_Point]) -> list[_Point]:
    if any(second.step <= first.step for first, second in pairwise(points)):
        raise ValueError("steps do not rise")
    return points


class _Point(_Stored):
    """An evaluation with what had been spent."""

    step: Count
    accuracy: Share
    count: float | None = None
    train_seconds: Amount | None = None
    device_seconds: Amount | None = None
    wall_seconds: Amount | None = None
    tokens: Amount | None = None
    samples: Amount | None = None


class _Policy(_Stored):
    temperature: float | None = None
    samples: int = 1


class _Questions(_Stored):
    ids: str
    samples: Annotated[int, Field(ge=1, le=9)]
    right: Annotated[str, Field(pattern="^[0-9-]*$")]


class _Final(_Stored):
    accuracy: Share | None = None
    policy: dict[str, Any] | None = None


class _Config(_Stored):
    eval: _Policy = _Policy()
    rollout: dict[str, Any] = {}
    data: dict[str, Any] = {}


class _Machine(_Stored):
    gpus: list[str | None] | None = None
    cpu: str | None = None
    commit: str | None = None


class _Peak(_Stored):
    bytes: float | None = None


class _Target(_Stored):
    accuracy: Share | None = None
    device_seconds: Amount | None = None


class _AimedAt(_Target):
    accuracy: Share


class _Matched(_Stored):
    temperature: float


class _Entry(_Stored):
    """What manifest and summary say of a cell."""

    state: str
    arm: str | None = None
    seed: int | None = None
    phase: str = "run"
    axes: dict[str, Any] = {}
    error: str | None = None
    problem: str | None = None
    collapse: bool | None = None
    own_process: bool | None = None
    shared_device: bool | None = None


class _Summary(_Entry):
    run: str
    arm: str
    matrix: str | None = None
    protocol: str | None = None
    label: str | None = None
    model: str | None = None
    steps: Count
    planned_steps: Count | None = None
    config: _Config | None = None
    evaluations: Annotated[list[_Point], AfterValidator(_rising)]
    final: dict[str, _Final]
    questions: dict[str, _Questions]
    curves: dict[str, Annotated[list[list[float]], Len(2, 2), AfterValidator(_of_one_length)]]
    devices: int | None = None
    train_seconds: Amount | None = None
    stage_seconds: dict[str, float] | None = None
    peak_memory: _Peak | None = None
    machine: _Machine | None = None
    target: _AimedAt | None = None
    collapsed_below: float | None = None
    matched: _Matched | None = None


class _Named(_Stored):
    name: str


class _Arm(_Named):
    label: str | None = None


class _Detect(_Stored):
    sd: Annotated[float, Field(gt=0)]
    alpha: Annotated[float, Field(gt=0, lt=1)]
    power: Annotated[float, Field(gt=0, lt=1)]


class _Plan(_Stored):
    protocol: str | None = None
    arms: list[_Arm] = []
    vary: list[str] = []
    axes: dict[str, Any] = {}
    detect: _Detect | None = None
    target: _Target | None = None
    final: list[_Named] = []


class _Detectable(_Stored):
    first: str
    second: str
    difference: float | None


class _Choice(_Stored):
    axes: dict[str, Any] | None
    score: float | None
    trials: int
    failed: int


class _Manifest(_Stored):
    matrix: str | None = None
    cells: dict[str, _Entry]
    plan: _Plan | None = None
    detectable: list[_Detectable] = []
    matched: dict[str, _Matched]
    choices: dict[str, _Choice]

    @model_validator(mode="after")
    def _has_its_name(self) -> _Manifest:
        if self.plan is not None and self.matrix is None:
            raise ValueError("a plan without the matrix's name")
        return self


def _damage(kind: type[_Stored], value: Mapping[str, Any]) -> str | None:
    """The first place that is not as it must be, and how it is; None for none."""
    try:
        kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        said = first["msg"].partition(" or instance of ")[0]
        return f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {said}, not {str(first['input'])[:80]!r}"
    return None


manifest_damage = partial(_damage, _Manifest)
"""Of the content of ``matrix.json``."""


def check_summary(path: Path, value: Mapping[str, Any]) -> None:
    """Refuse a summary that is not as `experiments.summary` writes it.

    Raises:
        RunFolderError: it is damaged.
    """
    damage = _damage(_Summary, value)
    if damage is not None:
        raise RunFolderError(
            "the summary of a run is damaged",
            got=f"{path}: {damage}",
            expected="what `qerl matrix` or `qerl results --write` wrote",
            remedy="Copy it again from where it was whole; in a run folder, delete it, and it is made of the run's other files",
        )
