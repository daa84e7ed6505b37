"""Numbers as people write them, read exactly: the fast path of answer checking.

Both the reference and the answer go through the same normalization, so ``$1,234.50``, ``1234.5`` and
``1\\,234.50 dollars`` are one number. Values are ``Fraction``: integers, decimals and simple fractions compare exactly,
without a tolerance. Whatever is not one plain number (roots, intervals, variables, lists) reads as None and is left to
the symbolic comparison.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from qerl.reward.unicode_math import ascii_math

MAX_DIGITS = 300
"""Longer digit strings, and larger powers of ten, are not read as plain numbers (they would only cost time)."""

SCALES = {
    "": Fraction(1),
    "%": Fraction(1, 100),
    "percent": Fraction(1, 100),
    "dozen": Fraction(12),
    "hundred": Fraction(100),
    "thousand": Fraction(1000),
    "million": Fraction(10**6),
    "billion": Fraction(10**9),
    "trillion": Fraction(10**12),
}

# Units that may touch the number ("5cm"). Other letters that touch a number make it algebra ("5x", "2ab").
_UNITS = (
    "km|cm|mm|nm|kg|mg|ml|mL|lbs?|oz|ft|in|yd|mi|hrs?|min|mins|sec|secs|mph|kph|kmh|am|pm|kWh|kW|Hz|GB|MB|TB|cents?"
)
# Words that continue the mathematics instead of naming a unit.
_NOT_UNITS = (
    "pi|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|mod|and|or|to|over|by|times|plus|minus|squared|cubed|base|choose"
)

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?!\d)|\d+)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)"
_POWER = r"(?:[eE](?P<exp>[-+]?\d+)|\s*(?:\\times|\\cdot|×|\*|x)\s*10\s*\^\s*\{?\s*(?P<pow>[-+]?\d+)\s*\}?)"
_WORD = rf"(?!(?:{_NOT_UNITS})\b)[A-Za-z][A-Za-z'\-.]*"
_AREA = r"(?:\s*\^\s*\{?[23]\}?|[²³])?"
_UNIT = rf"(?:(?:{_UNITS})\b{_AREA}|\s+(?:[mgshL]\b|{_UNITS}\b|(?!(?:{_NOT_UNITS})\b)[A-Za-z][A-Za-z'\-.]+){_AREA})"
_UNIT_TAIL = rf"(?:{_UNIT}(?:[\s,/]+{_WORD}{_AREA})*)?"

_PLAIN = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:US)?[$€£¥]?\s*(?P<sign2>-?)"
    rf"(?:(?P<whole>\d+)\s+(?P<num>\d+)\s*/\s*(?P<den>\d+)"
    rf"|(?P<top>{_UNSIGNED})\s*/\s*(?P<sign3>-?)(?P<bottom>{_UNSIGNED})"
    rf"|(?P<number>{_UNSIGNED})(?:{_POWER}|(?:st|nd|rd|th)\b)?)"
    rf"(?:\s*(?P<scale>%|(?:percent|dozen|hundred|thousand|million|billion|trillion)\b))?"
    rf"\s*(?:[$€£¥]|°|\^\s*\{{?\s*\\?(?:circ|degree)\s*\}}?)?{_UNIT_TAIL}"
)

# Letters that make a digit after them part of a name (H2O); a Chinese sentence may touch its numbers.
_LETTERS = "A-Za-z\u00c0-\u024f\u0370-\u03ff"
_TOKEN = re.compile(
    rf"(?<![{_LETTERS}\d_.\\])(?:(?<![)\]}}])[-\u2212\u2013])?(?:US)?[$€£¥]?-?{_UNSIGNED}(?:[eE][-+]?\d+)?(?:/\d+(?![\d.]))?(?:\s?%)?"
    rf"(?:(?:{_UNITS})\b|(?![A-Za-z_]))"
)

# With a comma it would be a pair.
_PARENTHESES = re.compile(r"^\(\s*([^(),]+?)\s*\)$")
_BLOCK = 300
_BREAK = re.compile(r"[^\d]\s")
_OPTION = re.compile(r"^\(?[A-Z]\)\s*")
_WORDS = re.compile(r"[A-Za-z\s.,:;!'\"*\-]*")
_CHANGES_VALUE = re.compile(rf"\b(?:{_NOT_UNITS}|half|third|quarter)\b|(?<![A-Za-z])-|^\s+(?!a\s)[A-Za-z]\b|^\s*!")

_FRACTION = re.compile(r"\\frac\s*(?:\{\s*(-?[\d.,]+)\s*\}|(\d))\s*(?:\{\s*(-?[\d.,]+)\s*\}|(\d))")
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\\[!,;:> ]|\\q?quad\b|~|[\u00a0\u2009\u202f]")


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """An exact number, and the factor of the percent sign or scale word written after it (1 when there is none)."""

    value: Fraction
    scale: Fraction = SCALES[""]

    def equals(self, other: PlainNumber) -> bool:
        """Exact equality; where only one side has a percent sign or scale word, it may be read either way.

        ``25%`` equals ``25`` and ``0.25``, because references write either; ``25%`` never equals ``0.25%``.
        """
        if self.value * self.scale == other.value * other.scale:
            return True
        return (self.scale == 1) != (other.scale == 1) and self.value == other.value


def normalize(value: str) -> str:
    """The value without math delimiters, markdown emphasis, LaTeX spacing, ``\\text`` and trailing punctuation."""
    text = ascii_math(value).replace("**", "").replace("\\$", "$").replace("\\%", "%").replace("{,}", ",")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\left", "").replace("\\right", "")
    # Thin spaces inside a number group its digits; elsewhere they are spaces.
    text = re.sub(r"(?<=\d),?\s*\\[!,;: ]\s*(?=\d{3})", ",", text)
    text = _SPACES.sub(" ", text)
    text = _TEXT.sub(r" \1 ", text)
    while (stripped := _strip_once(text)) != text:
        text = stripped
    return text


def parse_plain(value: str) -> PlainNumber | None:
    """The number that ``value`` is, or None when it is not one plain number.

    Accepts a sign, a currency sign, digits with or without thousands separators, decimals, powers of ten (``1.2e3``,
    ``1.2 \\times 10^3``), repeating decimals (``0.\\overline{3}``), simple and mixed fractions (also ``\\frac``), a percent
    sign or scale word, and a unit.
    """
    if len(value) > MAX_DIGITS:
        return None
    text = _REPEATING.sub(_repeating, normalize(value))
    text = _FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]} ", text).strip()
    text = re.sub(r"^-\s+", "-", text)
    text = _PARENTHESES.sub(r"\1", text)
    match = _PLAIN.fullmatch(text)
    return _evaluate(match) if match else None


def number_tokens(text: str) -> list[str]:
    """All numbers written in ``text``, in order, as they stand (``$1,234.50``, ``-3``, ``3/4``, ``25%``)."""
    return [match[0] for match in _TOKEN.finditer(text)]


def last_number(text: str) -> tuple[int, str] | None:
    """Offset and text of the last number written in ``text``, or None."""
    end = len(text)
    # Read blocks from the end, for speed; none begins between digits, so that no number is cut.
    while end > 0:
        start = max(end - _BLOCK, 0)
        while start > 0 and not _BREAK.match(text, start - 2):
            start -= 1
        matches = list(_TOKEN.finditer(text, start, end))
        if matches:
            return matches[-1].start(), matches[-1][0]
        end = start
    return None


def single_number(value: str) -> PlainNumber | None:
    """The number in a phrase that holds exactly one and otherwise only words, as ``She earns $18 a day``."""
    text = _OPTION.sub("", normalize(value))
    matches = list(_TOKEN.finditer(text))
    if len(matches) != 1:
        return None
    before, after = text[: matches[0].start()], text[matches[0].end() :]
    if not _WORDS.fullmatch(before + after) or _CHANGES_VALUE.search(after):
        return None
    return parse_plain(text[matches[0].start() :]) or parse_plain(matches[0][0])


def _strip_once(text: str) -> str:
    text = text.strip().strip('*`_"').strip().rstrip(".,;:").strip()
    for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right):
            inner = text[len(left) : -len(right)]
            if left not in inner:
                return inner
    if text.startswith("{") and text.endswith("}") and text.count("{") == 1:
        return text[1:-1]
    return text


def _evaluate(match: re.Match[str]) -> PlainNumber | None:
    groups = match.groupdict()
    exponent = int(groups["exp"] or groups["pow"] or 0)
    if abs(exponent) > MAX_DIGITS:
        return None
    if groups["whole"]:
        denominator = int(groups["den"])
        numerator = int(groups["whole"]) * denominator + int(groups["num"])
        value = Fraction(numerator, denominator) if denominator else None
    elif groups["top"]:
        bottom = _decimal(groups["bottom"])
        value = _decimal(groups["top"]) / bottom if bottom else None
        if value is not None and groups["sign3"]:
            value = -value
    else:
        value = _decimal(groups["number"])
        if exponent:
            value *= Fraction(10) ** exponent
    if value is None:
        return None
    negative = (groups["sign"] == "-") != (groups["sign2"] == "-")
    return PlainNumber(-value if negative else value, SCALES[groups["scale"] or ""])


def _repeating(match: re.Match[str]) -> str:
    """A repeating decimal as a fraction: 0.1 with 6 repeating is (16 - 1) / 90."""
    whole, fixed, period = match[1], match[2], match[3] or match[4]
    numerator = int(whole + fixed + period) - int((whole + fixed) or "0")
    return f" {numerator}/{10 ** len(fixed) * (10 ** len(period) - 1)} "


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", ""))
