"""Evaluation: a declared deployment policy, its accuracy with an interval, and what became of every answer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qerl.config.schema import EvalConfig
from qerl.errors import DataError
from qerl.eval.intervals import bootstrap, mcnemar_exact, paired_difference, wilson
from qerl.model.aqn import Noise
from qerl.records import Completion, Outcome, Prompt, SamplingSpec, Score
from qerl.reward.compose import Rewarder
from qerl.reward.math_answer import answer_key
from qerl.rollout.engine import Engine

EVAL_STREAM = "eval_sample"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """What an evaluation measured. Rates are fractions.

    Answers that could not be scored leave ``accuracy``, ``pass_at_k``, ``maj_at_k`` and the interval; they are counted
    in ``unscorable``.
    """

    accuracy: float
    """Share of right answers; with several samples the mean over questions of each question's share (avg@k)."""
    low: float
    high: float
    confidence: float
    interval: str
    """``wilson`` for one sample a question, ``bootstrap`` over questions for more."""
    count: int
    """Questions."""
    answers: int
    """Questions times samples."""
    truncated: float
    """Answers that reached the length limit, right ones included."""
    unparsable: float
    """Answers that ended by themselves and in which no answer was found."""
    unscorable: float
    """Answers whose scoring failed."""
    mean_length: float
    """Tokens an answer."""
    pass_at_k: dict[int, float]
    """k -> chance that at least one of k samples is right (unbiased; Chen et al., arXiv 2107.03374)."""
    maj_at_k: float
    """Share of questions whose most frequent answer among all samples is right; the first given wins a tie."""
    pass_at_k_interval: dict[int, tuple[float, float]]
    """k -> interval over questions: a bootstrap of each question's chance; of k = 1 that of the accuracy."""
    maj_at_k_interval: tuple[float, float]
    """Wilson, over questions."""
    by_outcome: dict[str, int]
    """Answers by outcome."""
    policy: dict[str, Any]
    """The deployment policy that was measured."""
    rows: tuple[dict[str, Any], ...]
    """One a question: id, question, answer, accuracy (None when unscorable), and a list ``answers`` of
    {text, parsed, outcome, tokens, stop_reason, note}."""

    def to_dict(self) -> dict[str, Any]:
        """Everything but the rows, for JSON."""
        return {
            "accuracy": self.accuracy,
            "low": self.low,
            "high": self.high,
            "confidence": self.confidence,
            "interval": self.interval,
            "count": self.count,
            "answers": self.answers,
            "truncated": self.truncated,
            "unparsable": self.unparsable,
            "unscorable": self.unscorable,
            "mean_length": self.mean_length,
            "avg_at_k": self.accuracy,
            "pass_at_k": {str(k): value for k, value in self.pass_at_k.items()},
            "maj_at_k": self.maj_at_k,
            "pass_at_k_interval": {str(k): list(ends) for k, ends in self.pass_at_k_interval.items()},
            "maj_at_k_interval": list(self.maj_at_k_interval),
            "by_outcome": dict(self.by_outcome),
            "policy": dict(self.policy),
        }

    def metrics(self) -> dict[str, float]:
        """The ``eval/`` metrics."""
        return {
            "eval/accuracy": self.accuracy,
            "eval/accuracy_low": self.low,
            "eval/accuracy_high": self.high,
            "eval/truncated": self.truncated,
            "eval/unparsable": self.unparsable,
            "eval/unscorable": self.unscorable,
            "eval/mean_length": self.mean_length,
            "eval/count": self.count,
        }

    def protocol_line(self) -> str:
        """The declared policy in one line, without what was measured."""
        policy = self.policy
        how = "greedy" if policy["temperature"] == 0 else f"T={policy['temperature']:g}, top-p {policy['top_p']:g}"
        each = "one answer" if policy["samples"] == 1 else f"{policy['samples']} answers"
        noise = "off" if policy["noise"] is None else "on"
        return (
            f"{how}, {each} a question, at most {policy['max_new_tokens']} tokens, seed {policy['seed']}, noise {noise}"
        )

    def headline(self) -> str:
        """One line: accuracy with its interval, and what hides behind it."""
        samples = self.policy["samples"]
        how = "greedy" if self.policy["temperature"] == 0 else f"T={self.policy['temperature']:g}, {samples} a question"
        text = (
            f"accuracy {self.accuracy:.1%} ({self.confidence:.0%} interval {self.low:.1%} to {self.high:.1%}; "
            f"{self.count} questions, {how})"
        )
        rates = {"truncated": self.truncated, "unparsable": self.unparsable, "unscorable": self.unscorable}
        return ", ".join([text, *(f"{value:.1%} {name}" for name, value in rates.items() if value > 0)])


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    rewarder: Rewarder,
    *,
    eval_cfg: EvalConfig,
    seed: int,
    max_new_tokens: int,
    noise: Noise | None = None,
    adapters: bool = True,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> EvalResult:
    """Answer every question under the declared policy, and score the answers.

    Every evaluation uses the same random numbers (stream ``eval_sample``, rollout 0), so that two of them differ by the
    model alone.

    Args:
        engine: generates.
        prompts: one a question, at least one.
        rewarder: decides outcomes; the reward itself plays no part.
        eval_cfg: temperature, top-p, samples and confidence.
        seed: root seed.
        max_new_tokens: longest answer, unless ``eval_cfg`` sets its own.
        noise: noise of the norms, or None for the clean policy.
        adapters: whether the LoRA adapters take part.
        on_progress: passed to the engine.

    Raises:
        DataError: there are no prompts.
    """
    if not prompts:
        raise DataError("there is nothing to evaluate", got="no prompts", expected="at least one question")
    limit = eval_cfg.max_new_tokens or max_new_tokens
    sampling = SamplingSpec(
        temperature=eval_cfg.temperature,
        top_p=eval_cfg.top_p,
        max_new_tokens=limit,
        seed=seed,
        stream=EVAL_STREAM,
    )
    completions, _ = engine.generate(
        prompts, sampling, group_size=eval_cfg.samples, noise=noise, adapters=adapters, on_progress=on_progress
    )
    policy = {
        "temperature": eval_cfg.temperature,
        "top_p": eval_cfg.top_p,
        "samples": eval_cfg.samples,
        "max_new_tokens": limit,
        "seed": seed,
        "stream": EVAL_STREAM,
        "adapters": adapters,
        "noise": None if noise is None else noise.state.to_dict(),
    }
    return summarize(completions, rewarder.score(completions), eval_cfg=eval_cfg, policy=policy)


def summarize(
    completions: Sequence[Completion], scores: Sequence[Score], *, eval_cfg: EvalConfig, policy: dict[str, Any]
) -> EvalResult:
    """Rates, intervals and rows of scored answers; prompt-major, ``eval_cfg.samples`` a question."""
    samples = eval_cfg.samples
    groups = [slice(start, start + samples) for start in range(0, len(completions), samples)]
    rows = tuple(_row(completions[group], scores[group]) for group in groups)
    scored = [kept for group in groups if (kept := _scored(scores[group]))]
    shares = [sum(_correct(score) for score in group) / len(group) for group in scored]
    accuracy = math.fsum(shares) / len(shares) if shares else 0.0
    confidence, seed = eval_cfg.confidence, policy["seed"]
    interval, low, high = _interval(shares, samples, confidence, seed)
    chances = {k: _pass_chances(scored, k) for k in _powers_of_two(samples)}
    majority = sum(map(_majority_is_right, scored))
    total = len(completions)
    outcomes = Counter(score.outcome.value for score in scores)
    return EvalResult(
        accuracy=accuracy,
        low=low,
        high=high,
        confidence=confidence,
        interval=interval,
        count=len(groups),
        answers=total,
        truncated=sum(completion.stop_reason == "length" for completion in completions) / total,
        unparsable=outcomes[Outcome.UNPARSABLE.value] / total,
        unscorable=outcomes[Outcome.UNSCORABLE.value] / total,
        mean_length=sum(len(completion.token_ids) for completion in completions) / total,
        pass_at_k={k: math.fsum(values) / len(values) if values else 0.0 for k, values in chances.items()},
        pass_at_k_interval={
            k: (low, high) if k == 1 else _interval(values, samples, confidence, seed)[1:]
            for k, values in chances.items()
        },
        maj_at_k=majority / len(scored) if scored else 0.0,
        maj_at_k_interval=wilson(majority, len(scored), confidence),
        by_outcome={outcome.value: outcomes[outcome.value] for outcome in Outcome},
        policy=policy,
        rows=rows,
    )


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k samples is right: 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def compare(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]], *, confidence: float = 0.95, seed: int = 0
) -> dict[str, float | int]:
    """Paired comparison of the rows of two evaluations of the same questions, over those that both could score.

    Returns:
        ``difference`` of accuracies (second - first) with its bootstrap interval ``low`` and ``high`` at
        ``confidence``, ``gained`` and ``lost`` questions (right in only one of the two, by a share of at least one half)
        and the exact McNemar ``p_value`` of these, and ``count`` of the questions compared.

    Raises:
        DataError: the questions are not the same.
    """
    if [row["id"] for row in first] != [row["id"] for row in second]:
        raise DataError("two evaluations can be compared only on the same questions in the same order")
    pairs = [(a["accuracy"], b["accuracy"]) for a, b in zip(first, second, strict=True)]
    pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not pairs:
        raise DataError("there is no question that both evaluations could score")
    before, after = zip(*pairs, strict=True)
    difference, low, high = paired_difference(before, after, confidence, seed=seed)
    gained = sum(a < 0.5 <= b for a, b in pairs)
    lost = sum(b < 0.5 <= a for a, b in pairs)
    return {
        "difference": difference,
        "low": low,
        "high": high,
        "confidence": confidence,
        "gained": gained,
        "lost": lost,
        "p_value": mcnemar_exact(lost, gained),
        "count": len(pairs),
    }


def _interval(shares: Sequence[float], samples: int, confidence: float, seed: int) -> tuple[str, float, float]:
    """Name and ends of the interval of the mean share; see ``EvalResult.interval``."""
    if samples == 1 or not shares:
        return "wilson", *wilson(sum(shares), len(shares), confidence)
    return "bootstrap", *bootstrap(shares, confidence, anchors=(0.0, 1.0), seed=seed)


def _correct(score: Score) -> bool:
    return score.outcome is Outcome.CORRECT


def _scored(scores: Sequence[Score]) -> list[Score]:
    return [score for score in scores if score.outcome is not Outcome.UNSCORABLE]


def _row(completions: Sequence[Completion], scores: Sequence[Score]) -> dict[str, Any]:
    prompt, scored = completions[0].prompt, _scored(scores)
    return {
        "id": prompt.id,
        "question": prompt.question,
        "answer": prompt.answer,
        "accuracy": sum(map(_correct, scored)) / len(scored) if scored else None,
        "answers": [
            {
                "text": completion.text,
                "parsed": score.parsed,
                "outcome": score.outcome.value,
                "tokens": len(completion.token_ids),
                "stop_reason": completion.stop_reason,
                "note": score.note,
            }
            for completion, score in zip(completions, scores, strict=True)
        ],
    }


def _pass_chances(groups: Sequence[Sequence[Score]], k: int) -> list[float]:
    """pass@k of each question with at least k scored samples."""
    return [pass_at_k(len(group), sum(map(_correct, group)), k) for group in groups if len(group) >= k]


def _majority_is_right(scores: Sequence[Score]) -> bool:
    """Whether the most frequent answer is right; samples without an answer have no vote."""
    votes: Counter[Any] = Counter()
    right: dict[Any, bool] = {}
    for score in scores:
        if score.parsed is not None:
            key = answer_key(score.parsed)
            votes[key] += 1
            right.setdefault(key, _correct(score))
    # most_common keeps the order of first appearance among equals.
    return bool(votes) and right[votes.most_common(1)[0][0]]


def _powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to ``limit``, and ``limit`` itself."""
    powers = [1 << i for i in range(limit.bit_length())]
    return [k for k in powers if k < limit] + [limit]
