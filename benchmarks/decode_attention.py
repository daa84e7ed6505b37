"""Decode attention against the time of its bytes, in the head shapes of Qwen2.5.

    python benchmarks/decode_attention.py --out results/decode_attention.json [--sizes 0.5B,7B,32B] [--cells 1x32768,64x2048,…]

A cell is rows x context. Each call reads another layer's cache, as many as exceed the second-level cache several times over; a captured
graph holds one call a layer, and its time is divided by them. The floor is the keys and values of all rows, read once, at 4.28 TB/s. Every
cell is first compared with float64 on a few of its rows.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from rollout import BANDWIDTH  # noqa: E402
from stored import write_result  # noqa: E402
from synthetic import SHAPES  # noqa: E402
from timing import device_times, require_gpu  # noqa: E402

from qerl.kernels.cached_attention import CacheRows, cached_attention, reference  # noqa: E402

PAGE = 64
CELLS = "1x128,1x4096,1x32768,8x1024,8x32768,32x112,32x2048,64x112,64x2048,128x112,256x112,256x1024,512x400"
ROTATED_BYTES = 400e6
"""Caches of all layers together are at least so large."""
LARGEST_CHECKED = 100_000_000
"""Numbers of a cache that is copied to float64."""
HEAD_SIZE = {"0.5B": 64}


def caches(rows: int, context: int, kv_heads: int, size: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Keys and values of each layer [P, L, K, d], and the pages of each row, in no order."""
    pages = math.ceil(context / PAGE)
    shape = (rows * pages, PAGE, kv_heads, size)
    layers = max(2, math.ceil(ROTATED_BYTES / (4 * math.prod(shape))))

    def normal() -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    table_RN = torch.randperm(rows * pages, device="cuda").view(rows, pages).int()
    return [(normal(), normal()) for _ in range(layers)], table_RN


def cell(size: str, rows: int, context: int) -> dict[str, Any]:
    """One row of the table."""
    heads, kv_heads = SHAPES[size]["heads"]
    head_size = HEAD_SIZE.get(size, 128)
    layers, table_RN = caches(rows, context, kv_heads, head_size)
    qkv_BX = torch.randn(rows, (heads + 2 * kv_heads) * head_size, device="cuda", dtype=torch.bfloat16)
    turns = torch.ones(rows, head_size, device="cuda"), torch.zeros(rows, head_size, device="cuda")
    lengths_B = torch.full((rows,), context - 1, device="cuda")
    where, scale = CacheRows(lengths_B, PAGE, table_BN=table_RN), head_size**-0.5

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
    floor = 1e6 * 4 * rows * context * kv_heads * head_size / BANDWIDTH
    return {
        "size": size,
        "rows": rows,
        "context": context,
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
            found = cell(size, *map(int, name.split("x")))
            rows.append(found)
            print(
                f"{size:5} {name:10} {found['us']:8.1f} us  floor {found['floor_us']:8.1f}  {100 * found['of_floor']:4.0f} %",
                flush=True,
            )
            torch.cuda.empty_cache()
    write_result(arguments.out, rows=rows)


if __name__ == "__main__":
    main()
