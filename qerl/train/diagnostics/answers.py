"""What the answers of a step look like: distinct answers, distinct ways to a right one, reward against length.

Legend: a group is the set of answers to one prompt.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction

from qerl.records import Group, Outcome
from qerl.reward.math_answer import answer_key
from qerl.reward.plain_number import MAX_DIGITS

# Quantifiers with a second + never give back what they took, so degenerate texts cost linear time.
_NUMBER = r"(?:\d{1,3}(?:,\d{3})++|\d++)(?:\.\d++)?+"
_OPERATOR = r"[-+*/=]"
_EQUATION = re.compile(rf"(?<![\d.])\(?-?{_NUMBER}%?\)?(?:\s*{_OPERATOR}\s*\(*-?{_NUMBER}%?\)*)+")
_TOKEN = re.compile(rf"{_NUMBER}|[-+*/=()%]")
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "$": None, "€": None, "£": None, "<": " ", ">": " "})
_LATEX = (
    ("\\times", "*"),
    ("\\cdot", "*"),
    ("\\div", "/"),
    ("\\(", " "),
    ("\\)", " "),
    ("\\[", " "),
    ("\\]", " "),
)
_FRAC = re.compile(rf"\\frac\s*\{{\s*({_NUMBER})\s*\}}\s*\{{\s*({_NUMBER})\s*\}}")
_BETWEEN = re.compile(rf"(?<=\d)\s+x\s+(?=[$]?{_NUMBER})")


def solution_path(text: str) -> tuple[str, ...]:
    """The steps of a solution, without its words: what two answers share when they reach a result in the same way.

    A step is an equation or arithmetic expression (``4 × 6 = 24``, ``<<4*6=24>>``, ``\\(4 \\times 6 = 24\\)`` are one);
    spaces, currency signs, thousands separators, trailing zeros and the order of a sum's or a product's operands do not
    matter; a step repeated at once counts once. A text without one gives its numbers in order.
    """
    plain = _plain_arithmetic(text)
    steps = [_step(match[0]) for match in _EQUATION.finditer(plain)]
    if not steps:
        steps = [_number(match[0]) for match in re.finditer(_NUMBER, plain)]
    return tuple(step for index, step in enumerate(steps) if index == 0 or step != steps[index - 1])


def answer_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics ``answers/...``, ``paths/...`` and ``reward_length/...`` of one step; a mean over nothing is left out."""
    result: dict[str, float] = {}
    parsed = [[score.parsed for score in group.scores if score.parsed is not None] for group in groups]
    if any(parsed):
        result["answers/distinct"] = _mean([len({answer_key(answer) for answer in found}) for found in parsed if found])
    right = [
        [
            completion.text
            for completion, score in zip(group.completions, group.scores, strict=True)
            if score.outcome is Outcome.CORRECT
        ]
        for group in groups
    ]
    right = [texts for texts in right if texts]
    if right:
        distinct = [len({solution_path(text) for text in texts}) for texts in right]
        result["paths/distinct_correct"] = _mean(distinct)
        result["paths/distinct_correct_share"] = sum(distinct) / sum(map(len, right))
    return result | _length_metrics(groups)


def _length_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Correlations of reward with length, and lengths of right and of wrong answers."""
    result: dict[str, float] = {}
    pairs_by_group = [
        [
            (score.reward, float(len(completion.token_ids)))
            for completion, score in zip(group.completions, group.scores, strict=True)
            if score.reward is not None
        ]
        for group in groups
    ]
    overall = correlation([pair for pairs in pairs_by_group for pair in pairs])
    centered = correlation([pair for pairs in pairs_by_group for pair in _centered(pairs)])
    if overall is not None:
        result["reward_length/correlation"] = overall
    if centered is not None:
        result["reward_length/within_group"] = centered
    for name, wanted in (("correct", True), ("incorrect", False)):
        lengths = [
            len(completion.token_ids)
            for group in groups
            for completion, score in zip(group.completions, group.scores, strict=True)
            if score.outcome is not Outcome.UNSCORABLE and (score.outcome is Outcome.CORRECT) == wanted
        ]
        if lengths:
            result[f"completions/mean_length_{name}"] = _mean(lengths)
    return result


def correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Pearson's r; None with fewer than two pairs or when one side does not vary."""
    if len(pairs) < 2:
        return None
    first, second = zip(*_centered(pairs), strict=True)
    squares = math.fsum(x * x for x in first), math.fsum(y * y for y in second)
    if min(squares) <= 1e-12:
        return None
    return math.fsum(x * y for x, y in zip(first, second, strict=True)) / math.sqrt(squares[0] * squares[1])


def _centered(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Pairs less their means."""
    if not pairs:
        return []
    first, second = _mean([x for x, _ in pairs]), _mean([y for _, y in pairs])
    return [(x - first, y - second) for x, y in pairs]


def _plain_arithmetic(text: str) -> str:
    for latex, sign in _LATEX:
        text = text.replace(latex, sign)
    text = text.replace("\\$", "").replace("\\%", "%").replace("{,}", ",")
    text = _FRAC.sub(r"\1/\2", text).translate(_SIGNS)
    return _BETWEEN.sub(" * ", text)


def _step(expression: str) -> str:
    """One step in canonical form: numbers as exact fractions, operands of a pure sum or product sorted."""
    sides = []
    for side in expression.split("="):
        tokens = [_number(t) if t[0].isdigit() else t for t in _TOKEN.findall(side)]
        operators = {t for t in tokens if t in "+-*/()%"}
        if operators in ({"+"}, {"*"}):
            sign = operators.pop()
            tokens = list(sign.join(sorted(t for t in tokens if t != sign)))
        sides.append("".join(tokens))
    return "=".join(sides)


def _number(text: str) -> str:
    if len(text) > MAX_DIGITS:
        return text
    return str(Fraction(text.replace(",", "")))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
