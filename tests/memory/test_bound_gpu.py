"""A bound on a GPU: what the allocator reserves, and what it costs to keep to it."""

import gc

import pytest
import torch
from memory_builders import configured

from qerl import memory
from qerl.errors import DeviceMemoryError
from qerl.kernels.cuda import LentMemory, bounded, can_lend, lent_bytes, room_in_share
from qerl.rollout.cuda_graphs import GraphPool
from qerl.units import GB

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda:0")
MB = 1 << 20
LAYERS = 24
SIZES = tuple(60 * MB + 5 * MB * index for index in range(4))
"""Bytes of a layer's largest tensor in passes that grow: 1.5 to 1.9 GB of 24 layers."""
ROOM = 2200 * MB
"""Holds the largest pass, and no two of them."""


@pytest.fixture(autouse=True)
def start():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    gc.collect()
    torch.cuda.synchronize(DEVICE)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    return held()


def held():
    return torch.cuda.memory_reserved(DEVICE) + lent_bytes(DEVICE)[0]


def passes(before=None):
    """Forward and backward of growing passes, and most that was reserved."""
    for size in SIZES:
        if before is not None:
            before(size)
        kept = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in range(LAYERS)]
        while kept:
            kept.pop()
    return torch.cuda.max_memory_reserved(DEVICE)


def test_growing_passes_stay_below_a_bound_and_without_one_do_not(start):
    with bounded(start + ROOM, DEVICE):
        assert passes() <= start + ROOM
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    assert torch.cuda.get_per_process_memory_fraction(0) == 1.0
    assert passes() > start + 2 * ROOM, "each pass beside what those before it left"


def test_room_that_is_made_before_larger_passes_keeps_to_what_they_need_without_a_bound(start):
    peaks = memory.PhasePeaks(DEVICE)
    assert passes(peaks.make_room) <= start + LAYERS * (SIZES[-1] + 2 * MB)
    assert peaks.larger_passes == len(SIZES)
    retries = torch.cuda.memory_stats(DEVICE)["num_alloc_retries"]
    assert passes(peaks.make_room) <= start + LAYERS * (SIZES[-1] + 2 * MB)
    assert peaks.larger_passes == len(SIZES), "and once"
    assert torch.cuda.memory_stats(DEVICE)["num_alloc_retries"] == retries


def test_lent_memory_and_the_allocator_have_the_bound_together(start):
    if not can_lend(DEVICE):
        pytest.skip("no addresses apart from memory")
    others = lent_bytes(DEVICE)[0]
    with bounded(start + 1024 * MB, DEVICE):
        lent = LentMemory(600 * MB, DEVICE)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(500 * MB, dtype=torch.uint8, device=DEVICE)
        assert torch.empty(300 * MB, dtype=torch.uint8, device=DEVICE).is_cuda
        lent.give_back()
        kept = torch.empty(700 * MB, dtype=torch.uint8, device=DEVICE)
        with pytest.raises(torch.OutOfMemoryError, match="behind an address"):
            lent.take()
        del kept
        lent.take()
        assert lent.there and room_in_share(DEVICE) >= 0 and held() <= start + 1024 * MB
        del lent
        gc.collect()
    assert torch.cuda.get_per_process_memory_fraction(0) == 1.0 and lent_bytes(DEVICE)[0] == others


def test_a_capture_at_the_bound_finds_memory_that_was_cached(start):
    """Captured steps have a pool of their own, and a capture frees nothing; what a training step has left cached would end it."""
    total = torch.zeros(1, device=DEVICE)

    def step():
        total.add_(torch.ones(64 * MB, device=DEVICE).sum())  # 256 MB

    pool = GraphPool(DEVICE)
    with bounded(held() + 1024 * MB, DEVICE):
        left = []
        while room_in_share(DEVICE) > 320 * MB:
            left.append(torch.empty(90 * MB, dtype=torch.uint8, device=DEVICE))
        # Cached in pieces that are too small: the step as it is finds room once, and its capture not beside that.
        left.clear()
        pool.run("step", step)
        before = float(total)
        pool.run("step", step)
        assert float(total) == before + 64 * MB and before == 64 * MB
        assert room_in_share(DEVICE) >= 0


def test_a_run_at_its_bound_says_what_to_raise(start):
    gigabytes = (start + 512 * MB) / GB
    config = configured(f"train.memory_budget={gigabytes}")
    words = "does not fit the memory it was given"
    with pytest.raises(DeviceMemoryError, match=words) as caught, memory.within_budget(config, DEVICE):
        torch.empty(1024 * MB, dtype=torch.uint8, device=DEVICE)
    assert not caught.value.crowded and "1.07 GB were asked for" in str(caught.value)
    assert torch.empty(1024 * MB, dtype=torch.uint8, device=DEVICE).is_cuda, "no bound any more"
