"""Memory that is given back and had again at the same address."""

import gc

import pytest
import torch

from qerl import memory
from qerl.kernels.cuda import LentMemory, can_lend, lent_bytes, reset_lent_peak

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda:0")
SIZE = 5_000_000


@pytest.fixture(autouse=True)
def device():
    if not torch.cuda.is_available() or not can_lend(DEVICE):
        pytest.skip("no CUDA device with addresses apart from memory")
    gc.collect()
    reset_lent_peak(DEVICE)


def test_what_comes_back_is_zero_and_where_it_was():
    lent = LentMemory(SIZE, DEVICE)
    values = lent.tensor()
    assert values.numel() >= SIZE and not values.any()
    address = values.data_ptr()
    for _ in range(3):
        values.fill_(7)
        lent.give_back()
        lent.give_back()
        assert not lent.there
        lent.take()
        lent.take()
        assert lent.there and values.data_ptr() == lent.tensor().data_ptr() == address and not values.any()


def test_a_captured_step_finds_it_again():
    lent = LentMemory(SIZE, DEVICE)
    place, copy = lent.tensor()[:4096].view(torch.int32), torch.zeros(1024, dtype=torch.int32, device=DEVICE)
    place.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        place.add_(1)
        copy.copy_(place)
    graph.replay()
    assert bool((copy == 2).all())
    lent.give_back()
    held = torch.full((SIZE,), 3, dtype=torch.uint8, device=DEVICE)
    lent.take()
    graph.replay()
    assert bool((copy == 1).all()) and bool((held == 3).all())


def test_bytes_are_counted_beside_those_of_the_allocator():
    before, started = memory.device_bytes(DEVICE), lent_bytes(DEVICE)[0]
    lent = LentMemory(SIZE, DEVICE)
    assert lent_bytes(DEVICE) == (started + lent.size, started + lent.size)
    found = memory.device_bytes(DEVICE)
    assert found["allocated"] - before["allocated"] == found["reserved"] - before["reserved"] == lent.size
    lent.give_back()
    assert lent_bytes(DEVICE) == (started, started + lent.size)
    reset_lent_peak(DEVICE)
    assert lent_bytes(DEVICE) == (started, started)


def test_the_last_view_keeps_the_memory_and_no_longer():
    started = lent_bytes(DEVICE)[0]
    values = LentMemory(SIZE, DEVICE).tensor()[:10]
    gc.collect()
    assert lent_bytes(DEVICE)[0] > started and not values.any()
    del values
    gc.collect()
    assert lent_bytes(DEVICE)[0] == started


def test_a_share_of_the_device_bounds_it():
    # What torch holds unused would be given back for it, and make room.
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    room = torch.cuda.memory_reserved(DEVICE) + lent_bytes(DEVICE)[0] + (64 << 20)
    torch.cuda.set_per_process_memory_fraction(room / total, DEVICE)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="behind an address"):
            LentMemory(512 << 20, DEVICE)
        assert LentMemory(16 << 20, DEVICE).there
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
