"""Where metrics go: ``metrics.jsonl`` always, and the trackers that ``log.backends`` names.

To add a tracker: a class with ``log`` and ``close``, and its name in ``TRACKERS``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from qerl.errors import ConfigError, MissingDependencyError, nearest
from qerl.metrics.catalogue import lookup
from qerl.metrics.run_dir import RunDir

PROJECT = "qerl"


class Tracker(Protocol):
    """Something that receives the metrics of each step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files under ``<run>/tensorboard``."""

    def __init__(self, run: RunDir, config: Mapping[str, Any], completed_steps: int):
        module = _require("torch.utils.tensorboard", "tensorboard")
        # After a resume, points of steps that are made again replace those of the crashed run.
        purge = completed_steps + 1 if completed_steps > 0 else None
        self._writer = module.SummaryWriter(log_dir=str(run.path / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run with the name of the run folder, whose local files stay inside it."""

    def __init__(self, run: RunDir, config: Mapping[str, Any], completed_steps: int):
        module = _require("wandb")
        stored = run.wandb_id_path
        resumed = stored.read_text(encoding="utf-8").strip() if completed_steps > 0 and stored.exists() else None
        self._run = module.init(
            project=PROJECT,
            name=run.path.name,
            dir=str(run.path),
            config=dict(config),
            id=resumed,
            resume="allow" if resumed else None,
        )
        run.write_text(stored, f"{self._run.id}\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """A trackio run with the name of the run folder."""

    def __init__(self, run: RunDir, config: Mapping[str, Any], completed_steps: int):
        self._module = _require("trackio")
        resume = "allow" if completed_steps > 0 else "never"
        self._module.init(project=PROJECT, name=run.path.name, config=dict(config), resume=resume)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._module.log(dict(metrics), step=step)

    def close(self) -> None:
        self._module.finish()


TRACKERS: dict[str, Callable[[RunDir, Mapping[str, Any], int], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
}
"""Name in ``log.backends`` -> tracker; ``jsonl`` is not among them, for it is always written."""


class MetricsWriter:
    """Writes each step's metrics everywhere they go.

    Args:
        run: the run folder.
        backends: ``log.backends``.
        config: the resolved configuration, for trackers that show it.
        completed_steps: steps that are already written; above 0 after a resume.

    Raises:
        ConfigError: a backend is not known.
        MissingDependencyError: the package of a backend is not installed.
    """

    def __init__(
        self,
        run: RunDir,
        backends: Sequence[str] = ("jsonl",),
        *,
        config: Mapping[str, Any] | None = None,
        completed_steps: int = 0,
    ):
        self._run = run
        self._trackers: list[Tracker] = []
        for name in check_backends(backends):
            self._trackers.append(TRACKERS[name](run, config or {}, completed_steps))

    def write(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """Writes one step.

        Raises:
            KeyError: a key is not in the catalogue.
        """
        for key in metrics:
            lookup(key)
        self._run.append_metrics(step, metrics)
        numeric = {key: float(value) for key, value in metrics.items() if value is not None and key != "step"}
        for tracker in self._trackers:
            tracker.log(step, numeric)

    def close(self) -> None:
        """Ends the trackers; ``metrics.jsonl`` needs no end."""
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_backends(backends: Sequence[str]) -> list[str]:
    """The trackers among ``log.backends``, each once.

    Raises:
        ConfigError: a backend is not known.
        MissingDependencyError: the package of a backend is not installed.
    """
    names = [name for name in dict.fromkeys(backends) if name != "jsonl"]
    for name in names:
        if name not in TRACKERS:
            known = ("jsonl", *TRACKERS)
            raise ConfigError(
                "unknown log.backends entry",
                got=repr(name),
                expected=" | ".join(known),
                remedy=f"Did you mean {nearest(name, known)}?" if nearest(name, known) else None,
            )
        # A tracker's name is that of its package.
        _require(name)
    return names


def _require(module: str, package: str | None = None) -> Any:
    """Imports an optional package, or says how to install it."""
    package = package or module
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"log.backends names {package}, which is not installed",
            remedy=f"Run `pip install {package}`, or take {package} out of log.backends",
        ) from error
