"""Is an answer right? Exact for plain numbers and words, here; by math-verify, elsewhere, for everything else.

``quick_equal`` decides what can be decided without computer algebra: plain numbers compare exactly, words and options
by their letters. The rest is for ``qerl.reward.symbolic``, which runs in a process of its own (``qerl.reward.workers``)
because symbolic comparison can hang.
"""

from __future__ import annotations

import re
from collections.abc import Hashable

from qerl.reward.extract import boxed, find_answer, right_side
from qerl.reward.plain_number import PlainNumber, normalize, parse_plain, single_number

__all__ = ["answer_key", "find_answer", "is_symbolic", "quick_equal", "reference_value"]

_FUNCTION_WORDS = frozenset(
    ("sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "infty", "infinity", "arcsin", "arccos", "arctan")
)
_WORD = re.compile(r"[A-Za-z]{3,}")
_CLOCK_OR_RATIO = re.compile(r"\d\s*:\s*\d")
_OPTION = re.compile(r"\(?([A-Ja-j])\)?")
_OPTION_START = re.compile(r"\(?([A-J])(?:\)|[.:]|$)")
_BASED = re.compile(r"([0-9A-Za-z]+)_\{?\(?(\d+)\)?\}?")
_HEDGE = re.compile(r"^(?:approximately|approx\.?|about|roughly|exactly|around|\\approx|\\sim|≈|~)\s*", re.IGNORECASE)


def reference_value(answer: str) -> str:
    """The final answer inside a reference: after ``####`` (GSM8K), inside ``\\boxed{}`` (MATH), else all of it."""
    if "####" in answer:
        return answer.rpartition("####")[2].strip()
    box = boxed(answer)
    return box[1] if box is not None else answer.strip().rstrip(".")


def quick_equal(reference: str, found: str) -> bool | None:
    """Whether ``found`` equals ``reference``, or None when only a symbolic comparison can tell.

    Args:
        reference: what ``reference_value`` returned.
        found: what ``find_answer`` returned.
    """
    number = parse_plain(reference)
    if number is not None:
        return _equals_number(number, found)
    if _canonical(reference) == _canonical(found):
        return True
    based = [_BASED.fullmatch(_canonical(value)) for value in (reference, found)]
    if based[0] and based[1]:
        return based[0].groups() == based[1].groups()
    option = _OPTION.fullmatch(normalize(reference))
    if option and option[1].isupper():
        given = _OPTION_START.match(normalize(found)) or _OPTION.fullmatch(normalize(found))
        return given is not None and given[1].upper() == option[1]
    if _is_text(reference):
        return _letters(reference) == _letters(found)
    return None


def is_symbolic(reference: str) -> bool:
    """Whether the reference is neither a plain number nor words, so that math-verify must be able to read it."""
    return parse_plain(reference) is None and not _is_text(reference) and not _OPTION.fullmatch(normalize(reference))


def answer_key(found: str) -> Hashable:
    """A key that is equal for answers that are plainly the same: the votes of maj@k."""
    number = parse_plain(found) or parse_plain(right_side(found)) or single_number(found)
    if number is not None:
        return number.value * number.scale
    return _letters(found) if _is_text(found) else _canonical(found)


def _equals_number(number: PlainNumber, found: str) -> bool | None:
    given = parse_plain(found)
    if given is None:
        bare = _HEDGE.sub("", right_side(normalize(found)))
        given = parse_plain(bare) or single_number(bare)
    if given is not None:
        return number.equals(given)
    # Without a digit or a LaTeX command there is nothing that could evaluate to a number.
    return None if re.search(r"\d|\\", found) else False


def _is_text(value: str) -> bool:
    """Words, clock times and ratios: compared as written, since algebra would read them as products or numbers."""
    text = normalize(value)
    if "\\" in text:
        return False
    words = [word.lower() for word in _WORD.findall(text)]
    return bool(_CLOCK_OR_RATIO.search(text)) or (bool(words) and not _FUNCTION_WORDS.intersection(words))


def _letters(value: str) -> str:
    text = re.sub(r"^(?:the|an?)\s+", "", normalize(value).casefold())
    return re.sub(r"[^\w:/+-]+", "", text)


def _canonical(value: str) -> str:
    return re.sub(r"\s+", "", normalize(value))
