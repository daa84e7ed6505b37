"""Two arms against each other: over the seeds both have, and over the questions both answered."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qerl.eval.intervals import mcnemar_exact, paired_difference
from qerl.experiments.notes import policy
from qerl.experiments.statistics import detectable_difference, difference_of_means, holm, pooled_variance, t_interval
from qerl.experiments.summary import asked, shares_of
from qerl.report.comparison import ArmRow, Difference, PairRow, PooledDifference, SeedTest, Spread

CONFIDENCE = 0.95

Cell = Mapping[str, Any]
"""A summary (``experiments.summary``)."""


def spread(values: Iterable[float | None], *, share: bool = False) -> Spread | None:
    """Values over seeds with their t-interval, missing ones left out; None when all are.

    Args:
        values: one a seed.
        share: they are shares: the part of the interval outside 0 to 1 is cut off, for nothing can lie there.
    """
    known = tuple(value for value in values if value is not None)
    if not known:
        return None
    found = t_interval(known, CONFIDENCE)
    low, high = found.low, found.high
    if share and low is not None and high is not None:
        low, high = max(low, 0.0), min(high, 1.0)
    return Spread(values=known, mean=found.mean, low=low, high=high)


def pair_rows(
    by_arm: Mapping[str, Sequence[Cell]], arms: Sequence[ArmRow], known: Mapping[str, Any], phase: str
) -> list[PairRow]:
    """The comparisons the matrix states; without one, every arm against the first. Arms that were not evaluated under one policy are not
    held against each other."""
    detectable = {(row["first"], row["second"]): row["difference"] for row in known.get("detectable", ())}
    names = {arm.key: str(by_arm[arm.key][0].get("arm") or arm.key) for arm in arms}
    if phase == "tune" or len(arms) < 2:
        return []
    if detectable:
        stated = [
            (a, b)
            for first, second in detectable
            for a in arms
            for b in arms
            if names[a.key] == first and names[b.key] == second and (a.axes == b.axes or phase == "final")
        ]
    else:
        stated = [(arms[0], arm) for arm in arms[1:]]
    stated = [(a, b) for a, b in stated if _under_one_policy([*by_arm[a.key], *by_arm[b.key]])]
    detect = (known.get("plan") or {}).get("detect")
    scatter, freedom = pooled_variance(
        [*(arm.after.values for arm in arms if arm.after is not None), *known.get("scatter", ())]
    )
    rows = [
        pair_row(
            by_arm[a.key],
            by_arm[b.key],
            a,
            b,
            detectable=detectable.get((names[a.key], names[b.key])),
            detectable_now=_detectable_now(a, b, detect),
            pooled=_pooled(a, b, scatter, freedom),
        )
        for a, b in stated
    ]
    corrected = iter(holm([row.pooled.p_value for row in rows if row.pooled is not None]))
    return [
        row if row.pooled is None else replace(row, pooled=replace(row.pooled, p_value=next(corrected))) for row in rows
    ]


def _under_one_policy(cells: Sequence[Cell]) -> bool:
    return len({policy([cell]) for cell in cells if cell["evaluations"] and cell.get("config")}) <= 1


def _pooled(a: ArmRow, b: ArmRow, scatter: float, freedom: int) -> PooledDifference | None:
    """With the p-value of this question alone."""
    if a.after is None or b.after is None:
        return None
    found = difference_of_means(a.after.values, b.after.values, scatter, freedom, CONFIDENCE)
    if found is None:
        return None
    return PooledDifference(
        mean=found.mean,
        low=found.low,
        high=found.high,
        sd=math.sqrt(scatter),
        freedom=freedom,
        p_value=found.p_value,
    )


def _detectable_now(a: ArmRow, b: ArmRow, detect: Mapping[str, Any] | None) -> float | None:
    """What the seeds with a result can show, under the scatter that was stated beforehand."""
    counts = [0 if arm.after is None else len(arm.after.values) for arm in (a, b)]
    if detect is None or min(counts) < 2:
        return None
    return detectable_difference(detect["sd"], *counts, alpha=detect["alpha"], power=detect["power"])


def pair_row(
    first: Sequence[Cell],
    second: Sequence[Cell],
    a: ArmRow,
    b: ArmRow,
    *,
    detectable: float | None,
    detectable_now: float | None,
    pooled: PooledDifference | None,
) -> PairRow:
    """Second minus first, over the seeds both have, and over the questions both answered."""
    ends = [{row.seed: row.after for row in arm.seeds if row.after is not None} for arm in (a, b)]
    shared = sorted(seed for seed in ends[0].keys() & ends[1].keys() if seed is not None)
    rows = [[_after(cells, seed) for seed in shared] for cells in (first, second)]
    same = bool(shared) and len({asked(part) if part else None for parts in rows for part in parts}) == 1
    difference = low = high = None
    tests: list[SeedTest] = []
    count = 0
    if same and rows[0][0] is not None:
        shares = [[shares_of(part) for part in parts if part is not None] for parts in rows]
        pairs = known_pairs(_mean_shares(shares[0]), _mean_shares(shares[1]))
        count = len(pairs)
        if pairs:
            difference, low, high = paired_difference([x for x, _ in pairs], [y for _, y in pairs], CONFIDENCE)
        tests = [_test(seed, x, y) for seed, x, y in zip(shared, shares[0], shares[1], strict=True)]
    return PairRow(
        first=a.label,
        second=b.label,
        axes=b.axes,
        over_seeds=spread((ends[1][seed] or 0.0) - (ends[0][seed] or 0.0) for seed in shared),
        pooled=pooled,
        finals=_final_differences(first, second),
        before=_before(first, second),
        question_difference=difference,
        question_low=low,
        question_high=high,
        questions=count,
        tests=tuple(tests),
        detectable=detectable,
        detectable_now=detectable_now,
    )


def _before(first: Sequence[Cell], second: Sequence[Cell]) -> Difference | None:
    """Before training: means of each question over the runs of an arm, most often one evaluation that all of them took over."""
    starts = [[part for cell in cells if (part := cell["questions"].get("before"))] for cells in (first, second)]
    if not all(starts) or len({asked(part) for parts in starts for part in parts}) != 1:
        return None
    means = [_mean_shares([shares_of(part) for part in parts]) for parts in starts]
    pairs = known_pairs(*means)
    if not pairs or means[0] == means[1]:
        return None
    mean, low, high = paired_difference([x for x, _ in pairs], [y for _, y in pairs], CONFIDENCE)
    return Difference(mean=mean, low=low, high=high)


def _final_differences(first: Sequence[Cell], second: Sequence[Cell]) -> dict[str, Spread]:
    """Second minus first in each further evaluation of the clean models, seed by seed."""
    runs = [{cell["seed"]: _clean_finals(cell) for cell in cells} for cells in (first, second)]
    shared = sorted(seed for seed in runs[0].keys() & runs[1].keys() if seed is not None)
    found = {}
    for name in dict.fromkeys(name for seed in shared for name in runs[0][seed]):
        part = spread(
            runs[1][seed][name] - runs[0][seed][name]
            for seed in shared
            if name in runs[0][seed] and name in runs[1][seed]
        )
        if part is not None:
            found[name] = part
    return found


def _clean_finals(cell: Cell) -> dict[str, float]:
    return {
        name: float(value["accuracy"])
        for name, value in cell["final"].items()
        if (value.get("policy") or {}).get("noise") is None and value.get("accuracy") is not None
    }


def _after(cells: Sequence[Cell], seed: int) -> Mapping[str, Any] | None:
    found = next(cell for cell in cells if cell.get("seed") == seed)["questions"].get("after")
    return None if found is None else dict(found)


def _test(seed: int, first: Sequence[float | None], second: Sequence[float | None]) -> SeedTest:
    pairs = known_pairs(first, second)
    gained = sum(x < 0.5 <= y for x, y in pairs)
    lost = sum(y < 0.5 <= x for x, y in pairs)
    return SeedTest(seed=seed, gained=gained, lost=lost, p_value=mcnemar_exact(lost, gained))


def known_pairs(first: Sequence[float | None], second: Sequence[float | None]) -> list[tuple[float, float]]:
    """Shares of the questions that both could score."""
    return [(x, y) for x, y in zip(first, second, strict=True) if x is not None and y is not None]


def _mean_shares(by_seed: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Mean over seeds of each question's share; None where a seed's answers could not be scored."""
    columns = [[value for value in values if value is not None] for values in zip(*by_seed, strict=True)]
    return [math.fsum(part) / len(part) if len(part) == len(by_seed) else None for part in columns]
