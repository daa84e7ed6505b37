"""Evaluations on disk: a folder with ``evaluation.json`` and, for each suite and policy, a parquet file of its questions.

A parquet file holds one row a question, with every sample; its schema metadata, under ``qerl.evaluation``, holds what the
JSON file says of it, so that it can be read by itself. Run folders keep their own evaluations as JSON lines
(``metrics.run_dir``); both are read here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from qerl.errors import DataError
from qerl.eval.evaluate import EvalResult
from qerl.metrics.files import read_json_lines, read_json_object, to_json, whole_file, write_json
from qerl.metrics.run_dir import RunDir

SCHEMA = 1
EVALUATION_FILE = "evaluation.json"
METADATA_KEY = b"qerl.evaluation"
PROTOCOL = ("temperature", "top_p", "samples", "max_new_tokens", "seed")
"""Parts of a policy that two evaluations must share to be held against each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One suite under one policy."""

    suite: str
    policy: str
    """What was measured, in words: ``base``, ``checkpoint-50``, ``checkpoint-50, noise draw 1``."""
    location: str
    """Where the questions were read from."""
    result: EvalResult

    def facts(self) -> dict[str, Any]:
        """Everything but the rows, for JSON."""
        return {
            "suite": self.suite,
            "policy_name": self.policy,
            "location": self.location,
            **self.result.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvaluation:
    """An evaluation read back: its rows, and what is known of how it was made."""

    suite: str | None
    """None where the file does not say (a run folder's own evaluations)."""
    policy: str
    protocol: dict[str, Any]
    """Temperature, top-p, samples, length limit and seed, as far as they are known."""
    rows: list[dict[str, Any]]


def suite_name(source: str) -> str:
    """What a data set is called in tables: its name with the split if one is named, or the stem of its file."""
    path = Path(source)
    return path.stem if path.suffix in (".jsonl", ".json", ".parquet") else source if "/" not in source else path.name


def suite_names(sources: Sequence[str]) -> dict[str, str]:
    """What several data sets are called side by side, by source: :func:`suite_name`, after as many of the folders above as tell
    those of one name apart (``a/test.jsonl`` and ``b/test.jsonl`` are ``a-test`` and ``b-test``)."""
    names = {}
    for source in dict.fromkeys(sources):
        name, others = suite_name(source), [other for other in dict.fromkeys(sources) if other != source]
        same = [_parents(other) for other in others if suite_name(other) == name]
        parents = _parents(source)
        shown = next((n for n in range(len(parents)) if all(parents[:n] != one[:n] for one in same)), len(parents))
        names[source] = "-".join([*reversed(parents[: shown if same else 0]), name])
    return names


def _parents(source: str) -> tuple[str, ...]:
    """Names of the folders above a data set, the nearest first."""
    return tuple(part for part in reversed(Path(source).parent.parts) if part != "/")


def question_schema() -> pa.Schema:
    """Columns of an evaluation's parquet file: one row a question."""
    text = pa.string()
    sample = pa.struct(
        [
            ("text", text),
            ("parsed", text),
            ("outcome", text),
            ("tokens", pa.int32()),
            ("stop_reason", text),
            ("note", text),
        ]
    )
    return pa.schema(
        [
            ("id", text),
            ("question", text),
            ("answer", text),
            ("accuracy", pa.float64()),
            ("answers", pa.list_(sample)),
        ]
    )


def write_evaluations(
    folder: Path,
    measurements: Sequence[Measurement],
    facts: Mapping[str, Any],
    comparisons: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write an evaluation folder; the parquet files first (they may be there already: ``write_questions``), the JSON file last.

    Args:
        folder: made if missing; files of the same names are replaced.
        measurements: at least one.
        facts: what was evaluated and where (target, versions).
        comparisons: paired differences between the measurements.

    Returns:
        The JSON file.
    """
    entries = [
        {**to_json(measurement.facts()), "file": write_questions(folder, measurement).name}
        for measurement in measurements
    ]
    path = folder / EVALUATION_FILE
    write_json(path, {"schema": SCHEMA, **facts, "results": entries, "comparisons": list(comparisons)})
    return path


def holds_an_evaluation(folder: Path) -> bool:
    """Whether something of an evaluation is in a folder: one that was cut short has parquet files alone."""
    return (folder / EVALUATION_FILE).exists() or any(folder.glob("*--*.parquet"))


def write_questions(folder: Path, measurement: Measurement) -> Path:
    """Write one measurement's questions and answers as the parquet file of an evaluation folder, which can be read alone."""
    known = to_json(measurement.facts())
    path = folder / f"{_file_part(measurement.suite)}--{_file_part(measurement.policy)}.parquet"
    schema = question_schema().with_metadata({METADATA_KEY: json.dumps(known).encode()})
    with whole_file(path) as temporary:
        pa.parquet.write_table(pa.Table.from_pylist(list(measurement.result.rows), schema), temporary)
    return path


def read_evaluations(place: str | Path) -> list[StoredEvaluation]:
    """The evaluations at a place.

    Args:
        place: a folder that ``write_evaluations`` wrote, one of its parquet files, a JSON lines file of a run's
            evaluation, or a run folder: its newest evaluation, or with ``RUN:STEP`` the one after that step.

    Raises:
        DataError: there is no evaluation.
    """
    path = Path(place)
    if path.suffix == ".parquet" and path.is_file():
        return [_read_parquet(path)]
    if path.suffix == ".jsonl" and path.is_file():
        return [StoredEvaluation(suite=None, policy=path.stem, protocol={}, rows=read_json_lines(path))]
    if (path / EVALUATION_FILE).is_file():
        entries = read_json_object(path / EVALUATION_FILE)["results"]
        return [_read_parquet(path / entry["file"]) for entry in entries]
    return [_read_run(str(place))]


def _read_parquet(path: Path) -> StoredEvaluation:
    try:
        table = pa.parquet.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError("an evaluation cannot be read", got=f"{path}: {error}") from error
    known = json.loads((table.schema.metadata or {}).get(METADATA_KEY, b"{}"))
    if not known:
        raise DataError(
            "the parquet file is not an evaluation", got=path, expected="a file that `qerl eval --out` wrote"
        )
    return StoredEvaluation(
        suite=known["suite"],
        policy=known["policy_name"],
        protocol={key: known["policy"].get(key) for key in PROTOCOL},
        rows=table.to_pylist(),
    )


def _read_run(place: str) -> StoredEvaluation:
    name, _, step = place.rpartition(":")
    named = bool(name) and step.isdecimal() and not Path(place).exists()
    run = RunDir(name if named else place)
    steps = run.evaluation_steps()
    wanted = int(step) if named else steps[-1] if steps else -1
    if wanted not in steps:
        raise DataError(
            "there is no evaluation here",
            got=place,
            expected=f"RUN:STEP with a step of {', '.join(map(str, steps))}"
            if steps
            else "a folder that `qerl eval --out` wrote, one of its parquet files, or a run folder with evaluations",
        )
    return StoredEvaluation(
        suite=None,
        policy=f"{run.path} after step {wanted}",
        protocol=_run_protocol(run, wanted),
        rows=run.read_evaluation(wanted),
    )


def _run_protocol(run: RunDir, step: int) -> dict[str, Any]:
    """From the summary; nothing where a run has none."""
    summary = run.read_json(run.summary_path) or {}
    for result in (summary.get("evaluations") or {}).values():
        if result and result.get("step") == step:
            return {key: result["policy"].get(key) for key in PROTOCOL}
    return {}


def _file_part(name: str) -> str:
    """A name as part of a file name."""
    return re.sub(r"[^\w.-]+", "-", Path(name).stem if "/" in name else name).strip("-") or "evaluation"
