"""A matrix opened on a folder: its cells with their states, checked before any work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from qerl.config.aqn import AqnConfig
from qerl.config.diagnostics import DiagnosticsConfig
from qerl.config.load import load_config
from qerl.config.objective import ObjectiveConfig
from qerl.config.schema import Config, LogConfig, LoraConfig, OptimConfig, QuantConfig, RunConfig, TrainConfig
from qerl.errors import ConfigError, QerlError, RunFolderError
from qerl.experiments.cells import Cell, expand, load_matrix
from qerl.experiments.choice import check_choices, is_taken_up
from qerl.experiments.kept import check_kept
from qerl.experiments.manifest import UNBEGUN, Manifest
from qerl.experiments.matched import outdated
from qerl.experiments.schema import FinalConfig, MatrixConfig
from qerl.experiments.statistics import detectable_difference
from qerl.metrics.files import check_writable, recover_folders
from qerl.metrics.run_dir import RunDir
from qerl.model.aqn import places
from qerl.model.checkpoint import check_targets
from qerl.model.spec import ModelSpec
from qerl.model.storage import check_formats
from qerl.model.tokenizer import load_tokenizer
from qerl.report.text import brief
from qerl.reward.compose import Rewarder
from qerl.train.fit import settle_memory
from qerl.train.prompts import load_prompts
from qerl.train.resume import check_same_config
from qerl.train.run import check_trainable
from qerl.train.session import check_lengths, fit_lengths, require_model_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done on a matrix folder."""

    path: Path
    settings: tuple[str, ...]
    matrix: MatrixConfig
    out: Path
    cells: tuple[Cell, ...]
    manifest: Manifest

    def run(self, cell: Cell) -> RunDir:
        """Run folder of a cell."""
        return RunDir(self.out / cell.name)

    def state(self, cell: Cell) -> str:
        """State of a cell: by the manifest where it has begun, else whether it can run as it is now."""
        reached = str(self.manifest.cell(cell.name)["state"])
        if reached not in UNBEGUN:
            return reached
        return "waiting" if cell.problem is None else "invalid"

    def is_crowded(self, cell: Cell) -> bool:
        """Whether a cell failed for want of memory that other processes had, and was not given up."""
        entry = self.manifest.cell(cell.name)
        return bool(entry.get("crowded")) and not entry.get("given_up")


def open_plan(
    path: Path, settings: Sequence[str], out: Path | None, *, data: bool = True, only: Collection[str] | None = None
) -> Plan:
    """Read the matrix, make its cells with what is known so far, and check each: nothing is loaded and no folder made.

    A cell that cannot run has its ``problem``; the others are none the worse for it.

    Args:
        path: the matrix file.
        settings: ``key=value`` for all cells.
        out: folder of the run folders; None is ``runs/NAME``.
        data: check data, chat templates and reward functions too (seconds; once for all cells that share them).
        only: check these cells alone, and the arms whose entropy they match: for a process that works on them. None checks all.

    Raises:
        ConfigError: the matrix itself is refused, no cell can run and all for one reason, or a cell that has begun, or is kept, was begun with
            other settings.
        RunFolderError: the folder is that of a run.
        OutputError: the folder cannot be written.
    """
    matrix = load_matrix(path)
    folder = out if out is not None else Path("runs") / matrix.name
    check_writable(folder, folder=True)
    if RunDir(folder).holds_a_run():
        raise RunFolderError(
            "the folder of the matrix holds a run",
            got=folder,
            expected="a folder without one",
            remedy="Choose another --out",
        )
    recover_folders(folder)
    manifest = Manifest(folder)
    known = manifest.read()
    if known.get("matrix", matrix.name) != matrix.name:
        raise ConfigError(
            "the folder holds another matrix", got=f"{folder}: {known['matrix']}", remedy="Choose another --out"
        )
    choices = {arm: choice["axes"] for arm, choice in known["choices"].items() if choice["axes"] is not None}
    temperatures = {group: found["temperature"] for group, found in known["matched"].items()}
    cells = expand(matrix, path, settings, folder, choices=choices, temperatures=temperatures)
    stale = outdated(cells, known["matched"], folder)
    if stale:
        temperatures = {group: value for group, value in temperatures.items() if group not in stale}
        cells = expand(matrix, path, settings, folder, choices=choices, temperatures=temperatures)
    others = tuple(spec.data for spec in matrix.final if spec.data is not None)
    wanted = _concerned(cells, only)
    checked = tuple(_checked(cell, others, data=data) if cell.name in wanted else cell for cell in cells)
    _refuse_one_problem_of_all([cell for cell in checked if cell.name in wanted])
    plan = Plan(path=path, settings=tuple(settings), matrix=matrix, out=folder, cells=checked, manifest=manifest)
    _check_begun(plan, wanted)
    check_kept(plan, wanted)
    check_choices(plan, known["choices"])
    _check_finals(plan, known)
    return plan


def _concerned(cells: Sequence[Cell], only: Collection[str] | None) -> set[str]:
    """Names of the cells that a process looks at which works on ``only``."""
    asked = [cell for cell in cells if only is None or cell.name in only]
    matched = {cell.arm.match_temperature.arm for cell in asked if cell.arm.match_temperature is not None}
    return {cell.name for cell in asked} | {cell.name for cell in cells if cell.arm.name in matched}


def _check_finals(plan: Plan, known: Mapping[str, Any]) -> None:
    """Refuse an evaluation under noise where no arm has any, and one that has changed since some were made under its name."""
    under_noise = [spec.name for spec in plan.matrix.final if spec.noise != "off"]
    if under_noise and not any(cell.config is None or cell.config.aqn.enabled for cell in plan.cells):
        raise ConfigError(
            "no arm is trained with noise, so no model would be evaluated under it",
            got=f"final: {', '.join(under_noise)}",
            remedy="Take it out, or enable aqn in an arm",
        )
    if not any(entry.get("state") in ("finished", "trained") for entry in known["cells"].values()):
        return
    before = {spec["name"]: spec for spec in (known.get("plan") or {}).get("final", ())}
    for spec in plan.matrix.final:
        if spec.name in before and FinalConfig.model_validate(before[spec.name]) != spec:
            raise ConfigError(
                "an evaluation of trained models has changed that some cells have had",
                got=f"final: {spec.model_dump(mode='json')}",
                expected=f"{before[spec.name]}",
                remedy="Give the changed one another name, or choose another --out",
            )


def _refuse_one_problem_of_all(cells: Sequence[Cell]) -> None:
    """A mistyped setting or a missing data set is one mistake, not one a cell."""
    problems = {cell.problem for cell in cells}
    problem = next(iter(problems), None)
    if len(problems) == 1 and problem is not None:
        raise ConfigError(f"no cell of the matrix can run: {problem}")


def _checked(cell: Cell, others: Sequence[str], *, data: bool) -> Cell:
    """The cell with what is wrong with it, or with the lengths that its run will have."""
    if cell.config is None:
        return cell
    problem = _problem(cell, others, data=data)
    if problem is not None:
        return replace(cell, problem=problem)
    spec = ModelSpec.from_folder(require_model_path(cell.config))
    return replace(cell, config=fit_lengths(cell.config, spec)[0])


def _problem(cell: Cell, others: Sequence[str], *, data: bool) -> str | None:
    """Why a cell would end before its first step, found without weights; None when nothing is found.

    Args:
        cell: with a configuration.
        others: data sets that it is evaluated on beside its own.
        data: look at data, chat template and reward functions too.
    """
    config = cell.config
    assert config is not None
    try:
        check_trainable(config)
        spec = ModelSpec.from_folder(require_model_path(config))
        config, _ = fit_lengths(config, spec)
        check_lengths(config, spec)
        if config.train.mode == "lora":
            check_targets(spec, config.lora)
        check_formats(spec, config.quant)
        if config.aqn.enabled:
            places(config.aqn.sites, config.aqn.sharing, spec)
        settle_memory(config)
        if data:
            shared = config.model_copy(update=_INDIFFERENT)
            problem = _data_problem(shared.model_dump_json(), tuple(others))
            if problem is not None:
                return problem
    except QerlError as error:
        return _shortened(str(error))
    if config.data.eval is None or not config.eval.after:
        return "a cell of a matrix is judged by its evaluation after training: set data.eval, and eval.after=true"
    return None


def _shortened(message: str) -> str:
    """In one line; a memory plan that comes with a refusal is left out."""
    lines = message.splitlines()
    return message if len(lines) < 2 else f"{lines[0]}: {lines[-1]}"


_INDIFFERENT = {
    "quant": QuantConfig(),
    "lora": LoraConfig(),
    "aqn": AqnConfig(),
    "objective": ObjectiveConfig(),
    "optim": OptimConfig(),
    "train": TrainConfig(),
    "diagnostics": DiagnosticsConfig(),
    "log": LogConfig(),
    "run": RunConfig(),
}
"""Sections that data, template and rewards do not depend on: cells that differ in them alone are checked once."""


@lru_cache(maxsize=32)
def _data_problem(text: str, others: tuple[str, ...]) -> str | None:
    """What is wrong with data (``others`` are evaluated on too), chat template or reward functions of a configuration, given as JSON."""
    config = Config.model_validate_json(text)
    try:
        Rewarder(config.reward, config.rollout.max_new_tokens).close()
        tokenizer = load_tokenizer(require_model_path(config))
        load_prompts(config, tokenizer, config.data.train, "train", None, training=True)
        if config.data.eval is not None:
            load_prompts(config, tokenizer, config.data.eval, "test", config.data.eval_limit)
        for source in others:
            try:
                load_prompts(config, tokenizer, source, "test", None)
            except QerlError as error:
                return f"final, data set {source!r}: {_shortened(str(error))}"
    except QerlError as error:
        return _shortened(str(error))
    return None


def _check_begun(plan: Plan, wanted: Collection[str]) -> None:
    """Refuse a matrix that has changed since a cell was run: its cells would not be of one kind."""
    for cell in plan.cells:
        run = plan.run(cell)
        if cell.name not in wanted or cell.config is None or cell.pending or not run.config_path.exists():
            continue
        begun = load_config(run.config_path, [])
        try:
            check_same_config(begun, cell.config)
            if begun.train.steps != cell.config.train.steps:
                raise ConfigError("steps", got=f"train.steps: {begun.train.steps} -> {cell.config.train.steps}")
        except ConfigError as error:
            raise ConfigError(
                f"cell {cell.name} was begun with other settings",
                got=error.got,
                expected=f"those of {run.config_path}",
                remedy="Choose another --out for the changed matrix",
            ) from None


def record_plan(plan: Plan) -> None:
    """Write the plan into the manifest: the matrix, what it can be expected to detect, and each cell's place."""
    with plan.manifest.change() as value:
        value["matrix"] = plan.matrix.name
        value["plan"] = plan.matrix.model_dump(mode="json")
        value["detectable"] = detectable(plan.matrix)
        for cell in plan.cells:
            entry = value["cells"].setdefault(cell.name, {"state": "waiting"})
            entry |= {"arm": cell.arm.name, "seed": cell.seed, "phase": cell.phase, "axes": cell.axes}
            entry.pop("problem", None)
            if cell.problem is not None:
                entry["problem"] = cell.problem
            # What a cell has reached is not lost by what is wrong with it today.
            if entry["state"] in UNBEGUN:
                entry["state"] = "waiting" if cell.problem is None else "invalid"


def detectable(matrix: MatrixConfig) -> list[dict[str, Any]]:
    """Smallest detectable difference of every comparison, from ``detect`` and the numbers of seeds."""
    arms = {arm.name: arm for arm in matrix.arms}
    pairs = matrix.compare or tuple((matrix.arms[0].name, arm.name) for arm in matrix.arms[1:])
    found = []
    for first, second in pairs:
        counts = [len(matrix.seeds_of(arms[name])) for name in (first, second)]
        smallest = None
        if min(counts) > 1:
            smallest = detectable_difference(
                matrix.detect.sd, counts[0], counts[1], alpha=matrix.detect.alpha, power=matrix.detect.power
            )
        found.append({"first": first, "second": second, "seeds": counts, "difference": smallest})
    return found


def plan_lines(plan: Plan) -> list[str]:
    """The plan as text, for ``--dry-run``: cells with their states, what is missing, what can be detected."""
    matrix = plan.matrix
    lines = [f"{matrix.name}: protocol {matrix.protocol}, {len(plan.cells)} cells, folder {plan.out}"]
    if matrix.tuning is not None:
        trials = Counter(cell.arm.name for cell in plan.cells if cell.phase == "tune")
        lines.append("trials an arm: " + ", ".join(f"{name} {count}" for name, count in trials.items()))
    lines.append(f"target {matrix.target.accuracy:.1%}" + _budget(matrix))
    rows = detectable(matrix)
    for row in rows:
        if row["difference"] is not None:
            lines.append(
                f"{row['second']} against {row['first']}: smallest detectable difference: {100 * row['difference']:.1f} points "
                f"(seeds {row['seeds'][0]} and {row['seeds'][1]}, sd {100 * matrix.detect.sd:g} points: {matrix.detect.source}; "
                f"level {matrix.detect.alpha:g}, power {matrix.detect.power:g})"
            )
    single = [f"{row['second']} against {row['first']}" for row in rows if row["difference"] is None]
    if single:
        lines.append(f"no detectable difference is stated, for one seed has no interval: {', '.join(single)}")
    width = max(len(cell.name) for cell in plan.cells)
    for cell in plan.cells:
        state = "INVALID" if cell.problem is not None else plan.state(cell)
        notes = [note for note in (_open(cell), cell.problem, _failure(plan, cell), _lost(plan, cell)) if note]
        lines.append(f"  {cell.name:<{width}}  {state}" + (f": {'; '.join(notes)}" if notes else ""))
    return lines


def _failure(plan: Plan, cell: Cell) -> str | None:
    """Why a cell has failed, and how it is run again."""
    if cell.problem is not None or plan.state(cell) != "failed":
        return None
    error = plan.manifest.cell(cell.name).get("error")
    again = "the same command" if is_taken_up(plan, cell) else "--retry"
    return f"{brief(error) if error else 'for a reason that is not known'}; {again} runs it again"


def _lost(plan: Plan, cell: Cell) -> str | None:
    """That a cell which is done has left nothing here."""
    gone = plan.state(cell) in ("trained", "finished") and not plan.run(cell).path.exists()
    return "its folder is not here, so it is run again" if gone else None


def _budget(matrix: MatrixConfig) -> str:
    seconds = matrix.target.device_seconds
    return "" if seconds is None else f" within {seconds:g} device-seconds of training"


def _open(cell: Cell) -> str | None:
    if not cell.pending or cell.problem is not None:
        return None
    return "its trials choose its settings" if cell.phase == "final" else "its temperature is to be found"
