"""Numbers as people read them."""

from __future__ import annotations

from typing import Any

MINUS = "\u2212"


def percent(value: float | None) -> str:
    """A fraction as ``44.2%``."""
    return "–" if value is None else f"{100 * value:.1f}%"


def interval(low: float | None, high: float | None) -> str:
    """Two fractions as ``39.9–48.6%``."""
    return "–" if low is None or high is None else f"{100 * low:.1f}–{100 * high:.1f}%"


def points(value: float) -> str:
    """A difference of fractions in signed percentage points, as ``+45.2``."""
    rounded = round(100 * value, 1)
    return f"{rounded:+.1f}".replace("-", MINUS) if rounded else "0.0"


def decimals(value: float, places: int) -> str:
    """A number with so many decimals and a minus sign that is none of a zero, as ``−0.02``."""
    return f"{round(value, places) or 0.0:.{places}f}".replace("-", MINUS)


def count(value: float | None) -> str:
    """A count as ``512``, ``12.2k`` or ``3.41M``."""
    if value is None:
        return "–"
    for limit, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= limit:
            return f"{value / divisor:.3g}{unit}"
    return f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """Seconds as ``0.42 s``, ``71 s``, ``12 min 05 s`` or ``5 h 12 min``."""
    if value is None:
        return "–"
    if value < 10:
        return f"{value:.2g} s"
    whole = round(value)
    if whole < 120:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def plain(value: Any) -> str:
    """A setting or fact in one line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(plain(item) for item in value) or "empty"
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items()) or "empty"
    return str(value)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; an empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def brief(message: str, most: int = 160) -> str:
    """What failed: the first line of a message, and of a line longer than ``most`` characters its first sentence."""
    line = message.strip().partition("\n")[0].rstrip()
    return line if len(line) <= most else line.partition(". ")[0]
