"""Quantization and dequantization on a GPU by format, beside a copy in the same run: part of `benchmarks/ops.py`.

Bytes are counted in two ways. `one_pass`: the matrix and the packed weight, each read or written once, which is what an operation of one pass moves. `moved`: with every
pass over the matrix that is made (`passes`). Shares are of the time that a copy of so many bytes takes, at the rate of the copy of the run and at that of a copy of
the same matrix in the same kind of graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.timing import captured, device_times
from qerl.formats import PackedWeight, dequantize, get_format
from qerl.kernels.fp4_linear import dense
from qerl.kernels.fp4_linear.unpack import unpack
from qerl.kernels.quantize import fp8, mxfp4, nf4, quantize
from qerl.kernels.quantize import triton as quantize_triton

if TYPE_CHECKING:
    from benchmarks.ops import Table

SHAPE = (2 * 18944, 3584)
"""Gate and up of a Qwen2.5-7B."""
FORMATS = ("nvfp4", "mxfp4", "nf4", "nf4_dq", "fp8")
EAGER_SAMPLES = 5


def packing(table: Table) -> None:
    """All rows: `quantize FORMAT`, `dequantize FORMAT`, and the copy."""
    dense_OI = torch.randn(*SHAPE, device="cuda", dtype=torch.bfloat16)
    out_OI = torch.empty_like(dense_OI)
    shares = Shares(table, dense_OI, captured(lambda: out_OI.copy_(dense_OI), calls=4))
    quantization(shares, dense_OI)
    for name in FORMATS:
        natural = quantize(dense_OI, name)
        tiled = get_format(name).tiled(natural)
        times = captured(lambda w=tiled: dense.dequantize_tiles(w, out_OI), calls=4)
        shares.add(f"dequantize {name}, tiles", times, tiled, passes=1)
        if name in ("mxfp4", "nf4", "nf4_dq"):
            # The scales of doubly quantized NF4 are made by small kernels in front.
            times = captured(lambda w=natural: unpack(w, out_OI), calls=4)
            shares.add(f"dequantize {name}, natural order", times, natural, passes=1)
        times = device_times(lambda w=natural: dequantize(w, torch.bfloat16), samples=EAGER_SAMPLES)
        shares.add(f"dequantize {name}, reference, eager", times, natural, passes=None)


def quantization(shares: Shares, dense_OI: torch.Tensor) -> None:
    """The check for values that are not finite waits for the device, which a graph cannot do: it is in the eager rows alone."""
    reach_1 = dense_OI.abs().amax().float().reshape(1)
    rows = (SHAPE[0],)
    packed, _ = quantize_triton.rounded(dense_OI, rows)
    for known in (None, reach_1):
        times = captured(lambda r=known: quantize_triton.rounded(dense_OI, rows, reach_1=r), calls=4)
        given = "" if known is None else ", largest magnitude given"
        shares.add(f"quantize nvfp4, triton{given}", times, packed, passes=2 if known is None else 1)
    times = captured(lambda: mxfp4.rounded(dense_OI, rows), calls=4)
    shares.add("quantize mxfp4, triton", times, mxfp4.rounded(dense_OI, rows)[0], passes=1)
    times = captured(lambda: nf4.rounded(dense_OI, rows, doubly=False), calls=4)
    shares.add("quantize nf4, triton", times, nf4.rounded(dense_OI, rows, doubly=False)[0], passes=1)
    times = captured(lambda: nf4.rounded(dense_OI, rows, doubly=True), calls=4)
    # The scales, one number for 64 weights, are read again, for their mean and for their codes.
    shares.add("quantize nf4_dq, triton", times, nf4.rounded(dense_OI, rows, doubly=True)[0], passes=1)
    times = captured(lambda: fp8.rounded(dense_OI, rows), calls=4)
    shares.add("quantize fp8, triton", times, fp8.rounded(dense_OI, rows)[0], passes=1)
    times = captured(lambda: quantize_triton.rounded(dense_OI, rows, "torchao"), calls=4)
    packed, _ = quantize_triton.rounded(dense_OI, rows, "torchao")
    shares.add("quantize nvfp4 as torchao does, triton", times, packed, passes=2)
    eager: list[tuple[str, str, int | None]] = [
        ("nvfp4", "triton", 2),
        ("mxfp4", "triton", 1),
        ("nf4", "triton", 1),
        ("nf4_dq", "triton", 1),
        ("fp8", "triton", 1),
    ]
    eager += [(name, "reference", None) for name in FORMATS]
    for name, kernel, passes in eager:
        run: Callable[[], PackedWeight] = lambda n=name, k=kernel: quantize(dense_OI, n, kernel=k)  # noqa: E731
        shares.add(f"quantize {name}, {kernel}, eager", device_times(run, samples=EAGER_SAMPLES), run(), passes=passes)


class Shares:
    """Rows of the table with the bytes that they count, beside a copy of the matrix in the same kind of graph."""

    def __init__(self, table: Table, dense_OI: torch.Tensor, copied: list[float]):
        self.table = table
        self.matrix_bytes = dense_OI.numel() * dense_OI.element_size()
        self.name = f"[{SHAPE[0]}, {SHAPE[1]}]"
        table.add(f"copy of a matrix {self.name}", copied, moved=2 * self.matrix_bytes)
        self.graph_rate = 2 * self.matrix_bytes / (copied[0] * 1e-6)

    def add(self, name: str, times: list[float], packed: PackedWeight, *, passes: int | None) -> None:
        """`passes`: times that the matrix is read or written; None where many small operations move it, as a reference does."""
        one_pass = self.matrix_bytes + packed.nbytes()
        moved = None if passes is None else one_pass + (passes - 1) * self.matrix_bytes
        whole = f"{name} {self.name}"
        self.table.add(whole, times, moved=one_pass)
        found = shares(times[0], one_pass, moved, self.table.copy_rate, self.graph_rate)
        self.table.rows[whole] |= {"passes": passes, **found}


def shares(us: float, one_pass: float, moved: float | None, copy_rate: float, graph_rate: float) -> dict[str, Any]:
    """Bytes, and shares of a copy: rates in bytes a second."""
    seconds = us * 1e-6
    return {
        "bytes_one_pass": one_pass,
        "bytes_moved": moved,
        "of_copy_one_pass": one_pass / copy_rate / seconds,
        "of_copy_moved": None if moved is None else moved / copy_rate / seconds,
        "of_copy_in_a_graph_one_pass": one_pass / graph_rate / seconds,
    }
