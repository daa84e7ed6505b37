"""Seeded arithmetic word problems with worked steps: the task of the demo and of fast tests.

Every problem tells a short story with two calculations (now and then three), has one integer answer between
1 and 199, and comes with the steps that lead to it:

    Tom has 23 apples. He buys 4 bags of 6 apples. How many apples does he have now?
    First 4*6=24. Then 23+24=47. The answer is 47.

**The held-out split is held out whatever the seed.** A problem belongs to ``test`` or ``train`` by the SHA-256 of its
calculation (the steps, without names and things), so a calculation that occurs in one split never occurs in the other,
neither with other names nor inside another story.

Pure Python and standard library only; no global random state is read or changed.
"""

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "test"]

MAX_VALUE = 199
"""No number in a problem, intermediate results included, is larger; none is smaller than 1."""

TEST_BUCKETS = 10
"""Percentage of all calculations that belong to the test split."""

_MAX_DRAWS_PER_PROBLEM = 50
_MAX_NUMBER_DRAWS = 1000
_THREE_STEP_SHARE = 0.3

_NAMES = (("Tom", "he"), ("Ben", "he"), ("Leo", "he"), ("Ann", "she"), ("Mia", "she"), ("Zoe", "she"))
_THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps")
_CONTAINERS = ("bags", "boxes", "packs")

_RANGES = {"large": (10, 99), "medium": (5, 40), "teens": (2, 20), "small": (2, 9)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One word problem.

    Attributes:
        id: ``<split>-<first 16 hex digits of the SHA-256 of the question>``: the same question has the same id under
            every seed.
        question: the text put to the model.
        answer: the integer answer, in decimal digits.
        solution: worked steps as the model should write them, ending in ``The answer is <answer>.``
    """

    id: str
    question: str
    answer: str
    solution: str

    @property
    def direct_solution(self) -> str:
        """The final sentence alone, without the steps."""
        return final_sentence(self.answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Template:
    """A story with named numbers and the calculation it asks for.

    ``numbers`` maps each number's name to a key of ``_RANGES``. A step is (left, operator, right), where an operand is
    a number's name or ``r1``, ``r2``: the result of the first or second step.
    """

    text: str
    numbers: Mapping[str, str]
    steps: tuple[tuple[str, str, str], ...]


_TWO_STEP = (
    _Template(
        text="{name} puts {a} large and {b} small {things} in each of {c} {boxes}. How many {things} are there in all?",
        numbers={"a": "medium", "b": "medium", "c": "small"},
        steps=(("a", "+", "b"), ("r1", "*", "c")),
    ),
    _Template(
        text="{name} has {a} {things}. {He} loses {b} and sells the rest for {c} dollars each. "
        "How many dollars does {he} get?",
        numbers={"a": "large", "b": "large", "c": "small"},
        steps=(("a", "-", "b"), ("r1", "*", "c")),
    ),
    _Template(
        text="{name} has {a} {boxes} of {b} {things}. {He} gives {c} {boxes} to {friend}. "
        "How many {things} does {he} have left?",
        numbers={"a": "medium", "b": "small", "c": "medium"},
        steps=(("a", "-", "c"), ("r1", "*", "b")),
    ),
    _Template(
        text="{name} has {a} {boxes} of {b} {things}. {He} gives {c} {things} to {friend}. "
        "How many {things} does {he} have left?",
        numbers={"a": "teens", "b": "small", "c": "large"},
        steps=(("a", "*", "b"), ("r1", "-", "c")),
    ),
    _Template(
        text="{name} has {a} {things}. {He} fills {b} {boxes} with {c} {things} each. How many {things} are left?",
        numbers={"a": "large", "b": "small", "c": "teens"},
        steps=(("b", "*", "c"), ("a", "-", "r1")),
    ),
    _Template(
        text="{name} has {a} {things}. {He} buys {b} more and gives {c} to {friend}. "
        "How many {things} does {he} have left?",
        numbers={"a": "large", "b": "large", "c": "large"},
        steps=(("a", "+", "b"), ("r1", "-", "c")),
    ),
    _Template(
        text="{name} needs {a} {things}. {He} has {b} and finds {c} more. How many more {things} does {he} need?",
        numbers={"a": "large", "b": "medium", "c": "medium"},
        steps=(("b", "+", "c"), ("a", "-", "r1")),
    ),
)

_THREE_STEP = (
    _Template(
        text="{name} has {a} {things}. {He} buys {b} {boxes} of {c} {things} and gives {d} to {friend}. "
        "How many {things} does {he} have left?",
        numbers={"a": "large", "b": "small", "c": "small", "d": "large"},
        steps=(("b", "*", "c"), ("a", "+", "r1"), ("r2", "-", "d")),
    ),
    _Template(
        text="{name} puts {a} large and {b} small {things} in each of {c} {boxes} and gives {d} {things} to {friend}. "
        "How many {things} are left?",
        numbers={"a": "teens", "b": "teens", "c": "small", "d": "large"},
        steps=(("a", "+", "b"), ("r1", "*", "c"), ("r2", "-", "d")),
    ),
    _Template(
        text="{name} has {a} {boxes} of {b} {things}. {He} gives {c} {boxes} to {friend} and finds {d} {things}. "
        "How many {things} does {he} have now?",
        numbers={"a": "medium", "b": "small", "c": "medium", "d": "large"},
        steps=(("a", "-", "c"), ("r1", "*", "b"), ("r2", "+", "d")),
    ),
)


def arithmetic_problems(split: Split, count: int, seed: int = 0) -> list[Problem]:
    """Draw ``count`` different problems of one split, the same list for the same arguments.

    Args:
        split: ``train`` or ``test``; no calculation occurs in both, whatever the seeds (see the module's docstring).
        count: how many problems; no question is repeated within the list.
        seed: chooses the list. A longer list of the same seed begins with the shorter one.

    Raises:
        ValueError: for an unknown split, a negative count, or a count that the split cannot supply.
    """
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}: expected 'train' or 'test'")
    if count < 0:
        raise ValueError(f"count is {count}: expected 0 or more")
    rng = random.Random(f"qerl.data.synthetic/arithmetic/{split}/{seed}")
    problems: dict[str, Problem] = {}
    for _ in range(_MAX_DRAWS_PER_PROBLEM * count):
        if len(problems) == count:
            break
        problem = _draw(rng, split)
        problems.setdefault(problem.question, problem)
    if len(problems) < count:
        raise ValueError(f"only {len(problems)} different {split} problems found: ask for fewer than {count}")
    return list(problems.values())


def final_sentence(answer: str) -> str:
    """The sentence that ends every solution; an answer parser needs only the number in it."""
    return f"The answer is {answer}."


def _draw(rng: random.Random, split: Split) -> Problem:
    """Draw one problem: a story, then numbers that fit it and whose calculation belongs to ``split``."""
    template = rng.choice(_THREE_STEP if rng.random() < _THREE_STEP_SHARE else _TWO_STEP)
    numbers, lines, answer = _draw_numbers(rng, template, split)
    (name, he), (friend, _) = rng.sample(_NAMES, 2)
    words = {"name": name, "friend": friend, "he": he, "He": he.capitalize()}
    words |= {"things": rng.choice(_THINGS), "boxes": rng.choice(_CONTAINERS)}
    question = template.text.format(**words, **numbers)
    steps = [f"{'First' if i == 0 else 'Then'} {line}." for i, line in enumerate(lines)]
    return Problem(
        id=f"{split}-{hashlib.sha256(question.encode()).hexdigest()[:16]}",
        question=question,
        answer=str(answer),
        solution=" ".join([*steps, final_sentence(str(answer))]),
    )


def _draw_numbers(rng: random.Random, template: _Template, split: Split) -> tuple[dict[str, int], list[str], int]:
    """Numbers for ``template``, the calculation's lines and its result."""
    for _ in range(_MAX_NUMBER_DRAWS):
        numbers = {key: rng.randint(*_RANGES[kind]) for key, kind in template.numbers.items()}
        calculation = _calculate(template, numbers)
        if calculation is not None and _split_of(calculation[0]) == split:
            return numbers, *calculation
    raise ValueError(f"no {split} numbers found in {_MAX_NUMBER_DRAWS} draws for {template.text!r}")


def _calculate(template: _Template, numbers: Mapping[str, int]) -> tuple[list[str], int] | None:
    """The steps written out (``4*6=24``) and the last result; None where a result leaves 1 .. MAX_VALUE."""
    values = dict(numbers)
    lines: list[str] = []
    result = 0
    for index, (left, operator, right) in enumerate(template.steps, start=1):
        x, y = values[left], values[right]
        result = {"+": x + y, "-": x - y, "*": x * y}[operator]
        if not 1 <= result <= MAX_VALUE:
            return None
        values[f"r{index}"] = result
        lines.append(f"{x}{operator}{y}={result}")
    return lines, result


def _split_of(lines: list[str]) -> Split:
    """The split that a calculation belongs to, by a hash that no seed, version or platform changes."""
    digest = hashlib.sha256("; ".join(lines).encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") % 100 < TEST_BUCKETS else "train"
