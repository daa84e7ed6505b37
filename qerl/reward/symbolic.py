"""Symbolic comparison by math-verify. Imported by worker processes only: it can hang, and it loads a computer algebra
system.

math-verify's own time limits use SIGALRM, which fails off the main thread; they are switched off, and the process that
runs this module is given a limit from outside (``qerl.reward.workers``).
"""

from __future__ import annotations

import logging
import re
from typing import Any, Literal

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from qerl.reward.plain_number import parse_plain
from qerl.reward.unicode_math import ascii_math

Verdict = Literal["equal", "different", "reference unreadable"]

_LESS = r"(<|\\leq?(?![a-z])|\\leqslant)"
_BETWEEN = re.compile(rf"(.+?)\s*{_LESS}\s*[A-Za-z]\s*{_LESS}\s*(.+)")
_CONFIG = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def compare(reference: str, found: str | None) -> Verdict:
    """Whether math-verify takes the two for the same; with ``found`` None, only whether it can read the reference."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    expected = _read(reference)
    if not expected:
        return "reference unreadable"
    if found is None:
        return "different"
    given = _read(found)
    return "equal" if given and verify(expected, given, timeout_seconds=None) else "different"


def _read(value: str) -> list[Any]:
    number = parse_plain(value)
    exact = (
        str(number.value)
        if number is not None and number.scale == 1
        else _interval(ascii_math(value.strip().strip("$")))
    )
    boxed = "\\boxed{" + exact + "}"
    return parse(boxed, extraction_config=_CONFIG, fallback_mode="no_fallback", parsing_timeout=None)


def _interval(value: str) -> str:
    """``1 \\le x < 2`` as the interval [1, 2)."""
    match = _BETWEEN.fullmatch(value)
    if match is None:
        return value
    low, first, second, high = match.groups()
    return f"{'(' if first == '<' else '['}{low}, {high}{')' if second == '<' else ']'}"
