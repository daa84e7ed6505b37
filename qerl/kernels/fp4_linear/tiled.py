"""What the CUDA kernels know of the formats that have tiles."""

from __future__ import annotations

from dataclasses import dataclass

from qerl.formats import get_format
from qerl.formats.tiles import TiledFormat


@dataclass(frozen=True, slots=True)
class Tiled:
    """One format, as cuda/format.cuh has it."""

    number: int
    """Value of the macro FORMAT."""
    tile_bytes: int
    """Bytes of a tile."""
    table_bytes: int
    """Shared memory of a block that the table of codes takes."""
    divisor: float
    """What sums with V are divided by, where the format stores no divisor."""


def _tiled(name: str, number: int, table_bytes: int = 0) -> Tiled:
    fmt = get_format(name)
    assert isinstance(fmt, TiledFormat), name
    return Tiled(number, fmt.tile_layout.tile_bytes, table_bytes, fmt.tile_divisor)


_PAIRS = 256 * 128

TILED = {
    "nvfp4": _tiled("nvfp4", 0),
    "mxfp4": _tiled("mxfp4", 1),
    "nf4": _tiled("nf4", 2, _PAIRS),
    "nf4_dq": _tiled("nf4_dq", 3, _PAIRS + 1024),
}
"""By name of the format."""
