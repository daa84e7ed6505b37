"""Mathematics written with Unicode characters, rewritten as the ASCII and LaTeX that the rest of the checker reads."""

from __future__ import annotations

import re
import unicodedata

_SIGNS = {
    "\u2212": "-",
    "\ufe63": "-",
    "π": r"\pi ",
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "÷": "/",
    "±": r"\pm ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "∞": r"\infty ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "。": ".",
    "、": ",",
}
# The full-width forms of ASCII, which East Asian keyboards write.
_TABLE = str.maketrans(_SIGNS | {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)})

# A dash between two numbers is a range; before one it is a minus.
_DASH = re.compile(r"(?<![\w)\]}%])[\u2010-\u2014](?=\s*[\d.$\\])")
_FRACTION = re.compile("(\\d?)([¼-¾⅐-⅞])")
_RAISED = re.compile(r"[⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ]+")
_LOWERED = re.compile(r"[₀-₉]+")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]))")


def ascii_math(text: str) -> str:
    """``text`` with Unicode signs, fractions, exponents, indices and roots as ASCII or LaTeX: ``2½`` is ``2 1/2``, ``x²``
    is ``x^{2}``, ``√(x+1)`` is ``\\sqrt{x+1}``."""
    if text.isascii():
        return text
    text = _FRACTION.sub(_plain_fraction, text)
    text = _RAISED.sub(lambda match: f"^{{{_digits(match[0])}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{_digits(match[0])}}}", text)
    text = _ROOT.sub(lambda match: f"\\sqrt{{{match[1] or match[2]}}}", text)
    return _DASH.sub("-", text.translate(_TABLE))


def _plain_fraction(match: re.Match[str]) -> str:
    before, sign = match.groups()
    fraction = unicodedata.normalize("NFKC", sign).replace("\u2044", "/")
    return f"{before} {fraction}" if before else fraction


def _digits(run: str) -> str:
    """Superscript or subscript characters as those of the line."""
    return unicodedata.normalize("NFKC", run).replace("\u2212", "-")
