"""What a run may take of a GPU, by the calls that torch gets: a machine without one stands in for it."""

import bisect
import random
from types import SimpleNamespace

import pytest
import torch
from memory_builders import configured

from qerl import memory
from qerl.errors import DeviceMemoryError, KernelUnavailableError, TrainingError
from qerl.kernels.cuda import bounded, room_in_share, share, share_of
from qerl.memory import measure
from qerl.memory.bound import is_out_of_memory
from qerl.units import GB

CUDA = torch.device("cuda")
TOTAL = int(100 * GB)


class Card:
    """A GPU of 100 GB as torch tells of it."""

    def __init__(self):
        self.fraction, self.reserved, self.free, self.emptied = 1.0, 0, TOTAL, 0

    def limit(self, fraction, index):
        assert isinstance(fraction, float) and 0 <= fraction <= 1 and index == 0
        self.fraction = fraction

    def empty(self):
        self.emptied += 1


@pytest.fixture
def card(monkeypatch):
    card = Card()
    for name, call in (
        ("current_device", lambda: 0),
        ("get_device_properties", lambda device: SimpleNamespace(total_memory=TOTAL)),
        ("get_device_name", lambda device: "Example GPU"),
        ("get_per_process_memory_fraction", lambda index: card.fraction),
        ("set_per_process_memory_fraction", card.limit),
        ("memory_reserved", lambda device: card.reserved),
        ("memory_allocated", lambda device: card.reserved // 2),
        ("mem_get_info", lambda device: (card.free, TOTAL)),
        ("empty_cache", card.empty),
    ):
        monkeypatch.setattr(torch.cuda, name, call)
    monkeypatch.setattr(share, "_ACCOUNTS", {})
    return card


def test_the_allocator_has_what_lent_memory_leaves_of_the_bound(card):
    share.book(0, int(3 * GB))
    with bounded(int(28 * GB), CUDA):
        assert card.fraction == pytest.approx(0.25)
        share.book(0, int(5 * GB))
        assert card.fraction == pytest.approx(0.20) and share_of(CUDA) == 28 * GB
        card.reserved = int(20 * GB)
        assert room_in_share(CUDA) == 0
        share.book(0, -int(8 * GB))
        assert card.fraction == pytest.approx(0.28) and room_in_share(CUDA) == 8 * GB
        share.book(0, int(40 * GB))
        assert card.fraction == 0.0, "what is there stays; nothing more is had"
        share.book(0, -int(40 * GB))
    assert card.fraction == 1.0 and share_of(CUDA) == TOTAL
    share.book(0, int(5 * GB))
    assert card.fraction == 1.0, "no bound any more"


def test_what_a_process_was_limited_to_is_what_it_has_again(card):
    """A process that uses the package, whether its run ends well or not; a bound within a bound."""
    card.fraction = 0.5
    with bounded(int(28 * GB), CUDA):
        with bounded(int(40 * GB), CUDA):
            assert card.fraction == pytest.approx(0.28), "no more than around it"
        with bounded(int(10 * GB), CUDA):
            assert card.fraction == pytest.approx(0.10)
        assert card.fraction == pytest.approx(0.28)
    assert card.fraction == 0.5
    with pytest.raises(ZeroDivisionError), bounded(int(28 * GB), CUDA):
        _ = 1 / 0
    assert card.fraction == 0.5
    for size in (int(50 * GB), int(1e36), None):
        with bounded(size, CUDA):
            assert card.fraction == 0.5, "its share is the smaller bound"
    with bounded(1, torch.device("cpu")):
        assert card.fraction == 0.5


def test_a_fault_is_told_and_not_that_the_bound_could_not_be_taken_back_after_it(card, monkeypatch):
    def refuse(fraction, index):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def fault():
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", refuse)
        raise TrainingError("what happened")

    with pytest.raises(TrainingError, match="what happened"), bounded(int(28 * GB), CUDA):
        fault()
    assert share_of(CUDA) == int(0.28 * TOTAL), "that of torch, which could not be changed"
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", card.limit)
    with pytest.raises(RuntimeError, match="illegal"), bounded(int(20 * GB), CUDA):
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", refuse)


def test_what_is_cached_from_before_is_given_back_where_it_is_more_than_the_bound(card):
    card.reserved = int(28 * GB)
    with bounded(int(28 * GB), CUDA):
        assert card.emptied == 0
    card.reserved += 1
    with bounded(int(28 * GB), CUDA):
        assert card.emptied == 1


def test_a_number_is_a_bound_and_its_plan_leaves_room_for_gaps(card):
    config = configured("train.memory_budget=28")
    assert memory.budget_of(config, CUDA).size == int(0.92 * 28 * GB)
    with memory.within_budget(config, CUDA):
        assert card.fraction == pytest.approx(0.28)
        assert memory.budget_of(config, CUDA).size == int(0.92 * 28 * GB), "its own bound is not counted twice"
    large = memory.budget_of(configured("train.memory_budget=120"), CUDA)
    assert large.size == int(0.92 * TOTAL) and "Example GPU" in large.source
    card.fraction = 0.2
    assert memory.budget_of(config, CUDA).size == int(0.92 * 20 * GB)
    for setting in ("auto", "off", "120"):
        with memory.within_budget(configured(f"train.memory_budget={setting}"), CUDA):
            assert card.fraction == 0.2


SAID = "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 93.13 GiB"


@pytest.mark.parametrize(
    ("reserved", "free", "setting", "crowded", "words"),
    [
        (27.5, 70, "28", False, ["27.5 GB reserved (13.8 GB in tensors), and 1.07 GB were", "most 28.0 GB", "Raise train"]),
        (28 - 1.078, 70, "28", False, ["26.9 GB reserved", "most 28.0 GB"]),
        (8.0, 0.3, "28", True, ["300 MB free", "all else on the GPU 91.7 GB", "through other processes", "fewer beside"]),
        (8.0, 0.3, "auto", True, ["this run has 8.00 GB reserved", "memory_budget=GB"]),
        (98.0, 0.3, "auto", False, ["300 MB free", "all else on the GPU 1.70 GB", "Lower train.token_budget"]),
    ],
)  # fmt: skip
def test_memory_that_runs_out_is_told_with_who_has_it(card, reserved, free, setting, crowded, words):
    config = configured(f"train.memory_budget={setting}")

    def ask_in_vain():
        card.reserved, card.free = int(reserved * GB), int(free * GB)
        raise torch.OutOfMemoryError(SAID)

    with pytest.raises(DeviceMemoryError) as caught, memory.within_budget(config, CUDA):
        ask_in_vain()
    text = str(caught.value)
    assert caught.value.crowded == crowded and "\n" not in text
    assert all(word in text for word in words), text
    assert caught.value.exit_code == 2 and card.fraction == 1.0


@pytest.mark.parametrize("call", ["set_per_process_memory_fraction", "mem_get_info"])
def test_a_gpu_that_is_too_full_to_begin_on_is_told_so(card, monkeypatch, call):
    """CUDA's context is made at the first call, and has no room; or is gone when it is asked who has the memory."""

    def refuse(*arguments):
        raise RuntimeError("CUDA error: out of memory\nSearch for …")

    monkeypatch.setattr(torch.cuda, call, refuse)
    setting = "28" if call.startswith("set") else "auto"
    with (
        pytest.raises(
            DeviceMemoryError, match="no memory for another process; got CUDA error: out of memory; exp"
        ) as caught,
        memory.within_budget(configured(f"train.memory_budget={setting}"), CUDA),
    ):
        raise torch.OutOfMemoryError(SAID)
    assert caught.value.crowded


def test_only_want_of_memory_is_told_so(card):
    refused = KernelUnavailableError("the CUDA driver refused cuModuleLoadData", got="error 2: out of memory")
    for error in (
        RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in …"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        refused,
    ):
        assert is_out_of_memory(error)
        with pytest.raises(DeviceMemoryError), memory.within_budget(configured(), CUDA):
            raise error
    for error in (RuntimeError("size mismatch"), TrainingError("out of memory"), ValueError("CUDA out of memory")):
        with pytest.raises(type(error)), memory.within_budget(configured(), CUDA):
            raise error
    with pytest.raises(torch.OutOfMemoryError), memory.within_budget(configured(), torch.device("cpu")):
        raise torch.OutOfMemoryError(SAID)


MB = 1 << 20


class Cache:
    """Torch's caching allocator for large tensors: the smallest cached block that suffices, cut to size; freed neighbours join; a segment that is
    free as a whole can be given back."""

    def __init__(self):
        self.reserved, self.count, self.free = 0, 0, []

    def take(self, size):
        place = bisect.bisect_left(self.free, (size, 0))
        if place < len(self.free):
            block = self.free.pop(place)[2]
        else:
            block = {"size": -(-size // (2 * MB)) * 2 * MB, "before": None, "after": None}
            self.reserved += block["size"]
        if block["size"] - size > MB:
            rest = {"size": block["size"] - size, "before": block, "after": block["after"]}
            if rest["after"]:
                rest["after"]["before"] = rest
            block |= {"size": size, "after": rest}
            self._put(rest)
        block["used"] = True
        return block

    def _put(self, block):
        self.count += 1
        block |= {"used": False, "entry": (block["size"], self.count, block)}
        bisect.insort(self.free, block["entry"], key=lambda entry: entry[:2])

    def drop(self, block):
        for side, other in (("before", "after"), ("after", "before")):
            beside = block[side]
            if beside is not None and not beside["used"]:
                self.free.remove(beside["entry"])
                block |= {"size": block["size"] + beside["size"], side: beside[side]}
                if block[side] is not None:
                    block[side][other] = block
        self._put(block)

    def empty(self):
        whole = [entry for entry in self.free if entry[2]["before"] is None and entry[2]["after"] is None]
        self.reserved -= sum(entry[0] for entry in whole)
        self.free = [entry for entry in self.free if entry not in whole]


@pytest.mark.parametrize("gives_back", [False, True])
def test_larger_passes_do_not_leave_the_memory_of_smaller_ones_beside_theirs(monkeypatch, gives_back):
    """24 layers of a 0.5B at 20,000 tokens (inputs, projections, gate and up). Without giving back, two larger passes double what is reserved."""
    cache, peaks = Cache(), memory.PhasePeaks(CUDA)
    monkeypatch.setattr(measure, "return_unused", lambda device: cache.empty())
    widths, numbers = (3584, 2304, 1792, 1792, 3584, 19456), random.Random(1)
    sizes = [20_000, 20_400, 20_900, *(numbers.randrange(2_000, 20_900) for _ in range(12))]
    needed = 24 * sum(-(-20_900 * width // (2 * MB)) * 2 * MB for width in widths)
    for tokens in sizes:
        if gives_back:
            peaks.make_room(tokens)
        held = [cache.take(tokens * width) for _ in range(24) for width in widths]
        for block in reversed(held):
            cache.drop(block)
    assert peaks.larger_passes == (3 if gives_back else 0)
    assert cache.reserved <= 1.03 * needed if gives_back else cache.reserved > 1.9 * needed
