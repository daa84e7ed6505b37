"""Decode attention against the time of its bytes, in the head shapes of Qwen2.5.

    python benchmarks/decode_attention.py --out results/decode_attention.json [--sizes 0.5B,7B,32B] [--cells 1x32768,64x2048,…]
    python benchmarks/decode_attention.py --parts --out results/decode_attention_parts.json [--sizes 7B] [--cells 1x32768,8x32768]

A cell is rows x context: `64x2048`; rows of several lengths are put together with a plus: `1x32768+63x256`; and where groups of rows have
their first tokens in common, those follow: `64x2560:2048/8` is 8 groups of 8 rows. Such a cell is timed with its groups read together,
and again with every row by itself. Each call reads another layer's cache, as many as exceed the second-level cache several times over; a captured
graph holds one call a layer, and its time is divided by them. The floor is all keys and values, read once (what is in common once for its group),
at 4.28 TB/s. Every cell is first compared with float64 on a few of its rows.

``--parts`` times the kernel of each cell with parts left out (`benchmarks/decode_parts.py`: which, and how), 24 calls a graph or more, so that its own start is spread over them. The
first, `all`, is the whole kernel compiled as the others are, and is compared with float64 too; `all again` is the same at the end. `less_us` is what a part takes less than `all`; parts that run beside
each other do not add up. The file is written after every part.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

from benchmarks.decode_parts import PARTS, left_out
from benchmarks.rollout import BANDWIDTH
from benchmarks.stored import write_result
from benchmarks.synthetic import SHAPES
from benchmarks.timing import device_times, require_gpu
from qerl.kernels.cached_attention import CacheRows, SharedPages, cached_attention, members_for, reference
from qerl.rollout.workspace import MANY_PAIRS, SHORT_TOKENS

PAGE = 64
LONGEST = 32768
"""Tokens that the table of pages has room for, as the engine has it: less (`SHORT_TOKENS`) where many rows are all short."""
CELLS = (
    "1x112,1x4096,1x32768,8x112,8x1024,8x32768,32x112,32x2048,64x112,64x2048,256x112,256x1024,512x400,"
    "1x32768+7x256,1x32768+63x256,8x8192+248x256,64x704:256/8,64x2496:2048/8,64x8640:8192/8,512x704:256/8,512x2496:2048/8"
)
PARTS_CELLS = "1x32768,8x32768"
FEWEST_CALLS = 24
"""Of a graph that times parts."""
ROTATED_BYTES = 400e6
"""Caches of all layers together are at least so large."""
LARGEST_CHECKED = 100_000_000
"""Numbers of a cache that is copied to float64."""
HEAD_SIZE = {"0.5B": 64}


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a cell."""

    lengths: tuple[int, ...]
    """Tokens of each row, the new one included."""
    common: int = 0
    """First tokens that the rows of a group have in common, in whole pages."""
    group: int = 1

    @classmethod
    def parse(cls, text: str) -> Batch:
        """`ROWSxCONTEXT[+ROWSxCONTEXT…][:COMMON/GROUP]`."""
        rows, _, shared = text.partition(":")
        lengths = []
        for part in rows.split("+"):
            count, context = map(int, part.split("x"))
            lengths += [context] * count
        if not shared:
            return cls(tuple(lengths))
        common, group = map(int, shared.split("/"))
        assert common % PAGE == 0 and len(lengths) % group == 0, text
        return cls(tuple(lengths), common, group)

    def tokens(self) -> int:
        """Different tokens in the cache."""
        return sum(self.lengths) - self.common * (len(self.lengths) - len(self.lengths) // self.group)

    def table(self, kv_heads: int) -> tuple[Tensor, int]:
        """(pages of each row [R, N], in no order, pages in all)."""
        short = len(self.lengths) * kv_heads >= MANY_PAIRS and max(self.lengths) < SHORT_TOKENS
        pages = [math.ceil(length / PAGE) for length in self.lengths]
        first = self.common // PAGE
        total = sum(pages) - first * (len(pages) - len(pages) // self.group)
        free = iter(torch.randperm(total).tolist())
        columns = SHORT_TOKENS // PAGE if short else LONGEST // PAGE + 1
        table_RN = torch.zeros(len(pages), columns, dtype=torch.int32)
        for row, count in enumerate(pages):
            assert count <= table_RN.shape[1]
            lead = row - row % self.group
            own = 0 if row == lead else first
            table_RN[row, :own] = table_RN[lead, :own]
            table_RN[row, own:count] = torch.tensor([next(free) for _ in range(count - own)])
        return table_RN.cuda(), total

    def shared(self, heads: int, kv_heads: int) -> SharedPages:
        """The groups, cut as the kernel takes them."""
        most, rows = members_for(heads, kv_heads), len(self.lengths)
        step = min(most, self.group)
        groups = [list(range(start, start + step)) for start in range(0, rows, step)]
        members = torch.tensor([[*group, *[-1] * (most - step)] for group in groups], dtype=torch.int32)
        pages_B = torch.full((rows,), self.common // PAGE, dtype=torch.int32, device="cuda")
        return SharedPages(pages_B=pages_B, members_CM=members.cuda(), likely_groups=len(groups))


class Cell:
    """The tensors of a cell, and calls of the kernel on them.

    Args:
        size: of the model.
        name: rows and contexts.
        together: groups are read together.
    """

    def __init__(self, size: str, name: str, *, together: bool):
        batch = Batch.parse(name)
        rows, context = len(batch.lengths), max(batch.lengths)
        self.heads, self.kv_heads = SHAPES[size]["heads"]
        head_size = HEAD_SIZE.get(size, 128)
        self.table_RN, pages = batch.table(self.kv_heads)
        shape = (pages, PAGE, self.kv_heads, head_size)
        self.layers = [
            tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            for _ in range(max(2, math.ceil(ROTATED_BYTES / (4 * math.prod(shape)))))
        ]
        width = (self.heads + 2 * self.kv_heads) * head_size
        self.qkv_BX = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        self.turns = torch.ones(rows, head_size, device="cuda"), torch.zeros(rows, head_size, device="cuda")
        self.lengths_B, self.scale = torch.tensor(batch.lengths, device="cuda") - 1, head_size**-0.5
        shared = batch.shared(self.heads, self.kv_heads) if together else None
        self.where = CacheRows(self.lengths_B, PAGE, table_BN=self.table_RN, shared=shared)
        self.floor_us = 1e6 * 4 * batch.tokens() * self.kv_heads * head_size / BANDWIDTH
        self.facts = {"size": size, "cell": name, "rows": rows, "context": context, "together": together}

    def attend(self, times: int = 1) -> Tensor:
        """A call for every layer, so many times over."""
        out = self.qkv_BX
        for k, v in self.layers * times:
            out = cached_attention(self.qkv_BX, self.turns, self.heads, self.kv_heads, k, v, self.where, self.scale)
        return out

    def error(self) -> float | None:
        """Of the first rows, against float64; None where a copy of the cache would be too large."""
        found = self.attend()[:2]
        if self.layers[0][0].numel() >= LARGEST_CHECKED:
            return None
        wide = [cache.double() for cache in self.layers[-1]]
        few = CacheRows(self.lengths_B[:2], PAGE, table_BN=self.table_RN[:2])
        turns_2 = self.turns[0][:2], self.turns[1][:2]
        exact = reference.cached_attention(
            self.qkv_BX[:2].double(), turns_2, self.heads, self.kv_heads, *wide, few, self.scale
        )
        error = float((found.double() - exact).norm() / exact.norm())
        assert error < 1e-2, error
        return error

    def times(self, fewest_calls: int = 1) -> list[float]:
        """Microseconds of a call in a captured graph of at least so many: median, second and eighth decile."""
        times = math.ceil(fewest_calls / len(self.layers))
        self.attend()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.attend(times)
        return device_times(graph.replay, len(self.layers) * times)


def whole(size: str, name: str, *, together: bool) -> dict[str, Any]:
    """One row of the table."""
    cell = Cell(size, name, together=together)
    error = cell.error()
    us, low, high = cell.times()
    floor = cell.floor_us
    timed = {"us": us, "us_deciles": [low, high], "floor_us": floor, "of_floor": floor / us, "error": error}
    return cell.facts | timed


def in_parts(size: str, name: str) -> Iterator[dict[str, Any]]:
    """The row of a cell, again after every part."""
    cell = Cell(size, name, together=False)
    row = cell.facts | {"floor_us": cell.floor_us, "parts": {}}
    for part in PARTS:
        with left_out(part):
            if not PARTS[part]:
                row["error"] = cell.error()
            us, low, high = cell.times(FEWEST_CALLS)
        least = row["parts"].get("all", {"us": us})["us"] - us
        row["parts"][part] = {"us": us, "us_deciles": [low, high], "less_us": least}
        print(f"{size:5} {name:20} {part:45} {us:8.2f} us ({low:.2f} to {high:.2f})  {least:8.2f} less", flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", default="7B")
    parser.add_argument("--cells", help=f"{CELLS}; with --parts {PARTS_CELLS}")
    parser.add_argument("--parts", action="store_true", help="with parts of the kernel left out")
    arguments = parser.parse_args()
    cells = (arguments.cells or (PARTS_CELLS if arguments.parts else CELLS)).split(",")
    if arguments.parts and (shared := [name for name in cells if ":" in name]):
        parser.error(f"{shared[0]} has rows that read together, of which no parts are left out")
    require_gpu(tiny=False)
    rows: list[dict[str, Any]] = []
    for size in arguments.sizes.split(","):
        for name in cells if arguments.parts else ():
            done = list(rows)
            for row in in_parts(size, name):
                rows = [*done, row]
                write_result(arguments.out, rows=rows)
            torch.cuda.empty_cache()
        for name in () if arguments.parts else cells:
            for together in (False, True)[: 2 if ":" in name else 1]:
                found = whole(size, name, together=together)
                rows.append(found)
                print(
                    f"{size:5} {name:20} {'together' if together else '':8} {found['us']:8.1f} us  floor {found['floor_us']:8.1f}"
                    f"  {100 * found['of_floor']:4.0f} %",
                    flush=True,
                )
                torch.cuda.empty_cache()
                write_result(arguments.out, rows=rows)


if __name__ == "__main__":
    main()
