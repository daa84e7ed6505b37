"""Differences of arms in further evaluations, by hand."""

from __future__ import annotations

import pytest
from summary_builders import axis_cell

from qerl.experiments.compare import compare_cells
from qerl.experiments.folders import Collection
from qerl.experiments.table import markdown
from qerl.report.arms import render_arms

CLEAN, NOISY = {"noise": None}, {"noise": {"sigma": 0.05}}


def cell(arm, seed, after, avg4, noisy=None):
    final = {"avg4": {"accuracy": avg4, "policy": CLEAN}} if avg4 is not None else {}
    final |= {"noisy": {"accuracy": noisy, "policy": NOISY}} if noisy is not None else {}
    return axis_cell(arm, 1e-4, seed, after) | {"run": f"{arm}-s{seed}", "axes": {}, "final": final}


@pytest.fixture
def comparison():
    cells = [cell("a", 0, 0.30, 0.20), cell("a", 1, 0.31, 0.22), cell("a", 2, 0.30, 0.21)]
    cells += [cell("b", 0, 0.32, 0.23, 0.1), cell("b", 1, 0.31, 0.23, 0.1), cell("b", 2, 0.30, None, 0.1)]
    known = {"plan": {"protocol": "mechanism"}, "detectable": [{"first": "a", "second": "b", "difference": None}]}
    (found,) = compare_cells(Collection(cells=tuple(cells), plans={"grid": known}))
    return found


def test_differences_are_those_of_the_seeds_that_both_have(comparison):
    (row,) = comparison.pairs
    assert set(row.finals) == {"avg4"}, "under noise the arms are not two of one policy"
    assert row.finals["avg4"].values == pytest.approx((0.03, 0.01))
    # Standard error .01, t of one degree of freedom 12.706.
    assert row.finals["avg4"].low == pytest.approx(0.02 - 0.12706, abs=1e-4)
    assert len(row.over_seeds.values) == 3


def test_table_and_page_have_a_column_of_them(comparison):
    lines = [line for line in markdown([comparison]).splitlines() if line.startswith("|")]
    head = next(index for index, line in enumerate(lines) if line.startswith("| Difference"))
    columns = [part.strip() for part in lines[head].strip("|").split("|")]
    values = [part.strip() for part in lines[head + 2].strip("|").split("|")]
    assert dict(zip(columns, values, strict=True))["avg4, points"] == "+2.0 [−10.7, +14.7]"
    page = render_arms([comparison])
    assert "avg4, points" in page and "noisy, points" not in page
