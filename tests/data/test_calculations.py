"""The calculations are right, all there, and in one split each."""

from __future__ import annotations

import operator

from qerl.data.calculations import calculations
from qerl.data.tasks import load_rows

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def test_every_calculation_is_in_one_split_with_its_result():
    splits = {split: calculations(split) for split in ("train", "test")}
    texts = [row["question"] for rows in splits.values() for row in rows]
    # 20 * 20 sums, 20 * 21 / 2 differences that are not negative, 12 * 12 products.
    assert len(texts) == len(set(texts)) == 400 + 210 + 144
    for row in (row for rows in splits.values() for row in rows):
        x, sign, y = row["question"].removeprefix("What is ").removesuffix("?").split()
        assert OPERATORS[sign](int(x), int(y)) == int(row["answer"]) >= 0
    assert 0.25 < len(splits["test"]) / len(texts) < 0.35
    assert len({row["id"] for rows in splits.values() for row in rows}) == len(texts)


def test_kinds_are_mixed_in_the_order_and_the_data_set_is_known_by_name():
    rows = load_rows("calculations", default_split="test").rows
    assert [row["question"] for row in rows] == [row["question"] for row in calculations("test")]
    signs = [row["question"].split()[3] for row in rows[:60]]
    assert min(signs.count("+"), signs.count("-")) > 10 and "*" in signs
