"""A grid of learning rates: its table by arm and rate, and the rate that the stated rule takes, by hand."""

from __future__ import annotations

import pytest
from summary_builders import PLAN
from summary_builders import axis_cell as cell

from qerl.experiments.compare import compare_cells
from qerl.experiments.folders import Collection
from qerl.experiments.table import markdown


def shown(cells):
    return markdown(compare_cells(Collection(cells=tuple(cells), plans={"grid": PLAN})))


LOW = [cell("a", 3e-5, 0, 0.24), cell("a", 3e-5, 1, 0.26), cell("b", 3e-5, 0, 0.25), cell("b", 3e-5, 1, 0.27)]
MIDDLE = [cell("a", 1e-4, 0, 0.30), cell("a", 1e-4, 1, 0.32), cell("b", 1e-4, 0, 0.28), cell("b", 1e-4, 1, 0.26)]
HIGH = [cell("a", 3e-4, 0, 0.50), cell("a", 3e-4, 1, 0.52), cell("b", 3e-4, 0, 0.48), cell("b", 3e-4, 1, 0.09)]
FAILED = [*HIGH[:3], cell("b", 3e-4, 1, None, state="failed") | {"collapse": True}]
KILLED = [*HIGH[:3], cell("b", 3e-4, 1, None, state="failed") | {"error": "OutOfMemoryError: 2 GB"}]
OPEN = [*HIGH[:3], cell("b", 3e-4, 1, None, state="stopped")]


def test_the_table_has_a_line_a_rate_with_accuracy_and_collapsed_seeds_of_each_arm():
    lines = shown(LOW + MIDDLE + HIGH).splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("| After training (collapsed) |"))
    assert lines[head] == "| After training (collapsed) | A | B | Mean over arms | Collapsed |"
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines[head + 2 : head + 5]]
    assert [row[0] for row in rows] == ["lr 3e-05", "lr 0.0001", "lr 0.0003"]
    # t of one degree of freedom at 95 %: 12.706; half a point of standard error times it.
    assert rows[0][1] == "25.0 % [12.3, 37.7] (0 of 2)"
    assert rows[2][2].endswith("(1 of 2)"), ".09 is less than half of .2"
    assert [row[3] for row in rows] == ["25.5 %", "29.0 %", "39.8 %"]
    assert [row[4] for row in rows] == ["0 of 4", "0 of 4", "1 of 4"]


@pytest.mark.parametrize(
    ("cells", "choice"),
    [
        (LOW + MIDDLE, "lr 0.0001, 29.0 % (best mean"),
        (LOW + MIDDLE + HIGH, "lr 0.0001, 29.0 % (best mean"),
        (LOW + MIDDLE + FAILED, "lr 0.0001, 29.0 % (best mean"),
        (LOW + MIDDLE + OPEN, "lr 0.0001, 29.0 % (best mean"),
        (LOW + MIDDLE + KILLED, "lr 0.0001, 29.0 % (best mean"),
        ([*LOW, cell("b", 0.0001, 0, 0.6)], "lr 3e-05, 25.5 % (best mean"),
        ([*HIGH, cell("a", 0.0001, 0, None, state="waiting")], "no value yet"),
    ],
)
def test_the_rule_takes_the_best_mean_among_rates_that_have_ended_without_a_collapse(cells, choice):
    assert f"* common to all arms: {choice}" in shown(cells)


def test_how_many_rates_could_be_chosen_is_said():
    assert "none has collapsed: 2 of 3 values)" in shown(LOW + MIDDLE + OPEN)


def test_without_an_axis_there_is_nothing_to_choose():
    assert "common to all arms" not in shown(LOW) and "After training (collapsed)" not in shown(LOW)
