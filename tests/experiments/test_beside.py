"""Cells that share a GPU: what is said before they begin, and what becomes of one that found no memory beside the others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from matrix_builders import ARMS, write_matrix

from qerl import memory
from qerl.errors import ConfigError, DeviceMemoryError
from qerl.experiments import beside, one_cell, pool, runner
from qerl.experiments.beside import check_shares
from qerl.experiments.plan import open_plan, plan_lines
from qerl.experiments.process import Ending
from qerl.experiments.runner import Orders, run_matrix
from qerl.train.stop import Deadline
from qerl.units import GB


@pytest.fixture
def cells(tmp_path, monkeypatch):
    """Cells on GPUs of 150 GB, by their setting of ``train.memory_budget``."""
    monkeypatch.setattr(beside, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=int((150 - index) * GB))
    )

    def make(budget, *settings, count=2):
        path = write_matrix(tmp_path, seeds=list(range(count // 2)))
        return open_plan(path, [f"train.memory_budget={budget}", *settings], tmp_path / "out", data=False).cells

    return make


def test_budgets_that_a_gpu_does_not_have_are_refused(cells):
    four = cells(36, count=4)
    assert check_shares(four, 4, 1) == []
    with pytest.raises(ConfigError) as caught:
        check_shares(cells(37, count=4), 4, 1)
    for word in ("4 of up to 37.9 GB, 152 GB together", "expected at most 150 GB", "train.memory_budget=36 or less"):
        assert word in str(caught.value), str(caught.value)
    assert check_shares(cells(73, count=4), 4, 2) == [], "two beside each other on each"
    with pytest.raises(ConfigError, match="expected at most 149 GB"):
        check_shares(cells(74, count=4), 4, 2)
    for jobs, devices in ((1, 1), (2, 2), (4, 0)):
        assert check_shares(cells(149, count=4), jobs, devices) == [], "each has a GPU, or there is none"
    assert check_shares(cells(149, count=4)[:1], 4, 1) == [], "one cell is left"
    assert check_shares([replace(cell, problem="no model") for cell in cells(149)], 2, 1) == []


def test_no_budget_is_advised_that_no_model_has_room_in(cells):
    with pytest.raises(ConfigError) as caught:
        check_shares(cells(2, count=100), 100, 1)
    assert str(caught.value).endswith(". Run fewer at one time (--jobs)")


def test_gpus_that_are_named_and_not_there_are_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for named, known in (("0,1", ("0", "1")), (" 3 , GPU-a,7", ("3", "GPU-a")), ("1", ("1",)), ("", ())):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert pool.visible_devices() == known
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert pool.visible_devices() == ("0", "1")


def test_cells_that_plan_for_a_whole_gpu_count_with_their_plan_and_are_told_of(cells, monkeypatch):
    two = cells("auto")
    (text,) = check_shares(two, 2, 1)
    assert "2 cells share a GPU" in text and "train.memory_budget=74" in text
    (text,) = check_shares(cells("off"), 4, 1)
    assert "2 cells share a GPU" in text, "no more than there are"
    real = memory.predict
    monkeypatch.setattr(memory, "predict", lambda *a, **k: SimpleNamespace(peak=75 * GB) if k else real(*a))
    monkeypatch.setattr(beside, "settle_memory", lambda config: config)
    with pytest.raises(ConfigError, match=r"train\.memory_budget or the plan of a cell"):
        check_shares(two, 2, 1)


def test_a_cell_on_the_cpu_shares_no_gpu(tmp_path):
    plan = open_plan(write_matrix(tmp_path), ["train.memory_budget=9e9"], tmp_path / "out", data=False)
    assert check_shares(plan.cells, 2, 1) == []


@pytest.mark.parametrize("crowded", [True, False])
def test_a_cell_remembers_that_others_had_its_memory(tmp_path, monkeypatch, crowded):
    def fails(config, **keywords):
        error = DeviceMemoryError("the GPU's memory ran out")
        error.crowded = crowded
        raise error

    monkeypatch.setattr(one_cell, "train", fails)
    plan = open_plan(write_matrix(tmp_path, arms=[ARMS[0]]), [], tmp_path / "out")
    for orders, ran in ((Orders(one_process=True), True), (Orders(one_process=True), crowded)):
        states = []
        run_matrix(plan.path, [], plan.out, replace(orders, portable=False), states.append)
        assert states == (["plain-s0: failed"] if ran else [])
        assert plan.is_crowded(plan.cells[0]) == crowded
    assert any(f"{'the same command' if crowded else '--retry'} runs it again" in line for line in plan_lines(plan))
    entry = plan.run(plan.cells[0]).read_json("cell.json")
    assert (entry["crowded"], entry["collapse"], entry["state"]) == (crowded, False, "failed")
    plan.manifest.note("plain-s0", given_up=True)
    assert not plan.is_crowded(plan.cells[0])
    monkeypatch.setattr(one_cell, "train", lambda config, **keywords: None)
    one_cell.run_cell(plan, plan.cells[0], Deadline(None), own_process=True)
    assert not plan.manifest.cell("plain-s0").get("crowded"), "what it ends as now counts"


@pytest.mark.parametrize("always", [False, True])
def test_a_cell_without_memory_beside_others_runs_once_more_by_itself(tmp_path, monkeypatch, always):
    """Three cells on one GPU, of which the second finds no memory as long as another is there; or finds none at all, which is not tried for ever."""
    third = {"name": "third", "set": {"aqn.enabled": False}}
    path = write_matrix(tmp_path, arms=[*ARMS, third], set={"diagnostics.every": 0})
    running: list[str] = []
    begun: list[tuple[str, int]] = []

    class Child:
        def __init__(self, plan, arguments, seconds, device, name):
            self.plan, self.name, self.looks = plan, arguments[1], 0
            assert "--retry" not in arguments and device == "0"
            begun.append((self.name, len(running)))
            running.append(self.name)
            self.alone = len(running) == 1

        @property
        def running(self):
            self.looks += 1
            lasts = 3 if self.name == "plain-s0" else 1
            if self.looks <= lasts:
                return True
            if self.name in running:
                running.remove(self.name)
                failed = self.name == "noisy-s0" and (always or not self.alone)
                facts = {"error": "no memory", "crowded": True} if failed else {"error": None, "crowded": None}
                self.plan.manifest.set_state(self.name, "failed" if failed else "finished", **facts)
            return False

        def ending(self):
            return Ending(code=0, last_words="")

    monkeypatch.setattr(pool, "Child", Child)
    monkeypatch.setattr(pool, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(runner, "visible_devices", lambda: ("0",))
    said: list[str] = []
    plan = run_matrix(path, [], tmp_path / "out", Orders(jobs=2, portable=False), said.append)
    assert [name for name, _ in begun] == ["plain-s0", "noisy-s0", "third-s0", "noisy-s0"]
    assert [others for _, others in begun] == [0, 1, 1, 0]
    assert plan.state(plan.cells[1]) == ("failed" if always else "finished")
    assert "noisy-s0: failed: no memory. It is run once more when a GPU is free" in said
    assert ("noisy-s0: failed: no memory. The same matrix command runs it again" in said) == always
    assert plan.manifest.cell("noisy-s0")["shared_device"], "its first part was beside others"
