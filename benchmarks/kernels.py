"""Linear layers with adapters and LM heads: packed against cuBLAS in bfloat16 and other libraries, beside the floor of memory and matrix units.

    python benchmarks/kernels.py [--sizes 7B 32B] [--rows 1 8 64] [--ranks 32 16 64 128] [--few-sizes 14B 3B] [--kernels cuda]
        [--heads 7B 0.5B] [--head-rows 1 64] [--head-formats bf16 fp8 fp8+natural fp8+dense nvfp4] [--peers humming,bitsandbytes]
        [--formats nvfp4,nvfp4+kept,mxfp4,nf4] [--rank-rows 8 64] [--cells 7B/32/8,64/mxfp4,nf4 0.5B/32/8/nvfp4/humming] [--seconds 240]
        [--out results/kernels_linear.json]

One row is one decoder layer (q k v fused, o, gate up fused, down; bias on q k v) with LoRA on all seven projections. Times are medians of
20 replays of a captured graph that walks over several layers, so that no weight is in the cache, with the second and eighth
decile. "lora" of cuBLAS and of other libraries (`--peers`, at ``PEER_ROWS`` with the first rank) is h = x A^T and y += scale * h B^T behind
their product. Weights of a timed layer are random bytes (speed does not depend on the values). `--sizes` are measured at all `--rows` with the first of the ranks, and
with the other ranks at `--rank-rows`; `--few-sizes` at ``FEW_ROWS``. `--cells` names all that is wanted by itself: SIZE/RANK/ROWS[/FORMATS[/PEERS]], measured in that order (sizes and heads are then those that
are asked for). LM heads: float32 logits of a bfloat16, FP8 and NVFP4 head; `fp8` is in the order of the device,
`fp8+natural` and `fp8+tiles` in this one, and `fp8+dense` in tiles that are unpacked for cuBLAS. `--seconds` bounds the whole run: what the time does not
suffice for is left out from the end, and the file is written after every row. Before any figure of a size and rank, every kernel is compared with float64 on quantized
weights; what fails is in the file as such, the rest goes on, and the exit status is 1. Floors come from a copy and a matrix product in the same run, and a floor counts 4.5 bits a weight. ``--tiny`` runs all of it on the CPU with toy shapes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

from benchmarks.heads import HEAD_ROWS, HEADS, MEASURED, head_rows
from benchmarks.linear_cells import Cells, parse_cells
from benchmarks.linear_peers import PACKAGES, PEERS, Peer, largest_error, require
from benchmarks.linears import (
    KEPT,
    Linear,
    bfloat16,
    exact_product,
    floor_seconds,
    layer,
    projections,
    rates,
    separate,
)
from benchmarks.stored import write_result
from benchmarks.synthetic import SHAPES, normal
from benchmarks.timing import deciles, device_times, host_seconds, require_gpu
from qerl.formats import dequantize
from qerl.kernels.fp4_linear import AdapterPart, fp4_linear, regimes

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192, 16384)
FEW_ROWS = (1, 8, 64, 256, 2048)
RANK_ROWS = (8, 64)
PEER_ROWS = (1, 8, 16, 32, 64, 256, 2048)
CACHE_BYTES = 60e6
LARGEST_ERROR = 3.5e-3
PEER_ERROR = 1e-2
"""Of other libraries, whose kernels may round more."""
ROUNDED_WEIGHTS = {"nf4": 4.5e-3, "nf4_dq": 4.5e-3}
"""Of formats whose weights the kernels round."""
MOST_CHECKED = regimes.MOST_ROWS + 1
"""Rows of x of a check, at most: the fewest that the dense regime has for every weight, so that no regime is above them."""
TINY = {"hidden_size": 64, "intermediate_size": 96, "heads": (4, 2)}


def with_separate(peer: Peer) -> Callable[..., Tensor]:
    def product(linear: Linear, x_TI: Tensor, parts: Sequence[AdapterPart]) -> Tensor:
        return separate(peer.product(linear, x_TI), x_TI, parts)

    return product


def packed(kernel: str, name: str) -> Callable[..., Tensor]:
    def product(linear: Linear, x_TI: Tensor, parts: Sequence[AdapterPart]) -> Tensor:
        return fp4_linear(x_TI, linear.weights[name], linear.bias_O, parts, kernel=kernel)

    return product


class Bench:
    """Measures and keeps the rows."""

    def __init__(
        self,
        device: torch.device,
        seconds: float,
        kernels: Sequence[str],
        formats: Sequence[str],
        peers: Sequence[str],
        out: Path | None,
    ):
        self.device = device
        self.cache_bytes = CACHE_BYTES if device.type == "cuda" else 0
        self.until = time.monotonic() + seconds
        self.kernels = kernels
        self.out = out
        self.rows: list[dict[str, Any]] = []
        self.failed: list[dict[str, str]] = []
        self.not_reached: list[str] = []
        self.copy_rate, self.matrix_rate = rates(device)
        self.facts = {
            "kernels": list(kernels),
            "formats": list(formats),
            "peers": {name: importlib.metadata.version(PACKAGES.get(name, name)) for name in peers},
            "copy_bytes_per_second": self.copy_rate,
            "matrix_flops_per_second": self.matrix_rate,
        }
        print(json.dumps(self.facts), flush=True)

    def measure(self, cells: Cells) -> None:
        """All rows of some cells, if the kernels are right; what is wrong is noted, and the next cells may be measured."""
        size = TINY if self.device.type == "cpu" else SHAPES.get(cells.size, TINY)
        try:
            if self.check(cells, size):
                self.run(cells, size)
        except (AssertionError, RuntimeError) as error:
            self.failed.append({"cells": str(cells), "error": str(error)[:1000]})
            print(f"FAILED {cells}: {error}", flush=True)
            self.write()

    def check(self, cells: Cells, size: dict[str, Any]) -> bool:
        """Every kernel against float64 on quantized weights of this size; False if the time is over."""
        name, rank, tokens = cells.size, cells.rank, cells.rows
        if not self.time_left(str(cells)):
            return False
        for linear, weight_format in itertools.product(
            layer(size, rank, self.device, cells.formats, real=True), cells.formats
        ):
            exact_OI = dequantize(linear.weights[weight_format], torch.float64)
            for count in sorted({min(count, MOST_CHECKED) for count in tokens}):
                x_TI = normal(count, linear.weight.shape[1], scale=1.0, device=self.device)
                reference = exact_product(linear, x_TI, exact_OI)
                for kernel in self.kernels:
                    with torch.no_grad():
                        y_TO = packed(kernel, weight_format)(linear, x_TI, linear.parts).double()
                    error = float((y_TO - reference).norm() / reference.norm())
                    shape = list(linear.weight.shape)
                    what = f"{name} {weight_format} {shape}, {count} rows, kernel {kernel}"
                    assert error < ROUNDED_WEIGHTS.get(weight_format.removesuffix(KEPT), LARGEST_ERROR), (
                        f"{what}: error {error:.2e}"
                    )
        return True

    def run(self, cells: Cells, size: dict[str, Any]) -> None:
        """All rows of one size and rank."""
        # The floor, and how many layers outgrow the cache, are of NVFP4 and NF4, 4.5 bits a weight.
        packed_bytes = sum(sum(rows) * d_in * 0.5625 for rows, d_in in projections(size))
        copies = max(2, int(3 * CACHE_BYTES // packed_bytes) + 1) if self.device.type == "cuda" else 1
        layers = [layer(size, cells.rank, self.device, cells.formats, real=False) for _ in range(copies)]
        methods: dict[str, Callable[..., Tensor]] = {
            kernel if name == "nvfp4" else f"{kernel} {name}": packed(kernel, name)
            for kernel in self.kernels
            for name in cells.formats
        }
        methods["bf16"] = bfloat16
        others = self._peers(layers, cells.peers, [count for count in cells.rows if count in cells.peer_rows])
        for count in cells.rows:
            if not self.time_left(f"{cells.size} rank {cells.rank}, {count} rows"):
                return
            chosen = methods | (others if count in cells.peer_rows else {})
            self._row(cells.size, size, cells.rank, count, layers, chosen)

    def _peers(
        self, layers: Sequence[list[Linear]], names: Sequence[str], tokens: Sequence[int]
    ) -> dict[str, Callable[..., Tensor]]:
        """Products of other libraries by label, compared with float64 first."""
        found: dict[str, Callable[..., Tensor]] = {}
        for name in names if tokens else ():
            peer = PEERS[name]([linear for linears in layers for linear in linears])
            peer.prepare(tokens)
            for count in {tokens[0], tokens[-1]}:
                error = largest_error(peer, layers[0], count)
                assert error < PEER_ERROR, f"{peer.label}, {count} rows: error {error:.2e}"
            found[peer.label] = with_separate(peer)
        return found

    def time_left(self, what: str) -> bool:
        if time.monotonic() <= self.until:
            return True
        print(f"the time is over before {what}", flush=True)
        self.not_reached.append(what)
        self.write()
        return False

    def write(self) -> None:
        if self.out:
            write_result(self.out, **self.facts, rows=self.rows, failed=self.failed, not_reached=self.not_reached)

    def _row(
        self,
        name: str,
        size: dict[str, Any],
        rank: int,
        count: int,
        layers: Sequence[list[Linear]],
        methods: dict[str, Callable[..., Tensor]],
    ) -> None:
        inputs = {
            linear.weight.shape[1]: normal(count, linear.weight.shape[1], scale=1.0, device=self.device)
            for linear in layers[0]
        }
        floor = 1e6 * sum(
            floor_seconds(rows, d_in, rank, count, self.copy_rate, self.matrix_rate) for rows, d_in in projections(size)
        )
        row: dict[str, Any] = {"size": name, "rank": rank, "rows": count, "floor_us": floor, "copies": len(layers)}
        for method, product in methods.items():
            for label, with_adapters in (("base", False), ("lora", True)):
                if with_adapters and not rank:
                    continue

                def walk(product: Callable[..., Tensor] = product, with_adapters: bool = with_adapters) -> None:
                    for linears in layers:
                        for linear in linears:
                            product(linear, inputs[linear.weight.shape[1]], linear.parts if with_adapters else ())

                times = self.times(walk, len(layers), long=count > 512)
                row[f"{method} {label}"] = dict(zip(("us", "us_p20", "us_p80"), times, strict=True))
                row[f"{method} {label}"]["of_floor"] = floor / times[0]
        self.rows.append(row)
        self._print(row)
        self.write()

    def _print(self, row: dict[str, Any]) -> None:
        label = "lora" if row["rank"] else "base"
        ours = next(value["us"] for key, value in row.items() if key.endswith(label))
        cells = [f"{row['size']:>5} r{row['rank']:<3} M {row['rows']:<5} floor {row['floor_us']:8.1f} us"]
        for key, value in row.items():
            if isinstance(value, dict):
                cells.append(f"{key} {value['us']:.1f}")
        cells.append(f"| {row['floor_us'] / ours:.0%} of the floor, {row[f'bf16 {label}']['us'] / ours:.2f}x bf16")
        print("  ".join(cells), flush=True)

    def times(self, run: Callable[[], None], calls: int, *, long: bool = False) -> list[float]:
        """Microseconds a call: median, second and eighth decile. `long` calls outlast the start of a graph by far."""
        if self.device.type == "cpu":
            return deciles([host_seconds(run) * 1e6 / calls for _ in range(5)])
        # A graph's own start, a few microseconds, is spread over many launches.
        repeats = 1 if long else max(1, 16 // calls)
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(repeats):
                    run()
        return device_times(graph.replay, calls * repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", choices=[*SHAPES, "tiny"], help="7B 32B; none beside --cells")
    parser.add_argument("--few-sizes", nargs="*", choices=[*SHAPES], help="14B 3B 0.5B; none beside --cells")
    parser.add_argument("--cells", nargs="+", type=parse_cells, default=[], metavar="SIZE/RANK/ROWS[/FORMATS[/PEERS]]")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[32, 16, 64, 128])
    parser.add_argument("--rank-rows", nargs="+", type=int, default=list(RANK_ROWS))
    parser.add_argument("--heads", nargs="*", choices=[*SHAPES, "tiny"], help="7B 0.5B; none beside --cells")
    parser.add_argument("--head-rows", nargs="+", type=int, default=list(HEAD_ROWS))
    parser.add_argument("--head-formats", nargs="+", default=list(MEASURED), choices=list(HEADS))
    parser.add_argument("--kernels", nargs="+", default=["cuda"], help="implementations of fp4_linear")
    parser.add_argument("--formats", default="nvfp4", help="formats of the weights, with commas; nvfp4+kept: V is kept")
    parser.add_argument("--peers", default="", help="other libraries beside ours, with commas: humming, bitsandbytes")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    require_gpu(tiny=arguments.tiny)
    for option, usual in (("sizes", ["7B", "32B"]), ("few_sizes", ["14B", "3B", "0.5B"]), ("heads", ["7B", "0.5B"])):
        if getattr(arguments, option) is None:
            setattr(arguments, option, [] if arguments.cells else usual)
    if arguments.tiny:
        some = [] if arguments.cells else ["tiny"]
        arguments.sizes, arguments.few_sizes, arguments.heads = some, [], some
        arguments.rows, arguments.ranks, arguments.kernels = [1, 5], [32, 16], ["reference"]
        arguments.rank_rows, arguments.head_rows = [1], [1, 5]
    torch.manual_seed(0)
    device = torch.device("cpu" if arguments.tiny else "cuda")
    formats, peers = tuple(arguments.formats.split(",")), tuple(name for name in arguments.peers.split(",") if name)
    every = {name: None for cells in arguments.cells for name in cells.peers} | dict.fromkeys(peers)
    require(tuple(every))
    shown = {name: None for cells in arguments.cells for name in cells.formats} or dict.fromkeys(formats)
    bench = Bench(device, arguments.seconds, arguments.kernels, tuple(shown), tuple(every), arguments.out)

    for cells in arguments.cells or all_cells(arguments, formats, peers):
        bench.measure(cells)
    for name in arguments.heads:
        size = SHAPES.get(name, TINY)
        vocab = 500 if arguments.tiny else 151936 if size["tied"] else 152064
        head_rows(bench, name, (vocab, size["hidden_size"]), arguments.head_rows, arguments.head_formats)
    for name in arguments.few_sizes:
        bench.measure(Cells(name, arguments.ranks[0], FEW_ROWS, formats))
    if bench.failed:
        raise SystemExit(1)


def all_cells(arguments: argparse.Namespace, formats: tuple[str, ...], peers: tuple[str, ...]) -> Iterator[Cells]:
    """Those that `--sizes`, `--rows`, `--ranks` and `--rank-rows` name."""
    first, *others = arguments.ranks
    for name in arguments.sizes:
        yield Cells(name, first, tuple(arguments.rows), formats, peers, PEER_ROWS)
        for rank in others:
            yield Cells(name, rank, tuple(arguments.rank_rows), formats)


if __name__ == "__main__":
    main()
