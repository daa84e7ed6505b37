"""Matrices that are interrupted, shared with another process, or out of time; and arms whose search is made again."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matrix_builders import ARMS, write_matrix

from qerl.config.load import dump_config, load_config
from qerl.errors import CheckpointError, OutputError, RunFolderError, RunStopped, TrainingError
from qerl.experiments import final, one_cell, pool, portable, runner
from qerl.experiments.manifest import AT_WORK, Manifest
from qerl.experiments.plan import open_plan, record_plan
from qerl.experiments.process import Ending
from qerl.experiments.runner import Orders, run_matrix
from qerl.metrics.run_dir import RunDir
from qerl.train.portable import expand_portable
from qerl.train.run import train
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


@pytest.mark.parametrize(("within", "kept"), [(False, ["a"]), (True, [])])
def test_a_signal_at_final_evaluations_leaves_what_is_missing_for_later(tmp_path, monkeypatch, within, kept):
    """One that is at work is given up: it may take longer than whoever stops a matrix waits."""
    path = write_matrix(tmp_path, arms=[ARMS[1]], set={"train.steps": 1}, final=[{"name": "a"}, {"name": "b"}])
    real, made = final.evaluate, []

    def evaluate(*arguments, **keywords):
        made.append(1)
        first = len(made) == 1
        if first and within:
            signal.raise_signal(signal.SIGTERM)
        result = real(*arguments, **keywords)
        if first and not within:
            signal.raise_signal(signal.SIGTERM)
        return result

    monkeypatch.setattr(final, "evaluate", evaluate)
    run = RunDir(tmp_path / "out" / "noisy-s0")
    with pytest.raises(RunStopped, match="The same matrix command goes on"):
        run_matrix(path, [], tmp_path / "out", ALONE, quiet)
    assert len(made) == 1 and list(run.read_json("final.json") or {}) == kept
    assert Manifest(tmp_path / "out").cell("noisy-s0")["state"] == "trained"
    plan = run_matrix(path, [], tmp_path / "out", ALONE, quiet)
    assert list(run.read_json("final.json")) == ["a", "b"]
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


def test_a_temperature_found_under_other_settings_or_on_another_probe_set_is_searched_anew(tmp_path):
    """What the entropies do not depend on may change; and the seeds of a group that has begun keep one temperature."""
    warm = {"name": "warm", "set": {"aqn.enabled": False}, "match_temperature": {"arm": "noisy", "high": 4.0}}

    def pending(*settings, **changes):
        write_matrix(tmp_path, arms=[ARMS[1], warm], seeds=[0, 1], **changes)
        plan = open_plan(tmp_path / "matrix.yaml", settings, tmp_path / "out", data=False)
        return [cell.name for cell in plan.cells if cell.pending]

    assert pending() == ["warm-s0", "warm-s1"]
    out = RunDir(tmp_path / "out")
    run_matrix(tmp_path / "matrix.yaml", [], out.path, replace(ALONE, match_only=True), quiet)
    assert pending() == [] and pending(set={"optim.lr": 1e-2}) == []
    for changes in ({"set": {"model.dtype": "bfloat16"}}, {"set": {"train.steps": 4}}, {"seeds": [1]}):
        kept = write_matrix(tmp_path, **({"arms": [ARMS[1], warm], "seeds": [0, 1]} | changes))
        assert any(cell.pending for cell in open_plan(kept, [], out.path, data=False).cells), changes
    probe = out.probe_path.read_text()
    out.probe_path.write_text(probe.replace('"stop_reason": "length"', '"stop_reason":"length"') + "\n")
    assert pending() == ["warm-s0", "warm-s1"]
    out.probe_path.write_text(probe)
    RunDir.create(out.path / "warm-s1").append_metrics(0, {})
    assert pending(set={"train.steps": 4}) == []


def test_the_first_of_two_searches_counts(tmp_path):
    """Another command may have begun cells with what it found."""
    warm = {"name": "warm", "set": {"aqn.enabled": False}, "match_temperature": {"arm": "noisy", "high": 4.0}}
    path = write_matrix(tmp_path, arms=[ARMS[1], warm])
    plan = open_plan(path, [], tmp_path / "out")
    record_plan(plan)
    runner._match_group(plan, "warm", plan.cells[1])
    with plan.manifest.change() as value:
        value["matched"]["warm"]["temperature"] += 1e-4
    first = plan.manifest.read()["matched"]["warm"]
    runner._match_group(plan, "warm", plan.cells[1])
    assert plan.manifest.read()["matched"]["warm"] == first


class Inline:
    """In place of a child process: the same orders, carried out here when it is asked how it ended."""

    def __init__(self, plan, arguments, seconds, device, name):
        only = tuple(arguments[arguments.index("--cell") + 1 :][:1])
        self.orders = replace(
            ALONE, only=only, match_only="--match" in arguments, started_by=os.getpid(), portable=False
        )
        self.plan, self.looks = plan, 0

    @property
    def running(self):
        """For one look of the pool, so that another one is begun beside it."""
        self.looks += 1
        return self.looks == 1

    def ending(self):
        run_matrix(self.plan.path, self.plan.settings, self.plan.out, self.orders, quiet)
        return Ending(code=0, last_words="")


def test_a_temperature_is_searched_for_beside_running_cells(tmp_path, monkeypatch):
    """When its turn comes, as a process beside the cells; the arm's own follow."""
    monkeypatch.setattr(pool, "Child", Inline)
    warm = {"name": "warm", "set": {"aqn.enabled": False}, "match_temperature": {"arm": "noisy", "high": 4.0}}
    # Without diagnostics no cell waits for the first one's probe set.
    path = write_matrix(tmp_path, arms=[ARMS[1], warm], set={"train.steps": 1, "diagnostics.every": 0})
    said: list[str] = []
    plan = run_matrix(path, [], tmp_path / "out", Orders(jobs=2), said.append)
    assert states(plan) == {"noisy-s0": "finished", "warm-s0": "finished"}
    assert any(text.startswith("warm: temperature ") for text in said)
    found = plan.manifest.read()["matched"]["warm"]["temperature"]
    assert load_config(plan.run(plan.cells[1]).config_path, []).rollout.temperature == found
    assert plan.manifest.cell("noisy-s0")["shared_device"], "a search takes its share of the device too"


def test_cells_of_two_commands_that_begin_together_mark_each_other(tmp_path):
    """Neither command saw the other's cell when it began its own: the cells look when they have their locks."""
    path = write_matrix(tmp_path, set={"train.steps": 1})
    plan = open_plan(path, [], tmp_path / "out")
    record_plan(plan)
    plan.manifest.note("plain-s0", device="0")
    plan.manifest.note("noisy-s0", device="1")
    with one_cell.lock(plan, plan.cells[0]):
        one_cell.run_cell(plan, plan.cells[1], Deadline(None), own_process=True)
        assert not any("shared_device" in plan.manifest.cell(name) for name in ("plain-s0", "noisy-s0")), "two devices"
        plan.manifest.note("noisy-s0", device="0", state="waiting")
        shutil.rmtree(plan.run(plan.cells[1]).path)
        one_cell.run_cell(plan, plan.cells[1], Deadline(None), own_process=True)
        assert all(plan.manifest.cell(name)["shared_device"] for name in ("plain-s0", "noisy-s0"))


class Asked:
    """In place of a child process: one that was asked to end before it began."""

    running = False

    def __init__(self, plan, arguments, seconds, device, name):
        pass

    def ending(self):
        return Ending(code=143, last_words="")


@pytest.mark.parametrize(("visible", "shared"), [(("1",), None), ((), True), (("0", "1"), True)])
def test_one_cell_at_a_time_on_a_gpu_of_its_own_keeps_its_times(tmp_path, monkeypatch, visible, shared):
    """Two commands, a GPU each: where a command sees one GPU alone, its name tells that no cell of the other one is on it."""
    monkeypatch.setattr(pool, "Child", Asked)
    monkeypatch.setattr(runner, "visible_devices", lambda: visible)
    plan = run_matrix(write_matrix(tmp_path), [], tmp_path / "out", Orders(only=("plain-s0",), portable=False), quiet)
    plan.manifest.note("noisy-s0", device="0")
    with one_cell.lock(plan, plan.cells[1]):
        one_cell._mark_sharing(plan, plan.cells[0])
    assert plan.manifest.cell("plain-s0").get("shared_device") == shared


@pytest.mark.parametrize(
    ("error", "collapse"),
    [(torch.OutOfMemoryError("2 GB"), None), (MemoryError("4 GB"), None), (TrainingError("not finite"), True)],
)
def test_what_ends_a_cell_leaves_the_others_and_only_its_training_is_a_collapse(tmp_path, monkeypatch, error, collapse):
    def fails(config, **keywords):
        raise error

    monkeypatch.setattr(one_cell, "train", fails)
    plan = run_matrix(write_matrix(tmp_path), [], tmp_path / "out", ALONE, quiet)
    assert states(plan) == {"plain-s0": "failed", "noisy-s0": "failed"}
    entry = plan.manifest.cell("noisy-s0")
    assert entry["error"] == f"{type(error).__name__}: {error}" and entry.get("collapse") == collapse
    assert plan.run(plan.cells[0]).read_json("cell.json")["collapse"] == bool(collapse)


def test_two_commands_keep_one_portable_folder(tmp_path):
    """Each writes the cells that are its own, and what is there and has not changed stays."""
    path = write_matrix(tmp_path, set={"train.steps": 1})
    folder = tmp_path / "out" / "portable"
    run_matrix(path, [], tmp_path / "out", replace(ALONE, only=("plain-s0",)), quiet)
    first = (folder / "plain-s0").stat().st_ino
    plan = open_plan(path, [], tmp_path / "out")
    with one_cell.lock(plan, plan.cells[0]):
        run_matrix(path, [], tmp_path / "out", replace(ALONE, only=("noisy-s0",)), quiet)
    assert {entry.name for entry in folder.iterdir()} == {"matrix.json", "probe.json", "plain-s0", "noisy-s0"} - (
        set() if RunDir(folder).probe_path.exists() else {"probe.json"}
    )
    run_matrix(path, [], tmp_path / "out", ALONE, quiet)
    assert (folder / "plain-s0").stat().st_ino == first


def test_what_a_cell_at_work_has_saved_is_carried_and_goes_on_elsewhere(tmp_path):
    """A machine that is taken away takes with it what came after the last checkpoint, and no more."""
    path = write_matrix(tmp_path, arms=[ARMS[1]], set={"train.steps": 3, "train.save_every": 1})
    plan = open_plan(path, [], tmp_path / "out")
    record_plan(plan)
    (cell,) = plan.cells
    # As if it were at work: two of three steps are made.
    train(cell.config, stop_after=2)
    plan.manifest.set_state(cell.name, "running")
    with one_cell.lock(plan, cell), portable.Portable(plan, wanted=True) as kept:
        kept.look_at([cell])
        kept._writing[cell.name].result()
        first = (kept.folder / cell.name).stat().st_ino
        kept._next_look = 0.0
        kept.look_at([cell])
        kept._writing[cell.name].result()
        assert (kept.folder / cell.name).stat().st_ino == first, "nothing new was saved"
        shutil.copytree(kept.folder, tmp_path / "there")
    assert [entry.name for entry in (tmp_path / "there" / cell.name / "checkpoints").iterdir()] == ["checkpoint-2"]
    done = run_matrix(path, [], tmp_path / "there", ALONE, quiet)
    assert states(done) == {cell.name: "finished"}
    assert [row["step"] for row in done.run(cell).read_metrics()] == [0, 1, 2, 3]
    assert done.run(cell).read_json("cell.json")["portable_resumes"] == [2]


def test_a_failed_cell_whose_newest_checkpoint_is_damaged_keeps_what_was_carried_before(tmp_path):
    """And where nothing was carried it is carried without one, so that it is shown."""
    path = write_matrix(tmp_path, arms=[ARMS[0]])
    plan = open_plan(path, [], tmp_path / "out")
    record_plan(plan)
    (cell,) = plan.cells
    train(cell.config, stop_after=1)
    damaged = plan.run(cell).checkpoint(2)
    with portable.Portable(plan, wanted=True) as kept:
        kept._write_at_work(cell)
        shutil.copytree(plan.run(cell).checkpoint(1), damaged)
        (damaged / "optimizer.pt").write_bytes(b"half of it")
        plan.manifest.set_state(cell.name, "failed", error="the disk was pulled out")
    carried = kept.folder / cell.name / "checkpoints"
    assert [entry.name for entry in carried.iterdir()] == ["checkpoint-1"]
    expand_portable(carried / "checkpoint-1")
    shutil.rmtree(kept.folder / cell.name)
    with portable.Portable(plan, wanted=True):
        pass
    assert not carried.exists() and (kept.folder / cell.name / "metrics.jsonl").exists()


@pytest.mark.parametrize("fault", ["read-only", "full"])
def test_a_manifest_that_cannot_be_written_is_a_message(tmp_path, monkeypatch, fault):
    """Its lock is the first thing that a full or read-only disk refuses."""
    number = {"read-only": errno.EROFS, "full": errno.ENOSPC}[fault]
    real = Path.open

    def refuses(self, mode="r", *arguments, **keywords):
        if self.parent == tmp_path and set(mode) & set("wa+"):
            raise OSError(number, os.strerror(number))
        return real(self, mode, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", refuses)
    with pytest.raises(OutputError, match=r"matrix\.json cannot be written"):
        Manifest(tmp_path).note("plain-s0", device="0")


def begun(plan, cell):
    """Its run folder as if it had made a step, without one."""
    run = RunDir.create(plan.run(cell).path)
    run.write_text(run.config_path, dump_config(cell.config))
    run.append_metrics(1, {})
    run.write_text(run.checkpoint(1) / "adapter", "")
    return run


def test_folders_that_a_killed_command_was_replacing_come_back(tmp_path):
    """A checkpoint, the portable form of a cell, and a cell of a copy that was taken at that moment."""
    path = write_matrix(tmp_path, arms=[ARMS[0]])
    plan = open_plan(path, [], tmp_path / "out")
    record_plan(plan)
    (cell,) = plan.cells
    plan.manifest.set_state(cell.name, "stopped")
    run, kept = begun(plan, cell), plan.out / portable.PORTABLE / cell.name
    shutil.copytree(run.path, kept)
    for folder in (run.checkpoint(1), run.path, kept):
        folder.rename(folder.with_name(f".{folder.name}.old"))
    half = f".{cell.name}.tmp-{2**22 + 1}"
    (plan.out / half).mkdir()
    run_matrix(path, [], plan.out, Orders(one_process=True, max_minutes=0.01, portable=False), quiet)
    assert plan.run(cell).latest_checkpoint() == run.checkpoint(1) and not (plan.out / half).exists()
    with pytest.raises(CheckpointError), portable.Portable(plan, wanted=True):
        pass
    assert (kept / "checkpoints" / "checkpoint-1" / "adapter").exists() and not list(plan.out.rglob("*.old"))


@pytest.mark.parametrize("manifest", ["older", "newer", "none"])
def test_a_cell_whose_folder_and_manifest_are_of_different_moments_goes_on(tmp_path, monkeypatch, manifest):
    """A copy that was taken while the matrix ran: the cell had not begun, or had ended, when the manifest was copied."""
    path = write_matrix(tmp_path, arms=[ARMS[0]])
    plan = open_plan(path, [], tmp_path / "out")
    (cell,) = plan.cells
    begun(plan, cell)
    if manifest != "none":
        record_plan(plan)
    if manifest == "newer":
        plan.manifest.set_state(cell.name, "finished")
    resumed = []
    monkeypatch.setattr(one_cell, "train", lambda config, *, resume, **keywords: resumed.append(resume))
    run_matrix(path, [], plan.out, replace(ALONE, portable=False), quiet)
    assert resumed == [True]


def test_a_process_that_works_on_one_cell_checks_that_one_and_the_arm_it_matches(tmp_path):
    """31 checks of which 30 are of no use to it made its start slower by seconds."""
    broken = {"name": "broken", "set": {"aqn.enabled": True, "quant.overrides": {"nothing.*": "bf16"}}}
    warm = {"name": "warm", "set": {"aqn.enabled": False}, "match_temperature": {"arm": "broken"}}
    path = write_matrix(tmp_path, arms=[ARMS[0], broken, warm])

    def invalid(only):
        return {
            cell.name for cell in open_plan(path, [], tmp_path / "out", only=only).cells if cell.problem is not None
        }

    assert invalid(None) == {"broken-s0"} == invalid(("warm-s0",))
    assert invalid(("plain-s0",)) == set()


def test_time_that_is_over_begins_no_search(tmp_path):
    warm = {"name": "warm", "set": {"aqn.enabled": False}, "match_temperature": {"arm": "plain"}}
    path = write_matrix(tmp_path, arms=[ARMS[0], warm])
    plan = run_matrix(path, [], tmp_path / "out", Orders(one_process=True, max_minutes=0.01), quiet)
    assert plan.manifest.read()["matched"] == {} and set(states(plan).values()) == {"waiting"}
