"""A look at a matrix before its end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from matrix_builders import ARMS, write_matrix
from typer.testing import CliRunner

from qerl.cli import app
from qerl.errors import ConfigError
from qerl.experiments.as_of import as_of_step
from qerl.experiments.compare import compare_cells
from qerl.experiments.folders import export_summaries, read_cells
from qerl.experiments.manifest import Manifest
from qerl.experiments.runner import Orders, run_matrix


def test_cells_are_compared_where_all_have_been_evaluated(tmp_path):
    changes = {"train.steps": 3, "eval.every": 1}
    path = write_matrix(tmp_path, arms=ARMS, set=changes, compare=[["plain", "noisy"]])
    plan = run_matrix(path, [], tmp_path / "out", Orders(one_process=True), lambda text: None)
    # The noisy cell as if it had been killed after its second step, beside another one: the manifest alone knows of that.
    Manifest(plan.out).set_state("noisy-s0", "stopped", shared_device=True)
    plan.run(plan.cells[1]).cell_path.unlink()
    whole = read_cells([plan.out])
    export_summaries(whole, tmp_path / "results")
    again = read_cells([tmp_path / "results" / str(plan.matrix.name)])
    assert [[cell["shared_device"] for cell in found.cells] for found in (whole, again)] == [[False, True]] * 2
    early = as_of_step(whole, 2)
    plain, noisy = early.cells
    at = {cell["run"]: {point["step"]: point["accuracy"] for point in cell["evaluations"]} for cell in whole.cells}
    assert [cell["evaluations"][-1]["accuracy"] for cell in early.cells] == [at["plain-s0"][2], at["noisy-s0"][2]]
    rows = plan.run(plan.cells[0]).read_evaluation(2)
    right = "".join(str(int(row["answers"][0]["outcome"] == "correct")) for row in rows)
    assert plain["questions"]["after"]["right"] == right
    assert sum(map(int, noisy["questions"]["after"]["right"])) == round(8 * at["noisy-s0"][2])
    assert max(plain["curves"]["reward"][0]) == 2 and plain["final"] == {} and plain["train_seconds"] > 0
    (comparison,) = compare_cells(early)
    assert [row.after for arm in comparison.arms for row in arm.seeds] == [at["plain-s0"][2], at["noisy-s0"][2]]
    assert any("As of step 2 of 3" in note for note in comparison.notes)
    assert [row.device_seconds is None for arm in comparison.arms for row in arm.seeds] == [False, True]
    pair = comparison.pairs[0]
    assert pair.questions == 8 and pair.question_difference == pytest.approx(at["noisy-s0"][2] - at["plain-s0"][2])
    # What became of a cell afterwards is no result of that step, and is told.
    Manifest(plan.out).set_state("noisy-s0", "failed", error="not finite", collapse=True)
    Manifest(plan.out).set_state("plain-s0", "trained")
    (fallen,) = compare_cells(as_of_step(read_cells([plan.out]), 2))
    assert "noisy-s0 failed later: not finite" in fallen.notes
    assert [(row.after, row.collapsed) for arm in fallen.arms for row in arm.seeds][1] == (at["noisy-s0"][2], False)
    without = replace(
        whole,
        cells=(
            {**whole.cells[0], "state": "trained", "evaluations": whole.cells[0]["evaluations"][:1]},
            whole.cells[1],
        ),
    )
    assert as_of_step(without, 2).cells[0]["state"] == "waiting"
    last = as_of_step(whole, 3)
    assert last.cells[0]["questions"]["after"] == whole.cells[0]["questions"]["after"]
    with pytest.raises(ConfigError, match=r"no cell was evaluated after that step.*one of 1, 2, 3"):
        as_of_step(whole, 7)
    printed = CliRunner().invoke(app, ["results", str(plan.out), "--step", "2"])
    assert printed.exit_code == 0 and "As of step 2 of 3" in printed.stdout
    assert CliRunner().invoke(app, ["results", str(plan.out), "--step", "7"]).exit_code == 2
    both = CliRunner().invoke(app, ["results", str(plan.out), "--step", "2", "--write", str(tmp_path / "written")])
    assert both.exit_code == 2 and not (tmp_path / "written").exists()
    page = tmp_path / "page.html"
    assert CliRunner().invoke(app, ["report", str(plan.out), "--step", "2", "--out", str(page)]).exit_code == 0
    assert "As of step 2 of 3" in page.read_text()
    one = CliRunner().invoke(app, ["report", str(plan.out / "plain-s0"), "--step", "2"])
    assert one.exit_code == 2 and "several runs" in " ".join(one.stderr.split())
