"""Times by the device's own clock."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch


def require_gpu(*, tiny: bool) -> None:
    """Ends the program where it would need a GPU and there is none."""
    if not tiny and not torch.cuda.is_available():
        print(
            "error: this benchmark measures a CUDA device, and torch finds none (kernels, rollout, prefill, curves, step, layers and loop have --tiny for the CPU)",
            file=sys.stderr,
        )
        raise SystemExit(2)


def device_times(run: Callable[[], Any], calls: int = 1, samples: int = 20) -> list[float]:
    """Microseconds a call: median, second and eighth decile of `samples` runs of `calls` calls each, after two to warm up."""
    times = []
    for _ in range(samples + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / calls)
    return deciles(times[2:])


def captured(*runs: Callable[[], Any], calls: int = 12) -> list[float]:
    """Microseconds a call: median, second and eighth decile of 20 replays of a graph that calls the given functions in turn."""
    for run in runs:
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            runs[index % len(runs)]()
    return device_times(graph.replay, calls)


def host_seconds(run: Callable[[], Any]) -> float:
    """Of one run by the host's clock, a device waited for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def host_times(run: Callable[[], Any], samples: int = 20) -> list[float]:
    """As `device_times`, by the host's clock: for the CPU."""
    times = []
    for _ in range(samples + 2):
        began = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - began))
    return deciles(times[2:])


def deciles(times: list[float]) -> list[float]:
    """Median, second and eighth decile."""
    tenths = statistics.quantiles(times, n=10)
    return [statistics.median(times), tenths[1], tenths[7]]
