"""A matrix goes on from a copy of ``results/<matrix>``, whose cells have their summaries alone."""

from __future__ import annotations

import io
import json
import shutil

import pytest
from matrix_builders import ARMS, write_matrix
from rich.console import Console
from summary_builders import axis_cell

from qerl.errors import ConfigError, RunFolderError
from qerl.experiments import one_cell
from qerl.experiments.choice import choose, is_taken_up
from qerl.experiments.folders import export_summaries, read_cells
from qerl.experiments.manifest import Manifest
from qerl.experiments.plan import open_plan, plan_lines, record_plan
from qerl.experiments.runner import Orders, run_matrix
from qerl.experiments.summary import stored_summary
from qerl.experiments.watch import watch_matrix
from qerl.metrics.files import write_json
from qerl.metrics.run_dir import RunDir

ALONE = Orders(one_process=True)
WARM = {"name": "warm", "set": {"aqn.enabled": False}, "match_temperature": {"arm": "noisy", "high": 4.0}}
FINAL = {"name": "sampled", "temperature": 1.0}
KEPT = ("plain-s0", "warm-s0")


def states(plan):
    return {cell.name: plan.state(cell) for cell in plan.cells}


def only_summary(folder):
    return [path.name for path in folder.iterdir()] == ["summary.json"]


def quiet(text):
    pass


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A matrix file, and ``results/small`` of a run of it: two cells finished, one failed, one cut, the others waiting."""
    folder = tmp_path_factory.mktemp("first")
    path = write_matrix(folder, arms=[*ARMS, WARM], seeds=[0, 1], set={"train.steps": 1}, final=[FINAL])
    plan = run_matrix(path, [], folder / "out", Orders(one_process=True, only=KEPT), quiet)
    plan.manifest.set_state("noisy-s0", "failed", error="out of memory")
    plan.manifest.set_state("noisy-s1", "stopped")
    export_summaries(read_cells([plan.out]), folder / "results")
    return path, folder / "results" / "small"


@pytest.fixture
def copy(results, tmp_path):
    path, kept = results
    return path, shutil.copytree(kept, tmp_path / "copy"), kept


def test_what_is_finished_stays_and_the_rest_is_run(copy, tmp_path):
    path, out, kept = copy
    assert sorted(folder.name for folder in kept.iterdir() if folder.is_dir() and only_summary(folder)) == sorted(
        states(open_plan(path, [], out))
    )
    said: list[str] = []
    plan = run_matrix(path, [], out, ALONE, said.append)
    assert {name for name, state in states(plan).items() if state == "failed"} == {"noisy-s0"}
    assert set(states(plan).values()) == {"finished", "failed"}
    assert not any("finished without" in text for text in said)
    begun = [name for name in states(plan) if (out / name / "metrics.jsonl").exists()]
    assert begun == ["plain-s1", "noisy-s1", "warm-s1"]
    for folder in (out, out / "portable"):
        for name in (*KEPT, "noisy-s0"):
            assert only_summary(folder / name)
            assert (folder / name / "summary.json").read_bytes() == (kept / name / "summary.json").read_bytes()
    export_summaries(read_cells([out]), tmp_path / "again")
    for name in KEPT:
        assert (tmp_path / "again/small" / name / "summary.json").read_bytes() == (
            kept / name / "summary.json"
        ).read_bytes()

    # From what is portable nothing is left to do, but for the failed cell.
    elsewhere = shutil.copytree(out / "portable", tmp_path / "elsewhere")
    assert states(run_matrix(path, [], elsewhere, ALONE, quiet)) == states(plan)
    again = run_matrix(path, [], elsewhere, Orders(one_process=True, retry=True), quiet)
    assert set(states(again).values()) == {"finished"}
    run = RunDir(elsewhere / "noisy-s0")
    assert (
        run.holds_a_run()
        and one_cell.has_all_steps(run)
        and one_cell.has_all_steps(RunDir(elsewhere / "portable/noisy-s0"))
    )


def test_the_other_seeds_of_an_arm_keep_its_temperature(copy):
    """A copy has no probe set: the temperature cannot be shown to hold, and holds all the same."""
    path, out, _ = copy
    found = Manifest(out).read()["matched"]["warm"]["temperature"]
    plan = open_plan(path, [], out)
    assert [cell.config.rollout.temperature for cell in plan.cells if cell.arm.name == "warm"] == [found] * 2
    assert not any("is to be found" in line for line in plan_lines(plan))
    shutil.rmtree(out / "warm-s0")
    assert any("is to be found" in line for line in plan_lines(open_plan(path, [], out))), "no cell has begun"


CHANGES = {
    "optim.lr=0.5": "optim.lr: 0.001 -> 0.5",
    "train.steps=2": "train.steps: 1 -> 2",
    "data.eval_limit=4": "data.eval_limit: 8 -> 4",
    "data.eval=arithmetic": "data.eval: .* -> arithmetic",
}


@pytest.mark.parametrize("setting", CHANGES)
def test_results_of_other_settings_are_not_gone_on_from(copy, setting):
    path, out, _ = copy
    with pytest.raises(ConfigError, match=rf"cell plain-s0 is kept of a run .* {CHANGES[setting]}"):
        open_plan(path, [setting], out)
    shutil.rmtree(out / "warm-s0")
    # What is not kept, or counts for nothing, may be made with any.
    shutil.rmtree(out / "plain-s0")
    (out / "noisy-s0/summary.json").unlink()
    open_plan(path, [setting], out)


def test_settings_that_a_summary_cannot_or_need_not_tell_are_no_change(copy):
    path, out, _ = copy
    summary = json.loads((out / "plain-s0/summary.json").read_text())
    del summary["config"]["model"]["attention_dtype"]
    summary["config"]["model"]["of_an_older_version"] = 1
    write_json(out / "plain-s0/summary.json", summary)
    open_plan(path, ["train.save_every=2", "train.memory_budget=8", "train.token_budget=auto"], out)


def test_a_summary_in_another_cells_folder_is_refused(copy):
    path, out, _ = copy
    shutil.copytree(out / "plain-s0", out / "plain-s1", dirs_exist_ok=True)
    Manifest(out).set_state("plain-s1", "finished")
    with pytest.raises(ConfigError, match=r"plain-s1 .*train.seed: 0 -> 1"):
        open_plan(path, [], out)


def test_a_plan_says_which_results_were_not_copied(copy):
    path, out, _ = copy
    assert not any("not here" in line for line in plan_lines(open_plan(path, [], out)))
    shutil.rmtree(out / "plain-s0")
    lines = [
        line for line in plan_lines(open_plan(path, [], out)) if "its folder is not here, so it is run again" in line
    ]
    assert [line.split()[0] for line in lines] == ["plain-s0"]


def test_a_run_of_its_own_takes_no_results_place(copy):
    _, out, _ = copy
    with pytest.raises(RunFolderError, match="holds the summary of a run"):
        RunDir(out / "plain-s0").refuse_a_run()


def test_summaries_are_not_written_over_those_of_runs(copy):
    """Of a matrix that went on in ``results/`` itself: the run's own summary would be gone, and its cell be run again."""
    path, out, _ = copy
    results = out.rename(out.with_name("small")).parent
    out = results / "small"
    export_summaries(read_cells([out]), results)
    plan = run_matrix(path, [], out, Orders(one_process=True, only=("plain-s1",)), quiet)
    before = {file: file.read_bytes() for file in out.rglob("*.json")}
    with pytest.raises(RunFolderError, match=r"into the runs themselves.*plain-s1"):
        export_summaries(read_cells([out]), results)
    assert {file: file.read_bytes() for file in out.rglob("*.json")} == before
    assert states(plan)["plain-s1"] == "finished" and one_cell.has_all_steps(RunDir(out / "plain-s1"))


def test_an_evaluation_that_a_summary_lacks_is_told(copy):
    path, out, _ = copy
    more = path.with_name("more.yaml")
    more.write_text(path.read_text().replace("sampled", "sampled_more"))
    said: list[str] = []
    run_matrix(more, [], out, Orders(one_process=True, only=KEPT, portable=False), said.append)
    assert [text.split(",")[0] for text in said] == [f"{name}: finished without sampled_more" for name in KEPT]


def test_the_cells_are_watched(copy):
    _, out, _ = copy
    console = Console(file=io.StringIO(), width=150)
    watch_matrix(out, once=True, console=console)
    lines = {line.split()[0]: line.split() for line in console.file.getvalue().splitlines() if "-s" in line}
    assert lines["plain-s0"][1:3] == ["finished", "1"] and lines["noisy-s1"][1:] == ["stopped"]


def test_a_cell_of_which_manifest_and_summary_differ_begins_anew(copy):
    path, out, _ = copy
    plan = open_plan(path, [], out)
    plan.manifest.set_state("noisy-s1", "finished")
    for cell in plan.cells:
        one_cell.settle_folder(plan, cell)
    assert (states(plan)["noisy-s1"], states(plan)["plain-s0"]) == ("stopped", "finished")


def test_a_result_that_the_manifest_does_not_know_is_left_alone(copy):
    path, out, kept = copy
    (out / "matrix.json").unlink()
    with pytest.raises(RunFolderError, match="not the matrix's"):
        run_matrix(path, [], out, Orders(one_process=True, only=("plain-s0",)), quiet)
    assert (out / "plain-s0/summary.json").read_bytes() == (kept / "plain-s0/summary.json").read_bytes()


def test_a_damaged_summary_is_told_before_anything_runs(copy):
    path, out, _ = copy
    summary = json.loads((out / "noisy-s0/summary.json").read_text())
    write_json(out / "noisy-s0/summary.json", summary | {"evaluations": None})
    with pytest.raises(RunFolderError, match=r"is damaged.*noisy-s0.*evaluations"):
        run_matrix(path, [], out, ALONE, quiet)
    assert only_summary(out / "plain-s1")


def test_the_summary_of_a_run_is_not_one_in_its_place(tmp_path):
    write_json(tmp_path / "summary.json", axis_cell("plain", 0.1, 7, 0.4))
    assert stored_summary(tmp_path)["arm"] == "plain"
    run = RunDir(tmp_path)
    write_json(run.cell_path, axis_cell("plain", 0.1, 7, 0.4))
    assert stored_summary(tmp_path) is None
    run.cell_path.unlink()
    run.append_metrics(1, {})
    assert stored_summary(tmp_path) is None and stored_summary(tmp_path / "none") is None


def test_what_was_given_up_stays_so_and_what_was_crowded_is_run_again(results, tmp_path):
    path, _ = results
    plan = open_plan(path, [], tmp_path / "out")
    record_plan(plan)
    plan.manifest.set_state("plain-s0", "failed", error="a signal", given_up=True)
    plan.manifest.set_state("plain-s1", "failed", error="no memory", crowded=True)
    for cell in plan.cells[:1]:
        one_cell.write_cell_summary(plan, cell)
    export_summaries(read_cells([plan.out]), tmp_path / "results")
    again = open_plan(path, [], tmp_path / "results/small")
    assert again.manifest.cell("plain-s0")["given_up"]
    assert [cell.name for cell in again.cells if is_taken_up(again, cell)] == ["plain-s1"]


def test_trials_are_judged_by_their_summaries(tmp_path):
    changes = {"arms": [ARMS[0]], "axes": {"optim.lr": [0.1, 0.2]}, "tuning": {"seeds": [7]}}
    plan = open_plan(write_matrix(tmp_path, protocol="best_recipe", **changes), [], tmp_path / "out")
    record_plan(plan)
    for rate, accuracy in ((0.1, 0.3), (0.2, 0.4)):
        name = f"plain-lr{rate}-tune-s7"
        plan.manifest.set_state(name, "finished")
        write_json(plan.out / name / "summary.json", axis_cell("plain", rate, 7, accuracy))
    found = choose(plan)["plain"]
    assert (found["axes"], found["score"], found["failed"]) == ({"optim.lr": 0.2}, 0.4, 0)
