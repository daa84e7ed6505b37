"""Captured decode steps by themselves: their time, and that of their kernels by class, with rows of any length and no answers to wait for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.timing import device_times
from qerl.kernels.cuda import Kernel
from qerl.rollout.workspace import Workspace

CLASSES = (
    ("attention", ("attend", "flash", "fmha")),
    ("activation", ("_silu",)),
    ("norm", ("_forward",)),
    ("sampling", ("_block_stats", "_pick", "_uniforms", "_advance")),
    ("linear", ("nvjet", "gemm", "splitk", "cublas", "decode", "dequant", "middle", "shrink", "cutlass")),
)
"""Parts of the names of kernels, in small letters; the first that fits."""


def class_of(kernel: str) -> str:
    """What a kernel of that name does."""
    return next((kind for kind, parts in CLASSES if any(part in kernel.lower() for part in parts)), "other")


def step_of(workspace: Workspace, rows: int, context: int) -> Callable[[], None]:
    """Captures a step of so many rows with ``context`` tokens in each, and gives what replays it; what runs it, where steps are not captured.

    Rows that are not alive stay where they are. Each has pages of its own while there are enough; then they begin again.
    """
    assert workspace.table_RN is not None
    graphs, page_tokens, bucket = workspace.graphs, workspace.cache.page_tokens, workspace.step_rows(rows)
    workspace.state.length_R[:rows] = context
    held = context // page_tokens + 1
    pages = torch.arange(1, rows * held + 1, device=workspace.device) % workspace.layout.pages
    workspace.table_RN[:rows, :held] = pages.view(rows, held)
    key, columns = workspace.graph_key(bucket, context), workspace._columns(bucket, context)

    @torch.no_grad()
    def step() -> None:
        if graphs is None:
            workspace._step(bucket, context, columns)
        else:
            graphs.run(key, lambda: workspace._step(bucket, 0, columns))
        workspace.state.cursor_1.zero_()

    step()
    return step


@contextmanager
def launches_apart(device: torch.device) -> Iterator[None]:
    """Inside, no kernel is launched before the one in front of it has ended: their times add up, to more than with launches that overlap."""
    from qerl.kernels.overlap import overlap

    launch = Kernel.launch

    def apart(kernel: Kernel, geometry: Any, params: Any) -> None:
        launch(kernel, dataclasses.replace(geometry, overlap=False), params)

    with patch.dict(overlap(device), {"OVERLAP": False, "launch_pdl": False}), patch.object(Kernel, "launch", apart):
        yield


def profile(workspace: Workspace, rows: int, context: int, *, bare: bool = False) -> dict[str, Any]:
    """Microseconds of a captured step alone (median, second and eighth decile of 20); unless ``bare``, the number of its kernels, and with
    launches that do not overlap (`apart`) the whole, its kernels by class, and the slowest of them. Nothing without captured steps."""
    if workspace.graphs is None:
        return {}
    overlapping = {"captured_us_deciles": [round(us, 1) for us in device_times(step_of(workspace, rows, context))]}
    if bare:
        return overlapping
    graphs = workspace.graphs
    workspace.graphs = type(graphs)(workspace.device)
    try:
        with launches_apart(workspace.device):
            step = step_of(workspace, rows, context)
    finally:
        workspace.graphs = graphs
    apart = device_times(step)
    return overlapping | {"apart": _kernels(step, apart[0])}


def _kernels(step: Callable[[], None], whole: float, replays: int = 4) -> dict[str, Any]:
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(replays):
            step()
        torch.cuda.synchronize()
    found = {event.key: event for event in recorded.key_averages() if event.self_device_time_total > 0}
    by_class: dict[str, float] = {}
    for name, event in found.items():
        kind = class_of(name)
        by_class[kind] = by_class.get(kind, 0.0) + event.self_device_time_total / replays
    slowest = sorted(found.items(), key=lambda item: -item[1].self_device_time_total)[:12]
    return {
        "us": round(whole, 1),
        "us_by_class": {kind: round(us, 1) for kind, us in sorted(by_class.items(), key=lambda item: -item[1])},
        "kernels": round(sum(event.count for event in found.values()) / replays),
        "slowest_us": {
            name[:80]: [round(e.self_device_time_total / replays, 1), round(e.count / replays)] for name, e in slowest
        },
    }
