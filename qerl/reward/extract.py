"""Finding the final answer in a text. What is found is the ``parsed`` field of a score.

In this order:

1. the last ``\\boxed{...}`` (braces may nest; an unclosed box does not count) or ``<answer>...</answer>``, whichever
   ends later. Inside ``<answer>``, this whole order applies again;
2. the last final statement, ``... answer is X``, ``Answer: X`` or ``#### X``;
3. the last number of the text, or the formula that holds it (``$x = \\sqrt{2}$`` gives ``\\sqrt{2}``).

After a closing ``</think>``, only what follows it is read, unless nothing is found there. A text with none of these is
unparsable.
"""

from __future__ import annotations

import re

from qerl.reward.plain_number import last_number, normalize, number_tokens, parse_plain

_BOX = re.compile(r"\\f?boxed\s*\{|\\fbox\s*\{")
_STATEMENT = re.compile(
    r"answers?(?:\s+(?:to|for|in)\b[^.\n:=\d]{0,80}?)?[\s*_]*"
    r"(?:\b(?:is|are|was|(?:would|will|should|must)\s+be)\b|=|:)[\s:*_]*(?:=\s*)?|####\s*",
    re.IGNORECASE,
)
_MATH = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<!\\)\$((?:\\[^\n]|[^$\n\\])+?)\$", re.DOTALL)
_SENTENCE_END = re.compile(r"\n|。|(?<=\S)(?<!\bRs)(?<!\bNo)[.!?](?=[\s*\"')\]<]|$)|</?\w+>")
_PROSE = re.compile(r"(?<![\\A-Za-z])(?!and\b)[A-Za-z]{3,}")
_EQUALS = re.compile(r"(?<![\\<>!])=|\\approx\b|≈")
_VARIABLE = re.compile(r"\$?[A-Za-z]\$?")
_OPTION = re.compile(r"\(?[A-J]\)")
_FRAC = re.compile(r"-?\s*\\[dt]?frac\s*(?:\{[^{}]*\}|\d)\s*(?:\{[^{}]*\}|\d)")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)

MAX_LENGTH = 1000
"""Longest answer in characters. Together with ``MAX_TRIES`` it keeps the time linear in degenerate, repetitive texts."""

MAX_TRIES = 20
"""How many boxes or final statements are looked at, from the end."""

MAX_WORDS = 4
"""A final statement without a number or formula counts as an answer when it has at most this many words."""


def find_answer(text: str) -> str | None:
    """The final answer as it stands in ``text``, or None (unparsable). See the module's docstring for the order."""
    if "</think>" in text:
        after = text.rpartition("</think>")[2]
        found = _find(after)
        if found is not None:
            return found
    return _find(text)


def boxed(text: str) -> tuple[int, str] | None:
    """End offset and content of the last closed ``\\boxed{...}`` that holds a letter or digit, or None."""
    for match in list(_BOX.finditer(text))[: -MAX_TRIES - 1 : -1]:
        end = _closing_brace(text, match.end())
        if end is not None and re.search(r"\w", text[match.end() : end]):
            return end + 1, text[match.end() : end].strip()
    return None


def right_side(value: str) -> str:
    """What stands after the last equals (or approximately-equals) sign; the whole value when there is none.

    ``7 = x`` gives the 7.
    """
    parts = [part.strip() for part in _EQUALS.split(value)]
    if len(parts) == 2 and _VARIABLE.fullmatch(parts[1]) and parse_plain(parts[0]) is not None:
        return parts[0]
    return parts[-1] or value


def _find(text: str) -> str | None:
    box = boxed(text) if "boxed" in text or "fbox" in text else None
    tag = _last_tag(text)
    if tag is not None and (box is None or tag[0] > box[0]):
        return tag[1]
    if box is not None:
        return box[1]
    return _statement(text) or _last_value(text)


def _last_tag(text: str) -> tuple[int, str] | None:
    lowered = text.lower()
    end = lowered.rfind("</answer>")
    start = lowered.rfind("<answer>", 0, max(end, 0))
    if start < 0:
        return None
    content = text[start + len("<answer>") : end].strip()
    if not content:
        return None
    found = content if parse_plain(content) else _find(content) or content[:MAX_LENGTH]
    return end, found


def _closing_brace(text: str, start: int) -> int | None:
    """Offset of the brace that closes the one just before ``start``."""
    depth = 1
    for match in _BRACES.finditer(text, start, start + MAX_LENGTH):
        if match[0] in "{}":
            depth += 1 if match[0] == "{" else -1
            if depth == 0:
                return match.start()
    return None


def _statement(text: str) -> str | None:
    """The last final statement that states something."""
    lowered = text.lower()
    end = len(text)
    for _ in range(MAX_TRIES):
        start = max(lowered.rfind("answer", 0, end), lowered.rfind("####", 0, end))
        if start < 0:
            return None
        match = _STATEMENT.match(text, start)
        value = _clause_value(text, match.end()) if match else None
        if value is not None:
            return value
        end = start
    return None


def _clause_value(text: str, start: int) -> str | None:
    """The answer stated at ``start``: a formula, an option, a number with its unit, or a few words."""
    formula = _MATH.match(text, start, start + MAX_LENGTH)
    if formula and not _PROSE.search(_inner(formula)):
        return _inner(formula) + ("%" if text.startswith("%", formula.end()) else "")
    clause = _clause(text[start : start + MAX_LENGTH])
    if not re.search(r"\w", clause):
        return None
    if parse_plain(clause) or _OPTION.match(clause):
        return clause
    formulas = _formulas(clause)
    if formulas:
        return _inner(formulas[0])
    clause = right_side(clause)
    numbers = number_tokens(clause)
    if "\\" in clause or (numbers and not _PROSE.search(clause)) or len(numbers) == 1:
        return clause
    if numbers:
        return numbers[0]
    return clause if len(normalize(clause).split()) <= MAX_WORDS else None


def _clause(text: str) -> str:
    """The first sentence; an abbreviation such as ``Rs.`` does not end it."""
    line = text.split("\n", 1)[0].replace("**", "").strip()
    end = _SENTENCE_END.search(line)
    return (line[: end.start()] if end else line).strip("*_ \t")


def _inner(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()


def _formulas(text: str) -> list[re.Match[str]]:
    """Formulas between math delimiters; spans with prose in them are dollar amounts that happened to pair up."""
    if "$" not in text and "\\(" not in text and "\\[" not in text:
        return []
    return [match for match in _MATH.finditer(text) if not _PROSE.search(_inner(match))]


def _last_value(text: str) -> str | None:
    """The last number with the fraction or formula around it; without any number, the last formula."""
    number = last_number(text)
    begin, window = _around(text, len(text) if number is None else number[0])
    formulas = _formulas(window)
    if number is None:
        return right_side(_inner(formulas[-1])) if formulas else None
    offset = number[0] - begin
    for match in reversed(formulas):
        if match.start() < offset < match.end():
            return right_side(_inner(match))
    for match in _FRAC.finditer(window):
        if match.start() < offset < match.end():
            return match[0].strip()
    return number[1]


def _around(text: str, offset: int) -> tuple[int, str]:
    """Where a window around ``offset`` begins, at a line if possible (formulas pair up within lines), and the window."""
    begin = max(offset - MAX_LENGTH, 0)
    line = text.find("\n", begin, offset) if begin else -1
    begin = line + 1 if line >= 0 else begin
    return begin, text[begin : offset + MAX_LENGTH]
