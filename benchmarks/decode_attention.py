"""Decode attention against the time of its bytes, in the head shapes of Qwen2.5.

    python benchmarks/decode_attention.py --out results/decode_attention.json [--sizes 0.5B,7B,32B] [--cells 1x32768,64x2048,…]

A cell is rows x context: `64x2048`; rows of several lengths are put together with a plus: `1x32768+63x256`; and where groups of rows have
their first tokens in common, those follow: `64x2560:2048/8` is 8 groups of 8 rows. Such a cell is timed with its groups read together,
and again with every row by itself. Each call reads another layer's cache, as many as exceed the second-level cache several times over; a captured
graph holds one call a layer, and its time is divided by them. The floor is all keys and values, read once (what is in common once for its group),
at 4.28 TB/s. Every cell is first compared with float64 on a few of its rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

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


def cell(size: str, name: str, *, together: bool) -> dict[str, Any]:
    """One row of the table."""
    batch = Batch.parse(name)
    rows, context = len(batch.lengths), max(batch.lengths)
    heads, kv_heads = SHAPES[size]["heads"]
    head_size = HEAD_SIZE.get(size, 128)
    table_RN, pages = batch.table(kv_heads)
    shape = (pages, PAGE, kv_heads, head_size)
    layers = [
        tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for _ in range(max(2, math.ceil(ROTATED_BYTES / (4 * math.prod(shape)))))
    ]
    qkv_BX = torch.randn(rows, (heads + 2 * kv_heads) * head_size, device="cuda", dtype=torch.bfloat16)
    turns = torch.ones(rows, head_size, device="cuda"), torch.zeros(rows, head_size, device="cuda")
    lengths_B, scale = torch.tensor(batch.lengths, device="cuda") - 1, head_size**-0.5
    shared = batch.shared(heads, kv_heads) if together else None
    where = CacheRows(lengths_B, PAGE, table_BN=table_RN, shared=shared)

    def attend() -> Tensor:
        out = qkv_BX
        for k, v in layers:
            out = cached_attention(qkv_BX, turns, heads, kv_heads, k, v, where, scale)
        return out

    found, error = attend()[:2], None
    if layers[0][0].numel() < LARGEST_CHECKED:
        wide = [cache.double() for cache in layers[-1]]
        few = CacheRows(lengths_B[:2], PAGE, table_BN=table_RN[:2])
        turns_2 = turns[0][:2], turns[1][:2]
        exact = reference.cached_attention(qkv_BX[:2].double(), turns_2, heads, kv_heads, *wide, few, scale)
        error = float((found.double() - exact).norm() / exact.norm())
        assert error < 1e-2, error
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    us, low, high = device_times(graph.replay, len(layers))
    floor = 1e6 * 4 * batch.tokens() * kv_heads * head_size / BANDWIDTH
    return {
        "size": size,
        "cell": name,
        "rows": rows,
        "context": context,
        "together": together,
        "us": us,
        "us_deciles": [low, high],
        "floor_us": floor,
        "of_floor": floor / us,
        "error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", default="7B")
    parser.add_argument("--cells", default=CELLS)
    arguments = parser.parse_args()
    require_gpu(tiny=False)
    rows = []
    for size in arguments.sizes.split(","):
        for name in arguments.cells.split(","):
            for together in (False, True)[: 2 if ":" in name else 1]:
                found = cell(size, name, together=together)
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
