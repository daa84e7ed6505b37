"""What the CUDA kernels know of the formats that have tiles."""

from __future__ import annotations

from dataclasses import dataclass

from qerl.formats import PackedWeight, get_format
from qerl.formats.tiles import TiledFormat


@dataclass(frozen=True, slots=True)
class Tiled:
    """One format, as cuda/format.cuh has it."""

    number: int
    """Value of the macro FORMAT."""
    tile_bytes: int
    """Bytes of a tile."""
    looks_up: bool
    """Pairs of codes are looked up."""
    beside_table: int
    """Shared memory of a block for what stands behind the table."""
    divisor: float
    """What sums with V are divided by, where the format stores no divisor."""
    by_rows: bool
    """Every row has a divisor of its own, as in LM heads: nothing multiplies such tiles but the kernels that divide where a row ends, and never with adapters."""

    def macros(self, stride: int) -> dict[str, int]:
        """Compile-time constants of cuda/format.cuh; pairs of codes are `stride` bytes apart, 128 or 256, where they are looked up."""
        return {"FORMAT": self.number} | ({"PAIR_STRIDE": stride} if self.looks_up else {})

    def table_bytes(self, stride: int) -> int:
        """Shared memory of a block that the table takes."""
        return 256 * stride + self.beside_table if self.looks_up else 0


def _tiled(name: str, number: int, beside_table: int = 0, *, by_rows: bool = False) -> Tiled:
    fmt = get_format(name)
    assert isinstance(fmt, TiledFormat), name
    layout = fmt.tile_layout
    return Tiled(number, layout.tile_bytes, layout.pairs, beside_table, fmt.tile_divisor, by_rows)


TILED = {
    "nvfp4": _tiled("nvfp4", 0),
    "mxfp4": _tiled("mxfp4", 1),
    "nf4": _tiled("nf4", 2),
    "nf4_dq": _tiled("nf4_dq", 3, 1024),
    "fp8": _tiled("fp8", 4, by_rows=True),
}
"""By name of the format."""


def by_rows(weight: PackedWeight) -> bool:
    """`Tiled.by_rows` of a weight; False of a format without tiles."""
    return weight.format in TILED and TILED[weight.format].by_rows
