"""Matrices run on the packaged model: states, going on, what fails, what travels."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from matrix_builders import ARMS, write_matrix

from qerl.errors import ConfigError, RunFolderError
from qerl.experiments import one_cell, runner
from qerl.experiments.compare import compare_cells
from qerl.experiments.folders import export_summaries, read_cells
from qerl.experiments.manifest import Manifest
from qerl.experiments.plan import open_plan, plan_lines
from qerl.experiments.runner import Orders, run_matrix
from qerl.experiments.table import markdown
from qerl.metrics.behavior import read_behavior
from qerl.metrics.run_dir import RunDir

ALONE = Orders(one_process=True)


def states(plan):
    return {cell.name: plan.state(cell) for cell in plan.cells}


def quiet(text):
    pass


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A matrix with a good, a diverging and an impossible arm, and what was said while it ran."""
    folder = tmp_path_factory.mktemp("matrix")
    broken = {"name": "broken", "set": {"aqn.sites": ["qk_norm"]}}
    path = write_matrix(
        folder,
        arms=[*ARMS, broken],
        axes={"optim.lr": [1e-3, 1e30]},
        seeds=[0],
        compare=[["plain", "noisy"]],
        final=[{"name": "noisy", "noise": "first"}, {"name": "avg2", "temperature": 1.0, "samples": 2}],
    )
    said: list[str] = []
    plan = run_matrix(path, [], folder / "out", ALONE, said.append)
    return plan, said


def test_cells_end_as_what_they_are_and_the_matrix_goes_on(done):
    plan, said = done
    assert states(plan) == {
        "plain-lr0.001-s0": "finished",
        "plain-lr1e+30-s0": "failed",
        "noisy-lr0.001-s0": "finished",
        "noisy-lr1e+30-s0": "failed",
        "broken-lr0.001-s0": "invalid",
        "broken-lr1e+30-s0": "invalid",
    }
    assert any("broken-lr0.001-s0: invalid" in text and "qk_norm" in text for text in said)
    entry = plan.manifest.cell("plain-lr1e+30-s0")
    assert entry["error"].startswith("TrainingError")
    assert not plan.run(plan.cells[4]).path.exists()


def test_all_cells_take_their_entropies_on_one_probe_set(done):
    plan, _ = done
    first, second = (json.loads(plan.run(plan.cells[i]).probe_path.read_text()) for i in (0, 2))
    assert first == second == json.loads(RunDir(plan.out).probe_path.read_text())


def test_arms_with_one_seed_see_the_same_prompts_in_the_same_order(done):
    plan, _ = done
    orders = [
        [
            row["prompt_id"]
            for index in range(3)
            for row in read_behavior(plan.run(plan.cells[i]).rollout_path(index), ["prompt_id"])
        ]
        for i in (0, 2)
    ]
    assert orders[0] == orders[1] and len(set(orders[0])) == 12


def test_final_evaluations_are_made_where_they_make_sense(done):
    plan, _ = done
    plain, noisy = (plan.run(plan.cells[i]).read_json("final.json") for i in (0, 2))
    assert list(plain) == ["avg2"] and list(noisy) == ["noisy", "avg2"]
    assert noisy["noisy"]["policy"]["noise"]["sigma"] == 0.1
    assert noisy["avg2"]["policy"]["samples"] == 2 and noisy["avg2"]["answers"] == 16
    assert len(plan.run(plan.cells[2]).read_final_evaluation("noisy")) == 8


def test_the_same_command_again_changes_nothing(done):
    plan, _ = done
    before = {path: path.stat().st_mtime_ns for path in plan.out.glob("*/metrics.jsonl")}
    again = run_matrix(plan.path, [], plan.out, ALONE, quiet)
    assert states(again) == states(plan)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_failed_cell_is_shown_with_what_it_did_and_counts_as_collapsed(done):
    plan, _ = done
    (comparison,) = compare_cells(read_cells([plan.out]))
    by_key = {arm.key: arm for arm in comparison.arms}
    assert list(by_key) == [name.removesuffix("-s0") for name in states(plan)]
    assert (by_key["plain-lr1e+30"].collapsed, by_key["plain-lr1e+30"].judged) == (1, 1)
    assert by_key["plain-lr0.001"].after is not None and by_key["plain-lr1e+30"].after is None
    assert by_key["broken-lr0.001"].judged == 0
    assert any("plain-lr1e+30-s0, noisy-lr1e+30-s0 failed: TrainingError" in note for note in comparison.notes)
    assert any("qk_norm" in note for note in comparison.notes)
    assert any("shared a process" in note for note in comparison.notes)
    assert "noisy" in by_key["noisy-lr0.001"].noise_effect
    (pair, other) = comparison.pairs
    assert pair.questions == 8 and pair.over_seeds is not None and pair.over_seeds.low is None
    assert other.over_seeds is None and other.verdict == "no finished seed in common"


def test_committed_summaries_give_the_table_of_the_run_folders(done, tmp_path):
    plan, _ = done
    collection = read_cells([plan.out])
    written = export_summaries(collection, tmp_path / "results")
    assert len(written) == 7
    text = (tmp_path / "results" / "small" / "noisy-lr0.001-s0" / "summary.json").read_text()
    assert len(text) < 40_000 and str(tmp_path.parent) not in text and str(plan.path.parent) not in text
    again = read_cells([tmp_path / "results" / "small"])
    assert markdown(compare_cells(again)) == markdown(compare_cells(collection))


def test_what_is_portable_holds_every_cell_and_no_records(done):
    plan, _ = done
    names = {
        str(path.relative_to(plan.out / "portable")) for path in (plan.out / "portable").rglob("*") if path.is_file()
    }
    assert {"matrix.json", "probe.json", "plain-lr0.001-s0/cell.json", "plain-lr1e+30-s0/metrics.jsonl"} <= names
    assert not [name for name in names if "rollouts" in name or "adapters" in name]
    with_checkpoint = {name.split("/")[0] for name in names if "portable.npz" in name}
    assert with_checkpoint == {"plain-lr1e+30-s0", "noisy-lr1e+30-s0"}, "failed ones alone: --retry goes on from it"


def test_a_changed_matrix_does_not_mix_with_what_has_run(done):
    plan, _ = done
    with pytest.raises(ConfigError, match=r"begun with other settings.*lora\.rank: 2 -> 3"):
        open_plan(plan.path, ["lora.rank=3"], plan.out)
    with pytest.raises(ConfigError, match=r"begun with other settings.*train\.steps: 3 -> 9"):
        open_plan(plan.path, ["train.steps=9"], plan.out)


def test_a_plan_is_listed_with_its_problems_and_what_it_can_detect(done):
    text = "\n".join(plan_lines(done[0]))
    assert "one seed has no interval" in text and "INVALID" in text and "target 99.0%" in text


def test_orders_that_name_no_cell_are_refused(done):
    plan, _ = done
    with pytest.raises(ConfigError, match=r"no such cell.*plain-lr0\.001-s0"):
        run_matrix(plan.path, [], plan.out, Orders(one_process=True, only=("plain-lr0.001-s1",)), quiet)
    with pytest.raises(ConfigError, match="2 of 6 cells cannot run"):
        run_matrix(plan.path, [], plan.out, Orders(one_process=True, strict=True), quiet)


def test_cells_begin_in_the_order_in_which_they_are_named(tmp_path):
    path = write_matrix(tmp_path, set={"train.steps": 1})
    said: list[str] = []
    orders = replace(ALONE, only=("noisy-s0", "plain-s0", "noisy-s0"))
    run_matrix(path, [], tmp_path / "out", orders, said.append)
    assert [text.split(":")[0] for text in said] == ["noisy-s0", "plain-s0"]


def test_data_that_is_not_there_makes_its_cells_invalid_and_no_others(tmp_path):
    path = write_matrix(tmp_path, axes={"data.eval": [str(tmp_path), str(tmp_path / "none.jsonl")]})
    plan = open_plan(path, [], tmp_path / "out")
    assert [cell.problem is None for cell in plan.cells] == [True, False, True, False]
    assert "none.jsonl" in plan.cells[1].problem
    assert not any(cell.problem for cell in open_plan(path, [], tmp_path / "out", data=False).cells)


class StopsAfter:
    """A deadline that is reached at the n-th step boundary."""

    def __init__(self, boundaries):
        self.left = boundaries

    def reached(self):
        self.left -= 1
        return self.left <= 0

    def restart(self):
        pass

    def seconds_left(self):
        return None


def test_a_matrix_goes_on_elsewhere_from_what_is_portable(tmp_path, monkeypatch):
    path = write_matrix(tmp_path, set={"train.save_every": 0})
    monkeypatch.setattr(runner, "Deadline", lambda seconds: StopsAfter(5))
    first = run_matrix(path, [], tmp_path / "here", Orders(one_process=True, max_minutes=1.0), quiet)
    monkeypatch.undo()
    # Three steps of the first cell, two of the second.
    assert states(first) == {"plain-s0": "finished", "noisy-s0": "stopped"}
    travels = tmp_path / "here" / "portable"
    assert (travels / "noisy-s0" / "checkpoints" / "checkpoint-2" / "portable.npz").exists()
    shutil.copytree(travels, tmp_path / "there")
    second = run_matrix(path, [], tmp_path / "there", ALONE, quiet)
    assert states(second) == {"plain-s0": "finished", "noisy-s0": "finished"}
    cells = {cell["run"]: cell for cell in read_cells([tmp_path / "there"]).cells}
    assert cells["noisy-s0"]["portable_resumes"] == [2] and cells["noisy-s0"]["bit_exact"] is False
    assert cells["plain-s0"]["bit_exact"] is True
    assert [point["step"] for point in cells["noisy-s0"]["evaluations"]] == [0, 3]
    assert any(
        "not bit-exact: noisy-s0" in note for c in compare_cells(read_cells([tmp_path / "there"])) for note in c.notes
    )


def test_a_trained_cell_without_its_final_evaluations_gets_them_later(tmp_path, monkeypatch):
    path = write_matrix(tmp_path, arms=[ARMS[1]], final=[{"name": "noisy", "noise": "last"}])
    real = one_cell.evaluate_trained
    monkeypatch.setattr(
        one_cell,
        "evaluate_trained",
        lambda trained, specs, time_for, stopped: real(trained, specs, lambda seconds: False, stopped),
    )
    first = run_matrix(path, [], tmp_path / "here", ALONE, quiet)
    monkeypatch.undo()
    assert states(first) == {"noisy-s0": "trained"}
    shutil.copytree(tmp_path / "here" / "portable", tmp_path / "there")
    second = run_matrix(path, [], tmp_path / "there", ALONE, quiet)
    assert states(second) == {"noisy-s0": "finished"}
    assert RunDir(tmp_path / "there" / "noisy-s0").read_json("final.json")["noisy"]["count"] == 8


def test_all_weights_can_be_an_arm_whose_model_is_evaluated_later(tmp_path, monkeypatch):
    changes = {"quant.format": "bf16", "aqn.enabled": False, "train.mode": "full", "lora.rank": 32}
    path = write_matrix(
        tmp_path,
        arms=[{"name": "full", "set": changes}],
        set={"train.steps": 1},
        final=[{"name": "again"}],
    )
    monkeypatch.setattr(one_cell, "evaluate_trained", lambda trained, specs, time_for, stopped: False)
    first = run_matrix(path, [], tmp_path / "out", ALONE, quiet)
    monkeypatch.undo()
    assert states(first) == {"full-s0": "trained"}
    assert not (tmp_path / "out" / "portable" / "full-s0" / "checkpoints").exists()
    second = run_matrix(path, [], tmp_path / "out", ALONE, quiet)
    assert states(second) == {"full-s0": "finished"}
    run = second.run(second.cells[0])
    # The same greedy evaluation of the same weights.
    assert (
        run.read_json("final.json")["again"]["accuracy"]
        == run.read_json("summary.json")["evaluation"]["after"]["accuracy"]
    )
    assert [r["answers"] for r in run.read_final_evaluation("again")] == [r["answers"] for r in run.read_evaluation(1)]


def test_a_cell_that_was_killed_before_its_first_checkpoint_starts_anew(tmp_path):
    path = write_matrix(tmp_path, arms=[ARMS[0]])
    run = RunDir.create(tmp_path / "out" / "plain-s0")
    run.append_metrics(1, {})
    Manifest(tmp_path / "out").set_state("plain-s0", "running")
    plan = run_matrix(path, [], tmp_path / "out", ALONE, quiet)
    assert states(plan) == {"plain-s0": "finished"}
    assert [row["step"] for row in run.read_metrics()] == [0, 1, 2, 3]


@pytest.mark.parametrize("orders", [ALONE, Orders(), Orders(jobs=2), Orders(retry=True)])
@pytest.mark.parametrize("state", ["waiting", "failed"])
def test_a_folder_that_the_matrix_did_not_make_is_left_alone(tmp_path, orders, state):
    """Whoever would begin a cell there, in whatever process: its name was free when the matrix was planned, or a search has failed it."""
    path = write_matrix(tmp_path, arms=[ARMS[0]])
    Manifest(tmp_path / "out").set_state("plain-s0", state)
    (tmp_path / "out" / "plain-s0").mkdir(parents=True)
    (tmp_path / "out" / "plain-s0" / "thesis.txt").write_text("years of work")
    if state == "failed" and not orders.retry:
        assert states(run_matrix(path, [], tmp_path / "out", orders, quiet)) == {"plain-s0": "failed"}
    else:
        with pytest.raises(RunFolderError, match="not the matrix's"):
            run_matrix(path, [], tmp_path / "out", orders, quiet)
    assert [path.name for path in (tmp_path / "out" / "plain-s0").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("orders", [ALONE, Orders()])
def test_a_cells_folder_may_be_a_link_to_an_empty_one_and_nothing_behind_a_link_is_removed(tmp_path, orders):
    path, other = write_matrix(tmp_path, arms=[ARMS[0]], set={"train.steps": 1}), tmp_path / "disk"
    out = tmp_path / "out"
    out.mkdir()
    other.mkdir()
    (out / "plain-s0").symlink_to(other)
    assert states(run_matrix(path, [], out, orders, quiet)) == {"plain-s0": "finished"}
    assert (other / "metrics.jsonl").exists()
    shutil.rmtree(other / "checkpoints")
    Manifest(out).set_state("plain-s0", "failed")
    with pytest.raises(RunFolderError, match="its folder is a link"):
        run_matrix(path, [], out, replace(orders, retry=True), quiet)
    assert (other / "metrics.jsonl").exists()


def test_cells_at_one_time_learn_what_they_learn_alone_and_are_counted_without_times(tmp_path, done):
    """Two cells at one time: the same numbers as cells one after another, and no time that they shared."""
    path = write_matrix(tmp_path, compare=[["plain", "noisy"]])
    said: list[str] = []
    plan = run_matrix(path, ["optim.lr=1e-3"], tmp_path / "out", Orders(jobs=2), said.append)
    assert set(states(plan).values()) == {"finished"} and len(said) == 2
    alone, _ = done
    for name in ("plain", "noisy"):
        before, beside = (
            RunDir(folder / cell).read_metrics()
            for folder, cell in ((alone.out, f"{name}-lr0.001-s0"), (plan.out, f"{name}-s0"))
        )
        assert [row.get("reward") for row in before] == [row.get("reward") for row in beside]
        assert [row.get("grad_norm") for row in before] == [row.get("grad_norm") for row in beside]
    probes = {plan.run(cell).probe_path.read_text() for cell in plan.cells}
    assert probes == {RunDir(plan.out).probe_path.read_text()}
    (comparison,) = compare_cells(read_cells([plan.out]))
    shared = [cell.name for cell in plan.cells if plan.manifest.cell(cell.name).get("shared_device")]
    told = "Every cell ran beside others" if len(shared) == len(plan.cells) else ", ".join(shared)
    assert "plain-s0" in shared and any(told in note for note in comparison.notes)
    for arm in comparison.arms:
        for row in arm.seeds:
            assert row.after is not None and (row.device_seconds is None) == (row.name in shared)
    with pytest.raises(ConfigError, match="one after another"):
        run_matrix(path, [], tmp_path / "other", Orders(jobs=2, one_process=True), quiet)


def test_retrying_runs_a_failed_cell_once_more(tmp_path):
    path = write_matrix(tmp_path, arms=[ARMS[0]])
    Manifest(tmp_path / "out").set_state("plain-s0", "failed", error="out of memory")
    assert states(run_matrix(path, [], tmp_path / "out", ALONE, quiet)) == {"plain-s0": "failed"}
    plan = run_matrix(path, [], tmp_path / "out", Orders(one_process=True, retry=True), quiet)
    assert states(plan) == {"plain-s0": "finished"}
    assert "error" not in plan.manifest.cell("plain-s0")


def test_temperature_is_matched_on_the_probe_set_before_training(tmp_path):
    warm = {"name": "warm", "set": {"aqn.enabled": False}, "match_temperature": {"arm": "noisy", "high": 4.0}}
    path = write_matrix(tmp_path, arms=[ARMS[0], ARMS[1] | {"set": {"aqn.sigma_start": 0.3}}, warm], seeds=[0, 1])
    plan = run_matrix(path, [], tmp_path / "out", Orders(one_process=True, match_only=True), quiet)
    found = plan.manifest.read()["matched"]["warm"]
    assert abs(found["entropy"] - found["target"]) <= 1e-3 * found["target"]
    assert found["target"] > found["at_own"] and 1.0 < found["temperature"] < 4.0
    again = open_plan(path, [], tmp_path / "out")
    assert [cell.config.rollout.temperature for cell in again.cells] == [1.0, 1.0, found["temperature"]] * 2
    assert set(states(again).values()) == {"waiting"}
    # The diagnostics of an arm like it, at its own temperature on the same probe set, find the same entropy.
    done = run_matrix(path, ["train.steps=1"], tmp_path / "out", Orders(one_process=True, only=("plain-s0",)), quiet)
    measured = done.run(done.cells[0]).read_metrics()[1]["probe/entropy_tempered/by_token"]
    assert measured == pytest.approx(found["at_own"], rel=1e-6)


def test_no_temperature_fails_the_arm_and_not_the_matrix(tmp_path):
    warm = {
        "name": "warm",
        "set": {"aqn.enabled": False},
        "match_temperature": {"arm": "plain", "low": 2.0, "high": 3.0},
    }
    path = write_matrix(tmp_path, arms=[ARMS[0], warm], set={"train.steps": 1})
    plan = run_matrix(path, [], tmp_path / "out", ALONE, quiet)
    assert states(plan) == {"plain-s0": "finished", "warm-s0": "failed"}
    assert "no temperature in range" in plan.manifest.cell("warm-s0")["error"]


def test_best_recipe_chooses_and_trains_the_choice(tmp_path):
    path = write_matrix(
        tmp_path,
        protocol="best_recipe",
        arms=[ARMS[0], {"name": "hot", "set": {"aqn.enabled": False}, "axes": {"optim.lr": [1e30, 2e30]}}],
        axes={"optim.lr": [1e30, 1e-3]},
        tuning={"seeds": [7], "set": {"train.steps": 2}},
        set={"train.steps": 2},
        final=[{"name": "again"}],
    )
    plan = run_matrix(path, [], tmp_path / "out", ALONE, quiet)
    assert states(plan) == {
        "plain-lr1e+30-tune-s7": "failed",
        "plain-lr0.001-tune-s7": "finished",
        "hot-lr1e+30-tune-s7": "failed",
        "hot-lr2e+30-tune-s7": "failed",
        "plain-final-s0": "finished",
        "hot-final-s0": "failed",
    }
    with_final = [cell.name for cell in plan.cells if plan.run(cell).final_path.exists()]
    assert with_final == ["plain-final-s0"]
    choices = plan.manifest.read()["choices"]
    assert choices["plain"]["axes"] == {"optim.lr": 1e-3}
    assert (choices["plain"]["trials"], choices["plain"]["failed"]) == (2, 1)
    assert choices["hot"]["axes"] is None
    final, tune = compare_cells(read_cells([plan.out]))
    assert (final.phase, tune.phase) == ("final", "tune")
    assert final.choices[0].startswith("plain: optim.lr 0.001")
    assert plan.run(next(c for c in plan.cells if c.name == "plain-final-s0")).read_metrics()[-1]["step"] == 2
