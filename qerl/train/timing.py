"""Seconds by stage: of one step, and of the whole run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qerl.kernels.compiling import CompileClock
from qerl.memory import PhasePeaks
from qerl.metrics.machine_catalogue import STAGES


class StageTimer:
    """Adds up wall seconds by stage name, and watches the peaks of memory between their borders.

    Args:
        device: whose memory.

    Attributes:
        peaks: by stage; empty on the CPU.
        compiling: seconds of compilers, which are part of the stages that met a kernel for the first time.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.peaks = PhasePeaks(torch.device(device))
        self.compiling = CompileClock(triton=self.peaks.device.type == "cuda")
        self.step: dict[str, float] = defaultdict(float)
        self.total: dict[str, float] = defaultdict(float)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block and charge it to ``name``, one of :data:`STAGES`. On a GPU the stage ends when its work there has ended."""
        assert name in STAGES, f"unknown stage {name!r}"
        start = time.perf_counter()
        self.peaks.begin()
        try:
            yield
        finally:
            if self.peaks.device.type == "cuda":
                torch.cuda.synchronize(self.peaks.device)
            seconds = time.perf_counter() - start
            self.peaks.end(name)
            self.step[name] += seconds
            self.total[name] += seconds

    def end_step(self) -> dict[str, float]:
        """Seconds of the step by stage (every stage present), and start the next step at 0."""
        seconds = {name: self.step[name] for name in STAGES}
        self.step.clear()
        return seconds
