"""Captured decode steps, kept by what they were captured for.

A graph replays the same kernels on the same memory. Whatever may change between replays (tokens, lengths, pages, noise, adapters,
temperature, random keys) is therefore read from device memory that is updated in place; whatever decides which kernels run is
part of the key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from functools import cache

import torch


class GraphPool:
    """Graphs by key, in one memory pool: they run one after another, so they share what they need in between.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.captures = 0
        self.capture_seconds = 0.0
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device)

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Do one step: as it is the first time (which compiles what there is to compile) and captured then, later from the graph.

        Args:
            key: everything that decides which kernels the step runs, and on which memory.
            step: reads and writes memory that stays where it is, and asks nothing of the host.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        began = time.perf_counter()
        step()
        self._graphs[key] = self._capture(step)
        self.captures += 1
        self.capture_seconds += time.perf_counter() - began

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record the kernels of a step, which does not run them."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        # During a capture the allocator gives nothing back of what it has cached, and would run out of memory instead.
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
        return graph


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of a device that steps are captured on: cuBLAS keeps a workspace (32 MiB) for every stream that it has seen."""
    return torch.cuda.Stream(device)
