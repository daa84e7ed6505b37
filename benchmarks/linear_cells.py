"""What `benchmarks/kernels.py` measures of one size and rank, and how it is written on the command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from benchmarks.linear_peers import PEERS
from benchmarks.linears import KEPT
from benchmarks.synthetic import SHAPES
from qerl.formats import FORMAT_NAMES


@dataclass(frozen=True, slots=True)
class Cells:
    """A row of the table for each number of rows of x."""

    size: str
    rank: int
    rows: tuple[int, ...]
    """Numbers of rows of x, in this order."""
    formats: tuple[str, ...] = ("nvfp4",)
    peers: tuple[str, ...] = ()
    peer_rows: tuple[int, ...] = ()
    """Numbers of rows of x at which the peers are measured."""

    def __str__(self) -> str:
        parts = (self.size, str(self.rank), ",".join(map(str, self.rows)), ",".join(self.formats), ",".join(self.peers))
        return "/".join(parts).rstrip("/")


def parse_cells(text: str) -> Cells:
    """``SIZE/RANK/ROWS[/FORMATS[/PEERS]]``, lists with commas: `7B/32/8,64/mxfp4,nf4`; peers are measured at all rows.

    Raises:
        argparse.ArgumentTypeError: a part is missing, or unknown.
    """
    parts = text.split("/")
    if not 3 <= len(parts) <= 5:
        raise argparse.ArgumentTypeError(f"'{text}' is not SIZE/RANK/ROWS[/FORMATS[/PEERS]]")
    size, rank, rows, formats, peers = (*parts, *("nvfp4", "")[len(parts) - 3 :])
    try:
        counts, ranks = tuple(int(one) for one in rows.split(",")), int(rank)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}': the rank and the rows are numbers") from None
    if ranks < 0 or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"'{text}': a rank is at least 0, and rows at least 1")
    others = tuple(name for name in peers.split(",") if name)
    chosen = tuple(formats.split(","))
    for what, given, known in (
        ("size", (size,), tuple(SHAPES)),
        ("format", tuple(name.removesuffix(KEPT) for name in chosen), FORMAT_NAMES),
        ("peer", others, tuple(PEERS)),
    ):
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"'{text}': unknown {what} '{name}' (one of {', '.join(known)})")
    return Cells(size, ranks, counts, chosen, others, counts)
