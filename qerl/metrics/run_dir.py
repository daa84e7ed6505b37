"""The run folder: the one place that knows its file names.

::

    runs/<name>/
      config.resolved.yaml   what really ran
      env.json               machine and versions
      metrics.jsonl          one line a step (step 0: the evaluation before training)
      probe.json             the fixed probe set of the diagnostics
      completions/           step-000001.txt: answers, for people
      rollouts/              rollout-000000.parquet: behavior records
      evaluations/           step-000000.jsonl: one line a question; -noise0: with the noise of training
      adapters/              rollout-000000/: the adapter a rollout was sampled with
      checkpoints/           checkpoint-50/
      nonfinite/             update-000007.pt: the batch of an update whose gradient was not finite
      memory.json            bytes by owner, predicted and measured
      summary.json           written at the end
      final.json             more evaluations of the trained model (a cell of a matrix)
      cell.json              the run in small, as results/ keeps it (a cell of a matrix)
      report.html
      run.lock               while a process writes here (``metrics.run_lock``)
      wandb_id, tensorboard/ only with those backends

Files and checkpoint folders appear whole or not at all: they are written under a temporary name that starts with a
dot, then renamed. Only ``metrics.jsonl`` grows in place, a line at a time, and a half-written last line is ignored.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from qerl.errors import RunFolderError, nearest
from qerl.metrics.behavior import write_behavior
from qerl.metrics.files import (
    damaged_file,
    is_temporary,
    output_errors,
    read_json_lines,
    read_json_object,
    recover_folders,
    to_json,
    whole_file,
    write_json,
)

MATRIX_NAME = "matrix.json"
"""File that makes a folder that of a matrix, whose cells are run folders in it."""

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_EVALUATION = re.compile(r"step-(\d+)\.jsonl")
_NUMBERED = re.compile(r"(?:step|rollout)-(\d+)(?:-noise\d+)?(?:\.\w+)?")


class RunDir:
    """Paths of one run folder, and how its files are written and read."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config_path = self.path / "config.resolved.yaml"
        self.env_path = self.path / "env.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.probe_path = self.path / "probe.json"
        self.memory_path = self.path / "memory.json"
        self.summary_path = self.path / "summary.json"
        self.final_path = self.path / "final.json"
        self.cell_path = self.path / "cell.json"
        self.report_path = self.path / "report.html"
        self.wandb_id_path = self.path / "wandb_id"
        self.completions_dir = self.path / "completions"
        self.rollouts_dir = self.path / "rollouts"
        self.evaluations_dir = self.path / "evaluations"
        self.adapters_dir = self.path / "adapters"
        self.checkpoints_dir = self.path / "checkpoints"

    @classmethod
    def create(cls, path: str | Path) -> RunDir:
        """A new run folder; an existing folder is fine as long as it holds no run.

        Raises:
            RunFolderError: the folder already holds a run or a matrix, or the path is a file.
        """
        run = cls(path)
        run.refuse_a_run()
        run.path.mkdir(parents=True, exist_ok=True)
        return run

    def refuse_a_run(self, *, remedy: str | None = None) -> None:
        """Checks that a new run may be made here; writes nothing.

        Args:
            remedy: what to do about a folder that holds one; None says what helps when training.

        Raises:
            RunFolderError: the folder already holds a run, or the summary of one, or the path is a file.
        """
        if any(parent.is_file() for parent in (self.path, *self.path.parents)):
            raise RunFolderError(
                "the run folder is a file",
                got=self.path,
                expected="a folder",
                remedy="Choose another run.name or run.dir",
            )
        if (self.path / MATRIX_NAME).exists():
            raise RunFolderError(
                "the run folder is that of a matrix",
                got=self.path,
                expected="a folder of its own",
                remedy="Choose another run.name or run.dir",
            )
        if self.holds_a_run():
            raise RunFolderError(
                "the run folder already holds a run",
                got=self.path,
                expected="a folder without one",
                remedy=remedy or self._remedy(),
            )
        if self.summary_path.exists():
            raise RunFolderError(
                "the run folder holds the summary of a run, which a new one would replace",
                got=self.summary_path,
                expected="a folder without one",
                remedy="Choose another run.name or run.dir",
            )

    def _remedy(self) -> str:
        """What a user who wants to train can do about a run that is here already."""
        if self.latest_checkpoint() is None:
            return "Delete the folder, for it has no checkpoint to go on from, or choose another run.name"
        others = "choose another run.name, or delete the folder"
        if not self.summary_path.exists() or (self.read_json(self.summary_path) or {}).get("status") != "finished":
            return f"Continue it with --resume, {others}"
        return f"The run is finished: make it longer with --resume and a larger train.steps, {others}"

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """An existing run folder, finished or not.

        Raises:
            RunFolderError: there is no such folder, or it holds no run.
        """
        run = cls(path)
        if not run.holds_a_run():
            what = "the folder holds no run" if run.path.is_dir() else "there is no such run folder"
            parent = run.path.absolute().parent
            open_to_us = (path for path in _entries(parent) if os.access(path, os.X_OK))
            close = nearest(run.path.name, (path.name for path in open_to_us if RunDir(path).holds_a_run()))
            raise RunFolderError(
                what,
                got=run.path,
                expected=f"a folder with {run.config_path.name}" + (f" (nearest: {parent / close})" if close else ""),
                remedy="Give the folder of a run, such as runs/demo",
            )
        return run

    def holds_a_run(self) -> bool:
        """Whether a run has written its configuration or metrics here."""
        return self.config_path.exists() or self.metrics_path.exists()

    def write_text(self, name: str | Path, text: str) -> Path:
        """Writes a text file whole or not at all; a name is taken inside the run folder, a path of it as it is."""
        path = self._inside(name)
        with whole_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
        return path

    def write_json(self, name: str | Path, value: Any) -> Path:
        """Writes JSON whole or not at all; numbers that are not finite become null."""
        path = self._inside(name)
        write_json(path, value)
        return path

    def read_json(self, name: str | Path) -> dict[str, Any] | None:
        """The content of a JSON file of the run, or None when there is no such file.

        Raises:
            RunFolderError: the file holds no JSON object.
        """
        path = self._inside(name)
        return read_json_object(path) if path.exists() else None

    def _inside(self, name: str | Path) -> Path:
        """The path of a name; one of the folder's own paths stays as it is, also when the folder itself is relative."""
        path = Path(name)
        return path if path.is_relative_to(self.path) else self.path / path

    def append_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends the line of one step and hands it to the operating system before returning."""
        line = json.dumps(to_json({"step": step} | {k: v for k, v in metrics.items() if k != "step"}), allow_nan=False)
        with output_errors(self.metrics_path):
            self._drop_half_line()
            with self.metrics_path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()

    def _drop_half_line(self) -> None:
        """Cuts what a crash left after the last line end, so that the next line stands alone."""
        if not self.metrics_path.exists():
            return
        with self.metrics_path.open("rb+") as file:
            content = file.read() if _ends_mid_line(file) else b""
            if content:
                file.truncate(content.rfind(b"\n") + 1)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` in order of steps; of two lines for one step, the later.

        A last line without its end (a crash, or a run that is writing right now) is left out.

        Raises:
            RunFolderError: any other line is not a JSON object with a step.
        """
        if not self.metrics_path.exists():
            return []
        with damaged_file(self.metrics_path, "a JSON object in each line"):
            text = self.metrics_path.read_text(encoding="utf-8", errors="replace")
        rows: dict[int, dict[str, Any]] = {}
        for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
            try:
                row = json.loads(line)
                rows[int(row["step"])] = row
            except (ValueError, KeyError, TypeError) as error:
                raise RunFolderError(
                    "a line of the metrics file cannot be read",
                    got=f"{self.metrics_path}, line {number}: {line[:80]!r}",
                    expected="a JSON object with a step",
                    remedy="Delete that line",
                ) from error
        return [rows[step] for step in sorted(rows)]

    def truncate_metrics(self, step: int) -> None:
        """Keeps only the lines of steps up to and with ``step``."""
        kept = [row for row in self.read_metrics() if row["step"] <= step]
        self.write_text(self.metrics_path, "".join(json.dumps(row) + "\n" for row in kept))

    def rewind(self, step: int, *, rollout: int) -> None:
        """Makes the folder what it was right after ``step``, before going on from its checkpoint.

        Removes later metrics, answers, records, adapters and checkpoints, what a crash left half written, and the
        summary and report of a run that had ended.

        Args:
            step: last completed step to keep.
            rollout: index of the next rollout; records and adapters from this one on are removed.
        """
        self.truncate_metrics(step)
        first_removed = {
            self.completions_dir: step + 1,
            self.evaluations_dir: step + 1,
            self.rollouts_dir: rollout,
            self.adapters_dir: rollout,
        }
        for folder, first in first_removed.items():
            for path in _entries(folder):
                match = _NUMBERED.fullmatch(path.name)
                if match and int(match[1]) >= first:
                    _remove(path)
        for path in _entries(self.checkpoints_dir):
            match = _CHECKPOINT.fullmatch(path.name)
            if match and int(match[1]) > step:
                _remove(path)
        for folder in (
            self.path,
            self.completions_dir,
            self.evaluations_dir,
            self.rollouts_dir,
            self.adapters_dir,
            self.checkpoints_dir,
        ):
            for path in _entries(folder):
                if is_temporary(path):
                    _remove(path)
        self.summary_path.unlink(missing_ok=True)
        self.report_path.unlink(missing_ok=True)

    def recover(self) -> None:
        """Brings back a checkpoint, or a kept adapter, that a killed process was replacing.

        Raises:
            OutputError: the system refuses.
        """
        for folder in (self.checkpoints_dir, self.adapters_dir):
            recover_folders(folder)

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint after ``step`` lies; write it inside ``files.whole_folder``."""
        return self.checkpoints_dir / f"checkpoint-{step}"

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Complete checkpoints as (step, folder), oldest first."""
        found = [(_CHECKPOINT.fullmatch(path.name), path) for path in _entries(self.checkpoints_dir) if path.is_dir()]
        return sorted((int(match[1]), path) for match, path in found if match)

    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        complete = self.checkpoints()
        return complete[-1][1] if complete else None

    def completions_path(self, step: int) -> Path:
        """Text file with answers of one step."""
        return self.completions_dir / f"step-{step:06d}.txt"

    def rollout_path(self, index: int) -> Path:
        """Parquet file with the behavior records of one rollout."""
        return self.rollouts_dir / f"rollout-{index:06d}.parquet"

    def nonfinite_path(self, update: int) -> Path:
        """File with the batch of an update whose gradient was not finite."""
        return self.path / "nonfinite" / f"update-{update:06d}.pt"

    def adapter_path(self, index: int) -> Path:
        """Folder with the adapter that one rollout was sampled with; write it inside ``files.whole_folder``."""
        return self.adapters_dir / f"rollout-{index:06d}"

    def rollout_paths(self) -> list[tuple[int, Path]]:
        """Behavior-record files as (rollout index, file), oldest first."""
        found = [(_NUMBERED.fullmatch(path.name), path) for path in _entries(self.rollouts_dir)]
        return sorted((int(match[1]), path) for match, path in found if match and path.suffix == ".parquet")

    def write_completions_text(self, step: int, text: str) -> Path:
        """Writes the readable answers of one step."""
        return self.write_text(self.completions_path(step), text)

    def write_evaluation(self, step: int, rows: Sequence[Mapping[str, Any]], *, draw: int | None = None) -> Path:
        """Writes the answers of an evaluation after ``step``, one JSON line a question; ``draw``: the key of its noise, where
        the policy was measured with noise beside the clean one."""
        lines = [json.dumps(to_json(row), ensure_ascii=False, allow_nan=False) for row in rows]
        name = f"step-{step:06d}.jsonl" if draw is None else f"step-{step:06d}-noise{draw}.jsonl"
        return self.write_text(self.evaluations_dir / name, "\n".join(lines) + "\n")

    def evaluation_steps(self) -> list[int]:
        """Steps after which there are evaluations, oldest first."""
        found = [_EVALUATION.fullmatch(path.name) for path in _entries(self.evaluations_dir)]
        return sorted(int(match[1]) for match in found if match)

    def read_evaluation(self, step: int) -> list[dict[str, Any]]:
        """The rows of an evaluation.

        Raises:
            RunFolderError: a line is damaged.
        """
        return read_json_lines(self.evaluations_dir / f"step-{step:06d}.jsonl")

    def write_final_evaluation(self, name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Writes the answers of a named evaluation of the trained model, one JSON line a question."""
        return self._write_lines(f"final-{name}.jsonl", rows)

    def read_final_evaluation(self, name: str) -> list[dict[str, Any]]:
        """The rows of a named evaluation of the trained model."""
        return read_json_lines(self.evaluations_dir / f"final-{name}.jsonl")

    def _write_lines(self, name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
        lines = [json.dumps(to_json(row), ensure_ascii=False, allow_nan=False) for row in rows]
        return self.write_text(self.evaluations_dir / name, "\n".join(lines) + "\n")

    def write_rollout_parquet(
        self, index: int, rows: Sequence[Mapping[str, Any]], *, run_facts: Mapping[str, str] | None = None
    ) -> Path:
        """Writes the behavior records of one rollout (``metrics.behavior.behavior_rows``).

        Args:
            index: rollout index.
            rows: one row a sample.
            run_facts: what holds for the whole run (checkpoint path and hash, tokenizer and template hashes); kept in
                the file's schema metadata.
        """
        path = self.rollout_path(index)
        with whole_file(path) as temporary:
            write_behavior(temporary, rows, run_facts or {})
        return path


def _ends_mid_line(file: BinaryIO) -> bool:
    """Whether a file's last byte is not a line end; leaves the position at the start."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    last = file.read(1)
    file.seek(0)
    return last != b"\n"


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
