"""Where a decode step leaves its floor: against sequences, tokens in the cache, and the rank of the adapters.

    python benchmarks/curves.py --out results/rollout_curves.json [--size 7B] [--formats nvfp4,bf16] [--contexts 64x512,64x2048,64x8192,64x32000]
                                [--ranks 16,32,64,128] [--rows 1,8,64,256]

Random weights in the shapes of Qwen2.5. A cell is a captured step of ``rows x context`` and rank, timed by itself: lengths and pages are
written into the engine's memory, and nothing is prefilled; its time is the median of 20, with the second and eighth decile. The floor is that of `rollout`. ``--contexts`` are timed at rank 32,
``--ranks`` at each of ``--rows`` with 112 tokens in the cache. ``--tiny`` runs it on the CPU with toy shapes, where steps are not captured.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.captured import step_of
from benchmarks.lengths import NO_EOS
from benchmarks.rollout import floor_ms, tiny
from benchmarks.stored import write_result
from benchmarks.synthetic import StubTokenizer, model_spec, random_model, set_rank
from benchmarks.timing import device_times, host_times, require_gpu
from qerl.model.decoder import Decoder
from qerl.records import SamplingSpec
from qerl.rollout.engine import Engine

SHORT, RANK = 112, 32
CONTEXTS, RANKS, ROWS = "64x512,64x2048,64x8192,64x32000", "16,32,64,128", "1,8,64,256"
TINY = "3x20,3x70", "4,8", "1,3"
"""The same, where shapes are toy ones."""


@torch.no_grad()
def cell(model: Decoder, rows: int, context: int) -> dict[str, Any]:
    """One row of the table."""
    cuda = model.device.type == "cuda"
    tokenizer: Any = StubTokenizer(NO_EOS)
    # All of the memory that is there: the longest cells need most of the device.
    free = torch.cuda.mem_get_info()[0] if cuda else 1 << 30
    engine = Engine(model, tokenizer, max_num_seqs=rows, paged=True, kv_bytes=int(0.95 * free))
    workspace = engine._workspace_for(rows, context, 2)
    for slab in (slab for pair in workspace.cache.slabs for slab in pair):
        slab.normal_()
    workspace.begin(SamplingSpec(), None, True)
    step = step_of(workspace, rows, context)
    us, low, high = device_times(step) if cuda else host_times(step)
    floor = floor_ms(model, rows, context)
    return {
        "rows": rows,
        "context": context,
        "ms_per_step": 1e-3 * us,
        "ms_deciles": [1e-3 * low, 1e-3 * high],
        "tokens_per_second": 1e6 * rows / us,
        "floor_ms": floor,
        "of_floor": 1e3 * floor / us,
    }


def cells_of(arguments: argparse.Namespace) -> Iterator[tuple[int, int, int]]:
    """(rank, rows, context)."""
    for name in filter(None, arguments.contexts.split(",")):
        rows, context = map(int, name.split("x"))
        yield RANK, rows, context
    for rank in map(int, filter(None, arguments.ranks.split(","))):
        for rows in map(int, arguments.rows.split(",")):
            yield rank, rows, SHORT


def main() -> None:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--size", default="7B")
    parser.add_argument("--formats", default="nvfp4")
    parser.add_argument("--contexts", help=f"rows x tokens ({CONTEXTS})")
    parser.add_argument("--ranks", help=RANKS)
    parser.add_argument("--rows", help=f"sequences at which ranks are timed ({ROWS})")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    require_gpu(tiny=arguments.tiny)
    for name, usual in zip(
        ("contexts", "ranks", "rows"), TINY if arguments.tiny else (CONTEXTS, RANKS, ROWS), strict=True
    ):
        if getattr(arguments, name) is None:
            setattr(arguments, name, usual)
    cells: list[dict[str, Any]] = []
    for name in arguments.formats.split(","):
        spec, (format, _, head) = model_spec(arguments.size), name.partition("/")
        device = "cpu" if arguments.tiny else "cuda"
        shape = tiny(spec) if arguments.tiny else spec
        model = random_model(shape, format=format, rank=RANK, head=head or "bf16", device=device)
        for rank, rows, context in cells_of(arguments):
            set_rank(model, rank)
            found = cell(model, rows, context)
            cells.append({"size": arguments.size, "format": format, "head": head or "bf16", "rank": rank, **found})
            print(
                f"[{time.perf_counter() - started:5.1f} s] {arguments.size} {name:6} rank {rank:3} {rows:4} x {context:5} "
                f"{found['ms_per_step']:8.3f} ms ({100 * found['of_floor']:3.0f} % of the floor) {found['tokens_per_second']:8.0f} tokens/s",
                flush=True,
            )
            if arguments.out:
                write_result(arguments.out, cells=cells)
            if not arguments.tiny:
                gc.collect()
                torch.cuda.empty_cache()
        del model
        gc.collect()


if __name__ == "__main__":
    main()
