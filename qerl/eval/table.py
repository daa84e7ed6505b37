"""Measurements as a table for people: one line a suite and policy, each with its interval, and no mean over suites."""

from __future__ import annotations

from collections.abc import Sequence

from qerl.eval.files import Measurement


def table_lines(measurements: Sequence[Measurement]) -> list[str]:
    """Aligned lines, the headings first. pass@k and maj@k only where there are several samples."""
    rows = [_headings(measurements), *(_cells(measurement) for measurement in measurements)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    numbers = range(3, len(rows[0]))
    return [
        "  ".join(
            cell.rjust(widths[i]) if i in numbers else cell.ljust(widths[i]) for i, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]


def _headings(measurements: Sequence[Measurement]) -> list[str]:
    first = measurements[0].result
    samples, confidence = first.policy["samples"], f"{first.confidence:.0%}"
    several = [f"pass@{samples} [interval]", f"maj@{samples} [interval]"] if samples > 1 else []
    accuracy = "accuracy" if samples == 1 else f"avg@{samples}"
    return [
        "suite",
        "policy",
        f"{accuracy} [{confidence} interval]",
        *several,
        "truncated",
        "unparsable",
        "unscorable",
        "length",
        "questions",
    ]


def _cells(measurement: Measurement) -> list[str]:
    result = measurement.result
    samples = result.policy["samples"]
    several = []
    if samples > 1:
        several = [
            _with_interval(result.pass_at_k[samples], *result.pass_at_k_interval[samples]),
            _with_interval(result.maj_at_k, *result.maj_at_k_interval),
        ]
    return [
        measurement.suite,
        measurement.policy,
        _with_interval(result.accuracy, result.low, result.high),
        *several,
        _percent(result.truncated),
        _percent(result.unparsable),
        _percent(result.unscorable),
        f"{result.mean_length:.0f}",
        str(result.count),
    ]


def _with_interval(value: float, low: float, high: float) -> str:
    return f"{_percent(value):>6} [{_percent(low)}, {_percent(high)}]"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"
