"""How much memory a plan may take, and what says so."""

import pytest
import torch
from memory_builders import configured

from qerl import memory
from qerl.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"), [("24GB", 22.08e9), ("80 gb", 73.6e9), ("48", 44.16e9), ("24GiB", 0.92 * 24 * 2**30)]
)
def test_a_card_leaves_room_for_the_context(text, size):
    assert memory.budget_of_size(configured(), text).size == int(size)


@pytest.mark.parametrize("text", ["large", "0GB", "-3GB", "24TB", "", "9" * 330 + "GB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="not a size of memory"):
        memory.budget_of_size(configured(), text)


def test_budgets_by_setting_and_device():
    cpu = torch.device("cpu")
    assert memory.budget_of(configured(), cpu) is None
    assert memory.budget_of(configured("train.memory_budget=off"), cpu) is None
    assert memory.budget_of(configured("train.memory_budget=7.5"), cpu).size == int(7.5e9)


@pytest.mark.parametrize(("name", "index"), [("cuda", 2), ("cuda:1", 1)])
def test_the_budget_of_a_gpu_is_of_what_the_process_may_take(monkeypatch, name, index):
    """torch wants an index there, which the device `cuda` does not have."""
    properties = type("Properties", (), {"total_memory": int(80e9)})
    asked = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Example GPU")
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: asked.append(device) or 0.5)
    found = memory.budget_of(configured(), torch.device(name))
    assert found.size == int(0.92 * 40e9) and "40.0 GB (Example GPU)" in found.source
    assert asked == [index]


@pytest.mark.parametrize(
    ("setting", "size", "source"),
    [
        ("auto", 22.08e9, "92% of 24GB"),
        ("off", 22.08e9, "92% of 24GB"),
        ("30", 22.08e9, "92% of 24GB"),
        ("10", 9.2e9, "92% of train.memory_budget=10"),
    ],
)
def test_a_card_that_is_named_is_bounded_by_a_smaller_budget(setting, size, source):
    """As the GPU of a run is."""
    found = memory.budget_of_size(configured(f"train.memory_budget={setting}"), "24GB")
    assert (found.size, found.source) == (int(size), source)
