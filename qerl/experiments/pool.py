"""Cells in processes of their own, several at one time, spread over the GPUs of the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from qerl.errors import RunStopped
from qerl.experiments.cells import Cell
from qerl.experiments.plan import Plan
from qerl.experiments.process import AGAIN, LOOK_SECONDS, Child, Ending
from qerl.train.stop import StopRequest


def visible_devices() -> tuple[str, ...]:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them; none without a GPU.

    CUDA knows those before the first name of none that is there.
    """
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(part.strip() for part in named.split(",") if part.strip())[:count]
    return tuple(map(str, range(count)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A cell at work."""

    cell: Cell
    child: Child
    device: str | None
    search: bool
    """Whether it looks for the temperature of the cell's arm, and does not run the cell."""


class Pool:
    """Starts cells and waits for them. Those of this command that share a device are marked in the manifest as they are begun, for
    their times are not their own; with cells of other commands they mark themselves (``one_cell``).

    Args:
        plan: the matrix.
        jobs: most cells at one time.
        devices: GPUs to spread them over, least used first; none leaves the choice to the cells.
    """

    def __init__(self, plan: Plan, jobs: int, devices: Sequence[str]):
        self._plan, self._jobs, self._devices = plan, jobs, tuple(devices)
        self.running: list[Running] = []

    @property
    def has_room(self) -> bool:
        return len(self.running) < self._jobs

    @property
    def has_idle_device(self) -> bool:
        """Whether the next cell would have no other beside it."""
        return min(map(self._load, self._devices)) == 0 if self._devices else not self.running

    def start(self, cell: Cell, arguments: Sequence[str], seconds: float | None, *, search: bool = False) -> None:
        """Begin a cell, or the search for its temperature, on the device with the fewest."""
        device = min(self._devices, key=self._load, default=None)
        manifest = self._plan.manifest
        beside = [other for other in self.running if other.device == device]
        names = [other.cell.name for other in beside if not other.search]
        if search:
            manifest.note_sharing([*names, *manifest.at_work(device)])
        else:
            manifest.note(cell.name, device=device)
            if beside:
                manifest.note_sharing([cell.name, *names])
        name = None if self._jobs == 1 else f"{cell.group} (temperature)" if search else cell.name
        child = Child(self._plan, ["--cell", cell.name, *arguments], seconds, device, name)
        self.running.append(Running(cell=cell, child=child, device=device, search=search))

    def _load(self, device: str) -> int:
        return sum(other.device == device for other in self.running)

    def take_ended(self) -> list[tuple[Running, Ending]]:
        """Those whose process has ended since the last call, each with how."""
        ended = [entry for entry in self.running if not entry.child.running]
        self.running = [entry for entry in self.running if entry not in ended]
        return [(entry, entry.child.ending()) for entry in ended]

    @contextmanager
    def passing_signals_on(self) -> Iterator[Callable[[], bool]]:
        """Within it the first stop signal stops every cell after its step, and a second one ends them at once. Yields
        whether a signal has come.

        Raises:
            RunStopped: at the end, if one has come.
        """

        def stop_all(text: str) -> None:
            for entry in self.running:
                entry.child.stop()

        with StopRequest(stop_all) as stop:
            try:
                yield lambda: stop.requested
            except BaseException:
                for entry in self.running:
                    entry.child.kill()
                raise
        if stop.signal_number is not None:
            raise RunStopped(
                f"running cells were stopped after their step, which is saved. {AGAIN} goes on", stop.signal_number
            )

    def wait(self) -> None:
        """A moment between two looks."""
        time.sleep(LOOK_SECONDS)
