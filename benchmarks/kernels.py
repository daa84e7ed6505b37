"""Linear layers with adapters and LM heads: packed against cuBLAS in bfloat16 and other libraries, beside the floor of memory and matrix units.

    python benchmarks/kernels.py [--sizes 7B 32B] [--rows 1 8 64] [--ranks 32 16 64 128] [--few-sizes 14B 3B] [--kernels cuda]
        [--heads 7B 0.5B] [--head-rows 1 64] [--head-formats bf16 fp8 fp8+tiles fp8+dense nvfp4] [--peers humming,bitsandbytes]
        [--formats nvfp4,nvfp4+kept,mxfp4,nf4] [--seconds 240] [--out results/kernels_linear.json]

One row is one decoder layer (q k v fused, o, gate up fused, down; bias on q k v) with LoRA on all seven projections. Times are medians of
20 replays of a captured graph that walks over several layers, so that no weight is in the cache, with the second and eighth
decile. "lora" of cuBLAS and of other libraries (`--peers`, at ``PEER_ROWS`` with the first rank) is h = x A^T and y += scale * h B^T behind
their product. Weights of a timed layer are random bytes (speed does not depend on the values). `--sizes` are measured at all `--rows` with the first of the ranks, and
with the other ranks at ``RANK_ROWS``; `--few-sizes` at ``FEW_ROWS``. LM heads: float32 logits of a bfloat16, FP8 and NVFP4 head; `fp8+tiles` and
`fp8+dense` are those of an FP8 head in tiles, the latter unpacked for cuBLAS. `--seconds` bounds the whole run: what the time does not
suffice for is left out from the end, and the file is written after every row. Before any figure of a size and rank, every kernel is compared with float64 on quantized
weights, and an error stops the run. Floors come from a copy and a matrix product in the same run, and a floor counts 4.5 bits a weight. ``--tiny`` runs all of it on the CPU with toy shapes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from heads import HEAD_ROWS, HEADS, MEASURED, head_rows
from linear_peers import PACKAGES, PEERS, Peer, largest_error, require
from synthetic import SHAPES, normal
from timing import deciles, device_times, require_gpu
from torch import Tensor

from qerl.formats import PackedWeight, dequantize, get_format, tiles
from qerl.formats.nvfp4 import Nvfp4Format
from qerl.kernels.fp4_linear import AdapterPart, fp4_linear, keep, keeps, regimes

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
FEW_ROWS = (1, 8, 64, 256, 2048)
RANK_ROWS = (8, 64)
PEER_ROWS = (1, 8, 32, 64, 256, 2048)
CACHE_BYTES = 60e6
LARGEST_ERROR = 3.5e-3
KEPT = "+kept"
"""Behind the name of a format: V is kept beside the weights of which the product keeps it (`quant.dense_cache`)."""
PEER_ERROR = 1e-2
"""Of other libraries, whose kernels may round more."""
ROUNDED_WEIGHTS = {"nf4": 4.5e-3, "nf4_dq": 4.5e-3}
"""Of formats whose weights the kernels round."""
MOST_CHECKED = 1 + max(regimes.MIDDLE_ROWS, regimes.DECODE_ROWS_WITHOUT_MIDDLE)
"""Rows of x of a check, at most: the fewest that the dense regime has for every weight, so that no regime is above them."""
TINY = {"hidden_size": 64, "intermediate_size": 96, "heads": (4, 2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One fused projection of a layer."""

    weights: dict[str, PackedWeight]
    """By format, the first one first."""
    dense_OI: Tensor
    bias_O: Tensor | None
    parts: tuple[AdapterPart, ...]

    @property
    def weight(self) -> PackedWeight:
        """In the first format."""
        return next(iter(self.weights.values()))


def projections(size: dict[str, Any]) -> list[tuple[tuple[int, ...], int]]:
    """(rows of the fused parts, inputs) of the four products of a layer."""
    hidden, inner = size["hidden_size"], size["intermediate_size"]
    heads, kv_heads = size["heads"]
    kv = hidden // heads * kv_heads
    return [((hidden, kv, kv), hidden), ((hidden,), hidden), ((inner, inner), hidden), ((hidden,), inner)]


def adapters(segments: Sequence[int], d_in: int, rank: int, device: torch.device) -> tuple[AdapterPart, ...]:
    a_RI = normal(len(segments) * rank, d_in, scale=d_in**-0.5, device=device)
    stops = [sum(segments[: index + 1]) for index in range(len(segments))]
    return tuple(
        AdapterPart(
            start=stop - rows,
            stop=stop,
            a_RI=a_RI,
            b_OR=normal(rows, rank, scale=0.05, device=device),
            scale=1.0,
            rank_start=index * rank,
        )
        for index, (rows, stop) in enumerate(zip(segments, stops, strict=True))
    )


def layer(size: dict[str, Any], rank: int, device: torch.device, formats: Sequence[str], *, real: bool) -> list[Linear]:
    """The four products of a layer; `real` weights are quantized ones, others, of NVFP4, random bytes beside an unrelated dense weight."""
    found = []
    for index, (segments, d_in) in enumerate(projections(size)):
        shape = (sum(segments), d_in)
        dense_OI = normal(*shape, scale=0.02, device=device)
        weights = {}
        for name in formats:
            fmt = get_format(name.removesuffix(KEPT))
            if real or device.type == "cpu" or not isinstance(fmt, Nvfp4Format):
                weights[name] = _held(fmt.for_device(fmt.quantize(dense_OI, segments=segments)), name)
                continue
            data = torch.randint(0, 256, fmt.tile_layout.shape(*shape), dtype=torch.uint8, device=device)
            # Scales between 2^-3 and 2^2.
            data[..., tiles.CODE_BYTES :] = 152 + data[..., tiles.CODE_BYTES :] % 40
            tensors = {"tiles": data, "global_scale": torch.full((len(segments),), 2e4, device=device)}
            packed = PackedWeight(format=fmt.name, shape=shape, tensors=tensors, segments=segments, order="tiles")
            weights[name] = _held(packed, name)
        bias_O = normal(shape[0], scale=1.0, device=device) if index == 0 else None
        parts = adapters(segments, d_in, rank, device) if rank else ()
        found.append(Linear(weights=weights, dense_OI=dense_OI, bias_O=bias_O, parts=parts))
    return found


def _held(weight: PackedWeight, name: str) -> PackedWeight:
    return keep(weight) if name.endswith(KEPT) and keeps(weight, torch.bfloat16) else weight


def separate(y_TO: Tensor, x_TI: Tensor, parts: Sequence[AdapterPart]) -> Tensor:
    """Adapters after a product that does not know of them; y is changed."""
    if parts:
        h_TR = x_TI @ parts[0].a_RI.T
        for part in parts:
            ranks = slice(part.rank_start, part.rank_start + part.b_OR.shape[1])
            y_TO[:, part.start : part.stop].addmm_(h_TR[:, ranks], part.b_OR.T, alpha=part.scale)
    return y_TO


def bfloat16(linear: Linear, x_TI: Tensor, parts: Sequence[AdapterPart]) -> Tensor:
    return separate(torch.nn.functional.linear(x_TI, linear.dense_OI, linear.bias_O), x_TI, parts)


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
        self.formats = formats
        self.peers = peers
        self.out = out
        self.rows: list[dict[str, Any]] = []
        self.copy_rate, self.matrix_rate = self._rates()
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        self.facts = {
            "command": shlex.join(["python", "benchmarks/kernels.py", *sys.argv[1:]]),
            "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "commit": commit or None,
            "kernels": list(kernels),
            "formats": list(formats),
            "peers": {name: importlib.metadata.version(PACKAGES.get(name, name)) for name in peers},
            "copy_bytes_per_second": self.copy_rate,
            "matrix_flops_per_second": self.matrix_rate,
        }
        print(json.dumps(self.facts), flush=True)

    def check(self, name: str, size: dict[str, Any], rank: int, tokens: Sequence[int]) -> bool:
        """Every kernel against float64 on quantized weights of this size; False if the time is over."""
        if not self.time_left(f"{name} rank {rank}"):
            return False
        for linear, weight_format in itertools.product(
            layer(size, rank, self.device, self.formats, real=True), self.formats
        ):
            exact_OI = dequantize(linear.weights[weight_format], torch.float64)
            for count in sorted({min(count, MOST_CHECKED) for count in tokens}):
                x_TI = normal(count, linear.weight.shape[1], scale=1.0, device=self.device)
                reference = x_TI.double() @ exact_OI.T
                if linear.bias_O is not None:
                    reference += linear.bias_O.double()
                for part in linear.parts:
                    a = part.a_RI[part.rank_start : part.rank_start + rank].double()
                    h_TR = (x_TI.double() @ a.T).bfloat16().double()
                    reference[:, part.start : part.stop] += part.scale * h_TR @ part.b_OR.double().T
                for kernel in self.kernels:
                    with torch.no_grad():
                        y_TO = packed(kernel, weight_format)(linear, x_TI, linear.parts).double()
                    error = float((y_TO - reference).norm() / reference.norm())
                    shape = list(linear.weight.shape)
                    what = f"{name} {weight_format} {shape}, {count} rows, kernel {kernel}"
                    assert error < ROUNDED_WEIGHTS.get(weight_format, LARGEST_ERROR), f"{what}: error {error:.2e}"
        return True

    def run(self, name: str, size: dict[str, Any], rank: int, tokens: Sequence[int], peers: Sequence[str]) -> None:
        """All rows of one size and rank."""
        # The floor, and how many layers outgrow the cache, are of NVFP4 and NF4, 4.5 bits a weight.
        packed_bytes = sum(sum(rows) * d_in * 0.5625 for rows, d_in in projections(size))
        copies = max(2, int(3 * CACHE_BYTES // packed_bytes) + 1) if self.device.type == "cuda" else 1
        layers = [layer(size, rank, self.device, self.formats, real=False) for _ in range(copies)]
        methods: dict[str, Callable[..., Tensor]] = {
            kernel if name == self.formats[0] else f"{kernel} {name}": packed(kernel, name)
            for kernel in self.kernels
            for name in self.formats
        }
        methods["bf16"] = bfloat16
        others = self._peers(layers, peers, [count for count in tokens if count in PEER_ROWS])
        for count in tokens:
            if not self.time_left(f"{name} rank {rank}, {count} rows"):
                return
            chosen = methods | (others if count in PEER_ROWS else {})
            self._row(name, size, rank, count, layers, chosen)

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
        return False

    def write(self) -> None:
        if self.out:
            self.out.write_text(json.dumps(self.facts | {"rows": self.rows}, indent=1) + "\n", encoding="utf-8")

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
        floor = 1e6 * sum(self._floor(rows, d_in, rank, count) for rows, d_in in projections(size))
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
        ours = row[f"{self.kernels[0]} {label}"]["us"]
        cells = [f"{row['size']:>5} r{row['rank']:<3} M {row['rows']:<5} floor {row['floor_us']:8.1f} us"]
        for key, value in row.items():
            if isinstance(value, dict):
                cells.append(f"{key} {value['us']:.1f}")
        cells.append(f"| {row['floor_us'] / ours:.0%} of the floor, {row[f'bf16 {label}']['us'] / ours:.2f}x bf16")
        print("  ".join(cells), flush=True)

    def _floor(self, rows: Sequence[int], d_in: int, rank: int, count: int) -> float:
        """Seconds: everything read or written once, or all multiplications, whichever takes longer."""
        d_out = sum(rows)
        moved = d_out * d_in * 0.5625 + 2 * count * (d_in + d_out) + 2 * rank * (len(rows) * d_in + d_out)
        products = 2.0 * count * (d_out * d_in + rank * (len(rows) * d_in + d_out))
        return max(moved / self.copy_rate, products / self.matrix_rate)

    def times(self, run: Callable[[], None], calls: int, *, long: bool = False) -> list[float]:
        """Microseconds a call: median, second and eighth decile. `long` calls outlast the start of a graph by far."""
        if self.device.type == "cpu":
            return deciles([_seconds(run) * 1e6 / calls for _ in range(5)])
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

    def _rates(self) -> tuple[float, float]:
        """(bytes a second of a copy, operations a second of a bfloat16 matrix product)."""
        on_cuda = self.device.type == "cuda"
        source = torch.empty(1 << (30 if on_cuda else 20), dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        width = 8192 if on_cuda else 64
        a, b = (normal(width, width, scale=1.0, device=self.device) for _ in range(2))
        rates = []
        for work, run in ((2.0 * source.numel(), lambda: target.copy_(source)), (2.0 * width**3, lambda: a @ b)):
            for _ in range(3):
                run()
            rates.append(work / statistics.median(_seconds(run) for _ in range(10)))
        return rates[0], rates[1]


def _seconds(run: Callable[[], Any]) -> float:
    """Host clock, device waited for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=["7B", "32B"], choices=[*SHAPES, "tiny"])
    parser.add_argument("--few-sizes", nargs="*", default=["14B", "3B", "0.5B"], choices=[*SHAPES])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[32, 16, 64, 128])
    parser.add_argument("--heads", nargs="*", default=["7B", "0.5B"], choices=[*SHAPES, "tiny"])
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
    rank_rows = RANK_ROWS
    if arguments.tiny:
        arguments.sizes, arguments.few_sizes, arguments.heads = ["tiny"], [], ["tiny"]
        arguments.rows, arguments.ranks, arguments.kernels = [1, 5], [32, 16], ["reference"]
        rank_rows, arguments.head_rows = (1,), [1, 5]
    torch.manual_seed(0)
    device = torch.device("cpu" if arguments.tiny else "cuda")
    formats, peers = arguments.formats.split(","), [name for name in arguments.peers.split(",") if name]
    require(peers)
    bench = Bench(device, arguments.seconds, arguments.kernels, formats, peers, arguments.out)

    def linears(name: str, rank: int, rows: Sequence[int], peers: Sequence[str] = ()) -> None:
        size = SHAPES.get(name, TINY)
        if bench.check(name, size, rank, rows):
            bench.run(name, size, rank, rows, peers)

    first, *others = arguments.ranks
    for name in arguments.sizes:
        linears(name, first, arguments.rows, peers)
        for rank in others:
            linears(name, rank, rank_rows)
    for name in arguments.heads:
        size = SHAPES.get(name, TINY)
        vocab = 500 if arguments.tiny else 151936 if size["tied"] else 152064
        head_rows(bench, name, (vocab, size["hidden_size"]), arguments.head_rows, arguments.head_formats)
    for name in arguments.few_sizes:
        linears(name, first, FEW_ROWS)


if __name__ == "__main__":
    main()
