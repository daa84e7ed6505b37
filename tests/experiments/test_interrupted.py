"""Matrices that are interrupted, shared with another process, or out of time; and arms whose search is made again."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from dataclasses import replace

import pytest
from matrix_builders import ARMS, write_matrix

from qerl.errors import RunFolderError, RunStopped
from qerl.experiments import final, one_cell, runner
from qerl.experiments.manifest import AT_WORK, Manifest
from qerl.experiments.plan import open_plan, record_plan
from qerl.experiments.process import Ending
from qerl.experiments.runner import Orders, run_matrix
from qerl.metrics.run_dir import RunDir
from qerl.train.stop import Deadline

ALONE = Orders(one_process=True)


def states(plan):
    return {cell.name: plan.state(cell) for cell in plan.cells}


def quiet(text):
    pass


def test_a_cell_that_another_process_is_at_work_on_is_left_alone(tmp_path):
    """Its files stay, and so does its state: what the other process makes of it counts."""
    path = write_matrix(tmp_path, set={"train.save_every": 0})
    plan = open_plan(path, [], tmp_path / "out")
    cell = plan.cells[0]
    with one_cell.lock(plan, cell):
        plan.manifest.set_state(cell.name, "running")
        plan.run(cell).path.mkdir(parents=True)
        (plan.run(cell).path / "metrics.jsonl").write_text("")
        said: list[str] = []
        after = run_matrix(path, ["train.steps=1"], tmp_path / "out", Orders(jobs=2), said.append)
        assert states(after) == {"plain-s0": "running", "noisy-s0": "finished"}
        assert any("another process is at work" in text for text in said)
        assert all(plan.manifest.cell(name)["shared_device"] for name in ("plain-s0", "noisy-s0")), "on one machine"
        assert (plan.run(cell).path / "metrics.jsonl").exists()
        with pytest.raises(RunFolderError, match="another process"):
            one_cell.run_cell(plan, cell, Deadline(None), own_process=True)
        assert plan.state(cell) == "running"
    assert not (tmp_path / "out" / AT_WORK).exists()


@pytest.mark.parametrize(
    ("code", "before", "state"),
    [
        (143, "waiting", "waiting"),
        (-signal.SIGTERM, "running", "stopped"),
        (130, "running", "stopped"),
        (-signal.SIGKILL, "running", "failed"),
        (0, "running", "failed"),
        (1, "waiting", "waiting"),
        (2, "waiting", "failed"),
        (143, "finished", "finished"),
    ],
)
def test_the_end_of_a_process_says_what_becomes_of_its_cell(tmp_path, code, before, state):
    """Who stops a matrix has not seen its cells fail; what died without a word has failed, with its last words kept."""
    plan = open_plan(write_matrix(tmp_path), [], tmp_path / "out")
    record_plan(plan)
    plan.manifest.set_state("plain-s0", before)
    assert runner._ended(plan, plan.cells[0], Ending(code=code, last_words="no room left")) == state
    error = plan.manifest.cell("plain-s0").get("error", "")
    assert ("no room left" in error or "SIGKILL" in error) == (state == "failed")


def test_a_signal_between_final_evaluations_leaves_them_for_later(tmp_path, monkeypatch):
    path = write_matrix(tmp_path, arms=[ARMS[1]], set={"train.steps": 1}, final=[{"name": "a"}, {"name": "b"}])
    real, made = final.evaluate, []

    def evaluate(*arguments, **keywords):
        made.append(1)
        signal.raise_signal(signal.SIGTERM)
        return real(*arguments, **keywords)

    monkeypatch.setattr(final, "evaluate", evaluate)
    for count in (1, 2):
        with pytest.raises(RunStopped) if count == 1 else nullcontext():
            plan = run_matrix(path, [], tmp_path / "out", ALONE, quiet)
        assert len(made) == count
        names = list(RunDir(tmp_path / "out" / "noisy-s0").read_json("final.json"))
        assert names == ["a", "b"][:count]
        assert Manifest(tmp_path / "out").cell("noisy-s0")["state"] == ("trained" if count == 1 else "finished")
    assert states(plan) == {"noisy-s0": "finished"}


def test_a_wider_range_finds_the_temperature_of_an_arm_that_failed_for_want_of_one(tmp_path):
    def matrix(low, high):
        match = {"arm": "plain", "low": low, "high": high}
        warm = {"name": "warm", "set": {"aqn.enabled": False}, "match_temperature": match}
        return write_matrix(tmp_path, arms=[ARMS[0], warm], set={"train.steps": 1})

    only = Orders(one_process=True, only=("warm-s0",))
    assert run_matrix(matrix(1.9, 2.0), [], tmp_path / "out", only, quiet).manifest.cell("warm-s0")["state"] == "failed"
    again = run_matrix(matrix(0.5, 2.0), [], tmp_path / "out", replace(only, retry=True), quiet)
    assert again.manifest.cell("warm-s0")["state"] == "finished"


def test_time_that_is_over_begins_no_search(tmp_path):
    warm = {"name": "warm", "set": {"aqn.enabled": False}, "match_temperature": {"arm": "plain"}}
    path = write_matrix(tmp_path, arms=[ARMS[0], warm])
    plan = run_matrix(path, [], tmp_path / "out", Orders(one_process=True, max_minutes=0.01), quiet)
    assert plan.manifest.read()["matched"] == {} and set(states(plan).values()) == {"waiting"}
