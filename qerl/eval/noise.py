"""A noisy deployment over several keys, against the clean one on the same questions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from qerl.eval.compare import Comparison, compare_stored
from qerl.eval.evaluate import EvalResult
from qerl.eval.files import PROTOCOL, Measurement, StoredEvaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSpread:
    """A noisy deployment over its draws, against the clean one."""

    suite: str
    policy: str
    sigma: float
    keys: tuple[dict[str, Any], ...]
    """The noise of each draw: enough to make it again."""
    accuracies: tuple[float, ...]
    mean: float
    spread: float
    """Sample standard deviation over draws; 0 for one."""
    against_clean: Comparison
    """The mean over draws of each question against the clean answer."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the list of questions that changed sides is left to the comparison of the rows."""
        values = asdict(self)
        del values["against_clean"]["discordant"]
        return values

    def line(self) -> str:
        """For people."""
        low, high = min(self.accuracies), max(self.accuracies)
        several = (
            f" over {len(self.accuracies)} draws ({low:.1%} to {high:.1%}, standard deviation {100 * self.spread:.1f} points)"
            if len(self.accuracies) > 1
            else ""
        )
        difference = self.against_clean
        return (
            f"{self.suite}, {self.policy} with noise (sigma {self.sigma:.3g}): {self.mean:.1%}{several}; noisy - clean "
            f"{100 * difference.difference:+.1f} points [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]"
        )


def noise_spread(clean: Measurement, noisy: Sequence[tuple[Mapping[str, Any], Measurement]]) -> NoiseSpread:
    """A policy's noisy measurements over their draws, against its clean one on the same suite."""
    results = [measurement.result for _, measurement in noisy]
    accuracies = tuple(result.accuracy for result in results)
    mean_rows = [_mean_row(rows) for rows in zip(*(result.rows for result in results), strict=True)]
    against = compare_stored(
        stored(clean),
        StoredEvaluation(
            suite=clean.suite, policy=f"{clean.policy} with noise", protocol=_protocol(clean.result), rows=mean_rows
        ),
        confidence=clean.result.confidence,
        seed=clean.result.policy["seed"],
    )
    return NoiseSpread(
        suite=clean.suite,
        policy=clean.policy,
        sigma=float(noisy[0][0]["sigma"]),
        keys=tuple(dict(state) for state, _ in noisy),
        accuracies=accuracies,
        mean=fmean(accuracies),
        spread=stdev(accuracies) if len(accuracies) > 1 else 0.0,
        against_clean=against,
    )


def stored(measurement: Measurement) -> StoredEvaluation:
    """A measurement as one that was read back."""
    return StoredEvaluation(
        suite=measurement.suite,
        policy=measurement.policy,
        protocol=_protocol(measurement.result),
        rows=list(measurement.result.rows),
    )


def _protocol(result: EvalResult) -> dict[str, Any]:
    return {key: result.policy.get(key) for key in PROTOCOL}


def _mean_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One question over several draws: the mean accuracy of those that could be scored."""
    values = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    return {**rows[0], "accuracy": math.fsum(values) / len(values) if values else None}
