"""What a capture does around the step it records; on a machine without a GPU, by the calls that torch gets."""

from contextlib import nullcontext

import pytest
import torch

from qerl.rollout import cuda_graphs
from qerl.rollout.cuda_graphs import GraphPool


def test_memory_that_is_cached_is_given_back_before_a_capture_and_not_in_it(monkeypatch):
    """Within a capture the allocator may not free, so at its bound it would find none; a step that fails ends its capture."""
    told = []

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            told.append(f"begin {pool}")

        def capture_end(self):
            told.append("end")

        def replay(self):
            told.append("replay")

    for name, call in (
        ("CUDAGraph", Graph),
        ("graph_pool_handle", lambda: "pool"),
        ("stream", lambda stream: nullcontext()),
        ("synchronize", lambda device: told.append("wait")),
        ("empty_cache", lambda: told.append("give back")),
    ):
        monkeypatch.setattr(torch.cuda, name, call)
    monkeypatch.setattr(cuda_graphs, "_capture_stream", lambda device: None)
    pool = GraphPool(torch.device("cuda"))
    pool.run("a", lambda: told.append("step"))
    assert told == ["step", "wait", "give back", "begin pool", "step", "end"]
    pool.run("a", lambda: told.append("step"))
    assert told[6:] == ["replay"] and pool.captures == 1
    del told[:]

    def fails():
        told.append("step")
        if len(told) > 1:
            raise torch.OutOfMemoryError("in the capture")

    with pytest.raises(torch.OutOfMemoryError):
        pool.run("b", fails)
    assert told == ["step", "wait", "give back", "begin pool", "step", "end"] and pool.captures == 1
