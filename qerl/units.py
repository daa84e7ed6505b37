"""Bytes as people read them, everywhere: decimal units, 1 GB = 1e9 bytes."""

from __future__ import annotations

GB = 1e9
_UNITS = ("B", "kB", "MB", "GB", "TB")


def bytes_text(count: float | None) -> str:
    """Bytes to three digits, in the unit that fits: ``999 B``, ``1.00 kB``, ``319 MB``, ``33.3 GB``; a dash for None."""
    if count is None:
        return "–"
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {_UNITS[unit]}"
