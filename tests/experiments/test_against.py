"""An arm of one matrix beside the arms of another, by hand."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from summary_builders import axis_cell
from typer.testing import CliRunner

from qerl.cli import app
from qerl.errors import ConfigError
from qerl.experiments.against import against
from qerl.experiments.compare import compare_cells
from qerl.experiments.folders import Collection
from qerl.experiments.table import markdown
from qerl.report.arms import render_arms

CONFIG = {"model": {"path": "m"}, "optim": {"lr": 1e-4}, "eval": {"every": 30, "samples": 1}, "aqn": {"enabled": True}}
PLANS = {name: {"plan": {"protocol": "mechanism", "vary": ["model.path"]}} for name in ("main", "more")}


def cell(matrix, arm, seed, after, *, right=None, **changes):
    config = copy.deepcopy(CONFIG)
    for key, value in changes.items():
        section, _, leaf = key.partition("__")
        config[section][leaf] = value
    questions = {} if right is None else {"after": {"ids": "i", "samples": 1, "right": right}}
    curves = {"entropy": [[1], [0.4]], "probe/entropy_conditional/by_token": [[1], [0.5]]}
    known = {"matrix": matrix, "run": f"{arm}-s{seed}", "axes": {}, "config": config, "questions": questions}
    return axis_cell(arm, 1e-4, seed, after) | known | {"curves": curves}


@pytest.fixture
def main():
    cells = [cell("main", "plain", seed, after) for seed, after in enumerate((0.30, 0.32, 0.34))]
    return [*cells, cell("main", "noisy", 0, 0.31, right="1100"), cell("main", "noisy", 1, 0.33, right="1100")]


def collected(*cells):
    return Collection(cells=cells, plans=PLANS)


def test_the_reference_is_the_first_arm_and_its_matrix_lends_its_scatter(main):
    other = cell("more", "linear", 0, 0.35, right="1110", eval__every=20, model__path="n")
    (found,) = compare_cells(against(collected(*main, other), "main/noisy"))
    assert [arm.label for arm in found.arms] == ["NOISY (of main)", "LINEAR"]
    (pair,) = found.pairs
    assert pair.over_seeds.values == (pytest.approx(0.04),) and (pair.tests[0].gained, pair.tests[0].lost) == (1, 0)
    # Sums of squares 8 and 2 of 1e-4 over 2 and 1 degrees of freedom.
    assert (pair.pooled.sd, pair.pooled.freedom) == (pytest.approx((10e-4 / 3) ** 0.5), 3)
    assert pair.pooled.mean == pytest.approx(0.35 - 0.32)


def test_the_page_knows_differences_of_which_nothing_was_stated_beforehand(main):
    """The arms of two matrices with several seeds each: what their seeds can show is known, what was planned is not."""
    detect = {"sd": 0.01, "alpha": 0.05, "power": 0.8}
    plans = {name: {"plan": known["plan"] | {"detect": detect}} for name, known in PLANS.items()}
    cells = (*main, cell("more", "linear", 0, 0.35), cell("more", "linear", 1, 0.36))
    (found,) = compare_cells(against(Collection(cells=cells, plans=plans), "main/noisy"))
    # (4.3027 + 1.0607) * .01 * sqrt(1/2 + 1/2), with two degrees of freedom.
    assert (found.pairs[0].detectable, found.pairs[0].detectable_now) == (None, pytest.approx(0.0536, abs=1e-4))
    assert "– (±5.4)" in render_arms([found]) and "– (5.4)" in markdown([found])


def test_probe_sets_of_two_matrices_are_not_compared(main):
    (found,) = compare_cells(against(collected(*main, cell("more", "linear", 0, 0.35)), "main/noisy"))
    assert [set(arm.ends) for arm in found.arms] == [
        {"entropy"},
        {"entropy", "probe/entropy_conditional/by_token"},
    ]


@pytest.mark.parametrize(
    ("reference", "changes", "words"),
    [
        ("main/none", {}, "no such arm"),
        ("none/noisy", {}, "no such arm"),
        ("main/noisy", {"optim__lr": 3e-4}, "cannot be compared"),
        ("main/noisy", {"eval__samples": 4}, "cannot be compared"),
    ],
)
def test_what_cannot_be_compared_is_refused(main, reference, changes, words):
    with pytest.raises(ConfigError, match=words):
        against(collected(*main, cell("more", "linear", 0, 0.35, **changes)), reference)


def test_a_reference_is_judged_by_its_cells_that_have_begun(main):
    other = cell("more", "linear", 0, 0.35)
    waiting = cell("main", "noisy", 7, None) | {"state": "waiting", "protocol": None, "config": None}
    (found,) = compare_cells(against(collected(waiting, *main, other), "main/noisy"))
    assert len(found.arms[0].after.values) == 2
    with pytest.raises(ConfigError, match="has no run yet"):
        against(collected(main[0], waiting, other), "main/noisy")


def test_a_second_matrix_under_the_same_protocol_is_needed(main):
    with pytest.raises(ConfigError, match="no other matrix"):
        against(Collection(cells=tuple(main), plans={"main": PLANS["main"]}), "main/noisy")
    plans = PLANS | {"more": {"plan": {"protocol": "best_recipe"}}}
    with pytest.raises(ConfigError, match="mechanism alone"):
        against(Collection(cells=(*main, cell("more", "linear", 0, 0.35)), plans=plans), "main/noisy")


def test_the_command_compares_committed_matrices():
    results = Path(__file__).resolve().parents[2] / "results"
    command = ["results", str(results / "mechanism"), str(results / "ablations"), "--against", "mechanism/nvfp4_aqn"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0 and shown.output.startswith("**ablations**") and "**mechanism**" not in shown.output
    (line,) = (line for line in shown.output.splitlines() if line.startswith("| MXFP4 −"))
    assert "| one seed |" in line and "| −4.5 |" in line
    refused = CliRunner().invoke(app, [*command, "--write", "elsewhere"])
    assert refused.exit_code == 2 and "--write keeps matrices as they are" in " ".join(refused.stderr.split())
