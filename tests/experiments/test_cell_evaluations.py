"""Evaluations of cells: one before training for all of a base, and more after it."""

from __future__ import annotations

import fcntl
import json
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
from matrix_builders import ARMS, write_matrix

from qerl.config.load import load_config
from qerl.errors import ConfigError
from qerl.experiments.plan import open_plan
from qerl.experiments.runner import Orders, run_matrix
from qerl.experiments.shared import FOLDER, PROBE_LOCK, evaluate_before, take_probe
from qerl.metrics.run_dir import RunDir
from qerl.train.run import train

OTHER_ANSWERS = {
    "wide": {"model.stream_dtype": "float32"},
    "fp8": {"rollout.kv_format": "fp8"},
    "warm": {"rollout.temperature": 0.9},
}


def test_cells_of_one_base_share_the_evaluation_before_training(tmp_path):
    """And it is what they would have measured themselves, answer by answer."""
    bf16 = {"name": "bf16", "set": {"quant.format": "bf16", "aqn.enabled": False}}
    arms = [ARMS[0], ARMS[1] | {"seeds": [0, 1]}, bf16]
    path = write_matrix(tmp_path, arms=arms, set={"train.steps": 1, "train.save_every": 0})
    plan = run_matrix(path, [], tmp_path / "out", Orders(one_process=True), lambda text: None)
    before = {c.name: plan.run(c).read_json("summary.json")["evaluation"]["before"] for c in plan.cells}
    taken = {name: found.get("taken_from") for name, found in before.items()}
    assert taken == {
        "plain-s0": None,
        "noisy-s0": "plain-s0",
        "bf16-s0": None,
        "noisy-s1": "plain-s0",
    }
    noisy = next(cell for cell in plan.cells if cell.name == "noisy-s1")
    elsewhere = noisy.config.model_copy(
        update={"run": noisy.config.run.model_copy(update={"dir": str(tmp_path / "alone")})}
    )
    alone = RunDir.open(train(elsewhere))
    assert alone.read_evaluation(0) == plan.run(noisy).read_evaluation(0)
    own, shared = (run.read_metrics()[0] for run in (alone, plan.run(noisy)))
    assert {k: v for k, v in own.items() if k.startswith("eval/")} == {
        k: v for k, v in shared.items() if k.startswith("eval/")
    }
    assert alone.read_json("summary.json")["paired"] == plan.run(noisy).read_json("summary.json")["paired"]


def test_a_cell_waits_for_the_evaluation_that_another_is_making(tmp_path):
    config = load_config(None, ["model.path=none", "eval.temperature=0"])
    made, going_on = [], SimpleNamespace(requested=False)

    def trainer(name):
        run = RunDir(tmp_path / name)

        def evaluate(moment):
            made.append(name)
            time.sleep(0.3)
            run.write_evaluation(0, [{"answer": name}])
            found.state.evaluations[moment] = {"accuracy": 0.5, "step": 0}
            return {"eval/accuracy": 0.5}

        state = SimpleNamespace(base_hash="b", eval_prompts="p", evaluations={})
        progress = SimpleNamespace(note=lambda text: None)
        found = SimpleNamespace(config=config, run=run, state=state, progress=progress, evaluate=evaluate)
        return found

    trainers = [trainer(f"cell{i}") for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        metrics = list(pool.map(lambda t: evaluate_before(t, going_on, tmp_path), trainers))
    assert len(made) == 1 and metrics == [{"eval/accuracy": 0.5}] * 3
    assert [t.run.read_evaluation(0) for t in trainers] == [[{"answer": made[0]}]] * 3
    taken = [t.state.evaluations["before"].get("taken_from") for t in trainers]
    assert sorted(taken, key=str) == sorted([None, made[0], made[0]], key=str)
    # What is kept and cannot be read is made again; a stop ends the wait for another cell.
    (kept,) = (path for path in (tmp_path / FOLDER).iterdir() if path.is_dir())
    (kept / "evaluation.json").write_text("{")
    evaluate_before(trainers[1], going_on, tmp_path)
    assert made[1:] == ["cell1"] and "taken_from" not in trainers[1].state.evaluations["before"]
    with kept.with_suffix(".lock").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(KeyboardInterrupt):
            evaluate_before(trainers[2], SimpleNamespace(requested=True), tmp_path)
    trainers[0].state.base_hash = "another"
    evaluate_before(trainers[0], going_on, tmp_path)
    assert made[2:] == ["cell0"]


def test_settings_that_change_answers_have_evaluations_of_their_own(tmp_path):
    arms = [ARMS[0], *({"name": name, "set": {**ARMS[0]["set"], **change}} for name, change in OTHER_ANSWERS.items())]
    path = write_matrix(tmp_path, arms=arms, set={"train.steps": 1})
    plan = run_matrix(path, [], tmp_path / "out", Orders(one_process=True), lambda text: None)
    before = {c.arm.name: plan.run(c).read_json("summary.json")["evaluation"]["before"] for c in plan.cells}
    assert {name: found.get("taken_from") for name, found in before.items()} == {
        **dict.fromkeys(("plain", *OTHER_ANSWERS)),
        "warm": "plain-s0",
    }


def test_a_trained_model_answers_questions_of_another_set_too(tmp_path):
    others = tmp_path / "others.jsonl"
    rows = [{"question": f"What is {a} + {a + 1}?", "answer": str(2 * a + 1)} for a in range(5)]
    others.write_text("".join(json.dumps(row) + "\n" for row in rows))
    finals = [{"name": "others", "data": str(others)}]
    path = write_matrix(tmp_path, arms=ARMS[:1], set={"train.steps": 1}, final=finals)
    plan = run_matrix(path, [], tmp_path / "out", Orders(one_process=True), lambda text: None)
    run = plan.run(plan.cells[0])
    found = run.read_json("final.json")["others"]
    assert (found["count"], found["data"], found["too_long"]) == (5, "others", 0)
    assert [row["question"] for row in run.read_final_evaluation("others")] == [row["question"] for row in rows]
    finals = [{"name": "others", "data": str(tmp_path / "none.jsonl")}]
    with pytest.raises(ConfigError, match=r"no cell of the matrix can run.*none\.jsonl"):
        open_plan(write_matrix(tmp_path, arms=ARMS[:1], final=finals), [], tmp_path / "other")


def matrix_run(folder, made, make=None):
    """A cell at step 0, which notes in ``made`` when it makes a probe set."""

    def make_probe(shared):
        if not shared.probe_path.exists():
            made.append(folder.name)
            (make or (lambda: None))()
            shared.write_json(shared.probe_path, {"made by": folder.name})

    config = load_config(None, ["model.path=none"])
    diagnostics = SimpleNamespace(make_probe=make_probe)
    progress = SimpleNamespace(note=lambda text: None)
    return SimpleNamespace(config=config, run=RunDir(folder), diagnostics=diagnostics, progress=progress)


GOING_ON = SimpleNamespace(requested=False)


def test_first_cells_of_several_commands_take_one_probe_set(tmp_path):
    """Two that made one each compared entropies on different contexts."""
    made: list[str] = []
    begun = Barrier(3)
    cells = [matrix_run(tmp_path / f"cell{i}", made) for i in range(3)]

    def take(cell):
        begun.wait()
        take_probe(cell, GOING_ON, tmp_path)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(take, cells))
    assert len(made) == 1
    assert {path.read_text() for path in tmp_path.glob("*/probe.json")} == {(tmp_path / "probe.json").read_text()}
    # A copy of the folder may have been taken before it got there; a cell has it still.
    (tmp_path / "probe.json").unlink()
    take_probe(matrix_run(tmp_path / "late", made), GOING_ON, tmp_path)
    assert len(made) == 1 and (tmp_path / "late" / "probe.json").read_text() == (tmp_path / "probe.json").read_text()


def test_a_cell_that_dies_while_it_makes_the_probe_set_leaves_none(tmp_path):
    made: list[str] = []

    def dies():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        take_probe(matrix_run(tmp_path / "first", made, dies), GOING_ON, tmp_path)
    assert not list(tmp_path.rglob("probe.json"))
    take_probe(matrix_run(tmp_path / "second", made), GOING_ON, tmp_path)
    assert made == ["first", "second"]
    with (tmp_path / PROBE_LOCK).open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(KeyboardInterrupt):
            take_probe(matrix_run(tmp_path / "third", made), SimpleNamespace(requested=True), tmp_path)
