"""The side of `benchmarks/ablation.py` that has the device: a process of its own, since a kernel that waits for ever can only be killed with it.

It tells of every step before it begins, with the seconds that it may take, and of what it has found. A fault of the device ends it.
"""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.ablation_parts import AGAIN, ALL, PARTS, WITH_ADAPTERS, Edit, Part, patched_source
from benchmarks.linears import Linear, adapters, exact_product, floor_seconds, layer, projections, random_weight, rates
from benchmarks.synthetic import SHAPES, normal
from benchmarks.timing import captured
from qerl.errors import QerlError
from qerl.formats import dequantize, get_format
from qerl.formats.nvfp4 import Nvfp4Format
from qerl.kernels.cuda import Kernel, architecture, compile_cuda
from qerl.kernels.fp4_linear import cuda, decode, middle, regimes
from qerl.kernels.fp4_linear.adapter import flatten
from qerl.kernels.fp4_linear.workspace import Code, workspace

FORMAT = "nvfp4"
PRODUCTS = ("q k v", "o", "gate up", "down")
IN_TURN = "layer in turn"
CACHE_BYTES = 60e6
LARGEST_ERROR = 3.5e-3
FEWEST_CALLS = 24
"""Launches of a graph, at least: its own start, some microseconds, is spread over them."""
START_SECONDS, WEIGHTS_SECONDS, COMPILE_SECONDS, PART_SECONDS = 90.0, 60.0, 90.0, 12.0
"""What a step may take before it is taken for one that never ends."""

Tell = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Cell:
    """A layer of one size with some rows of x and adapters of one rank."""

    size: str
    rows: int
    rank: int
    base: bool = True
    """Whether parts without adapters are timed, or only those of adapters and the whole without them."""

    @property
    def kernel(self) -> str:
        return "decode" if self.rows <= regimes.few_rows(FORMAT) else "middle"

    @property
    def parts(self) -> tuple[Part, ...]:
        base, with_adapters = PARTS[self.kernel]
        first = base if self.base else base[:1]
        return (*first, *(with_adapters if self.rank else ()), Part(AGAIN))

    def __str__(self) -> str:
        return f"{self.size}/{self.rank}/{self.rows}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is left to do."""

    cells: tuple[Cell, ...]
    until: float
    """On this machine's monotonic clock."""
    done: frozenset[tuple[str, str]] = field(default_factory=frozenset)
    """(cell, part) that are timed, or have failed."""
    hung: frozenset[tuple[str, str]] = field(default_factory=frozenset)
    """(kernel, part) that have not ended, and are not begun again."""

    def parts(self, cell: Cell) -> tuple[Part, ...]:
        """Those that are left of a cell."""
        left = (part for part in cell.parts if (str(cell), part.name) not in self.done)
        return tuple(part for part in left if (cell.kernel, part.name) not in self.hung)


def work(connection: Any, plan: Plan) -> None:
    """The process: all of the plan that the time suffices for."""

    def tell(kind: str, **content: Any) -> None:
        connection.send((kind, content))

    tell("step", what="start", seconds=START_SECONDS)
    try:
        torch.manual_seed(0)
        with torch.no_grad():
            Device(tell, torch.device("cuda")).run(plan)
        tell("end")
    except (RuntimeError, ValueError, QerlError) as error:
        traceback.print_exc()
        tell("fault", error=f"{type(error).__name__}: {error}"[:1000])
    connection.close()


class Size:
    """The products of a layer of one size: quantized once, to be checked, and many times of random bytes, to be timed."""

    def __init__(self, name: str, device: torch.device):
        self.size, self.device = SHAPES[name], device
        self.shapes = projections(self.size)
        self.weights = [self._copies(segments, d_in) for segments, d_in in self.shapes]

    @cached_property
    def checked(self) -> list[Linear]:
        return layer(self.size, 0, self.device, (FORMAT,), real=True)

    @cached_property
    def exact(self) -> list[Tensor]:
        return [dequantize(linear.weights[FORMAT], torch.float64) for linear in self.checked]

    def _copies(self, segments: tuple[int, ...], d_in: int) -> list[Any]:
        fmt = get_format(FORMAT)
        assert isinstance(fmt, Nvfp4Format)
        count = max(2, math.ceil(3 * CACHE_BYTES / (sum(segments) * d_in * 0.5625)))
        return [random_weight(fmt, segments, d_in, self.device) for _ in range(count)]

    def linears(self, rank: int) -> list[list[Linear]]:
        """By product, copies that together outgrow the cache."""
        found: list[list[Linear]] = []
        for (segments, d_in), weights in zip(self.shapes, self.weights, strict=True):
            bias_O = normal(sum(segments), scale=1.0, device=self.device) if not found else None
            found.append(
                [
                    Linear(
                        weights={FORMAT: weight},
                        dense_OI=torch.empty(0, device=self.device),
                        bias_O=bias_O,
                        parts=adapters(segments, d_in, rank, self.device) if rank else (),
                    )
                    for weight in weights
                ]
            )
        return found


def run_product(linear: Linear, x_TI: Tensor, with_adapters: bool) -> Tensor:
    placements, a_RI, b_OR = flatten(linear.parts if with_adapters else ())
    return cuda.forward(x_TI, linear.weight, linear.bias_O, placements, a_RI, b_OR, None)[0]


def code_of(kernel: str, linear: Linear, x_TI: Tensor, with_adapters: bool) -> Code:
    """What a call is compiled from."""
    placements, a_RI, b_OR = flatten(linear.parts if with_adapters else ())
    regime = cuda.regime_of(x_TI, linear.weight, placements, a_RI, b_OR)
    if regime != kernel:
        raise RuntimeError(f"{tuple(linear.weight.shape)}, {len(x_TI)} rows: {regime} runs, not {kernel}")
    if kernel == "decode":
        return decode.code(x_TI, linear.weight, a_RI)
    return middle.code(x_TI, linear.weight, placements)


def codes_of(cell: Cell, parts: Sequence[Part], linears: Sequence[Linear], inputs: dict[int, Tensor]) -> list[Any]:
    """(code, edits) of all that the parts of a cell run, each once."""
    found = {}
    for part in parts:
        for linear in linears:
            code = code_of(cell.kernel, linear, inputs[linear.weight.shape[1]], part.adapters)
            found[code, part.edits] = None
    return list(found)


def compile_part(code: Code, edits: tuple[Edit, ...], arch: str) -> bytes:
    """Machine code of an edited kernel."""
    source = patched_source(code.name, edits, code.extra)
    return compile_cuda(source, name=f"ablation_{code.name}", arch=arch, defines=dict(code.defines), quiet=True)


@cache
def _loaded(device: torch.device, code: Code, edits: tuple[Edit, ...]) -> Kernel:
    return Kernel(compile_part(code, edits, architecture(device)), code.name)


@contextmanager
def edited(edits: tuple[Edit, ...]) -> Iterator[None]:
    """Inside, decode and middle launch their kernels edited."""

    def compiled(device: torch.device, name: str, defines: tuple[tuple[str, int], ...] = (), extra: str = "") -> Kernel:
        return _loaded(device, Code(name, defines, extra), edits)

    with patch.object(decode, "compiled", compiled), patch.object(middle, "compiled", compiled):
        yield


class Device:
    """Times the cells of a plan."""

    def __init__(self, tell: Tell, device: torch.device):
        self.tell = tell
        # With its number, as tensors have it: workspaces and kernels are found by the device.
        self.device = torch.zeros(1, device=device).device
        self.sizes: dict[str, Size] = {}
        self.rates = rates(self.device)
        tell("facts", copy_bytes_per_second=self.rates[0], matrix_flops_per_second=self.rates[1])

    def run(self, plan: Plan) -> None:
        for cell in plan.cells:
            parts = plan.parts(cell)
            if not parts:
                continue
            if time.monotonic() > plan.until:
                return
            self._cell(cell, parts, plan.until)

    def _cell(self, cell: Cell, parts: Sequence[Part], until: float) -> None:
        self.tell("step", what="weights", cell=cell, seconds=WEIGHTS_SECONDS)
        if cell.size not in self.sizes:
            self.sizes[cell.size] = Size(cell.size, self.device)
        size = self.sizes[cell.size]
        linears = size.linears(cell.rank)
        inputs = {d_in: normal(cell.rows, d_in, scale=1.0, device=self.device) for _, d_in in size.shapes}
        floors = {
            name: [1e6 * floor_seconds(*shape, rank, cell.rows, *self.rates) for shape in size.shapes]
            for name, rank in (("floor_us", 0), ("floor_us_with_adapters", cell.rank))
        }
        first = [copies[0] for copies in linears]
        self.tell("step", what="compilation", cell=cell, seconds=COMPILE_SECONDS)
        parts = self._compile(cell, parts, first, inputs)
        self.tell("step", what="check", cell=cell, seconds=WEIGHTS_SECONDS)
        try:
            error = self._check(cell, size)
        except AssertionError as wrong:
            self.tell("failed", cell=cell, part="", error=str(wrong))
            return
        self.tell("cell", cell=cell, largest_error=error, launches=self._launches(cell, first, inputs), **floors)
        for part in parts:
            if time.monotonic() > until:
                return
            self.tell("step", what=part.name, cell=cell, part=part.name, seconds=PART_SECONDS)
            with edited(part.edits):
                found = self._times(part, linears, inputs)
            self._clean()
            self.tell("part", cell=cell, part=part.name, found=found)

    def _compile(
        self, cell: Cell, parts: Sequence[Part], linears: Sequence[Linear], inputs: dict[int, Tensor]
    ) -> list[Part]:
        """Those of the parts whose kernels compile, side by side; the others are told of."""
        arch = architecture(self.device)
        begun = time.monotonic()
        wanted = codes_of(cell, [Part(ALL), Part(WITH_ADAPTERS, adapters=True), *parts], linears, inputs)
        with ThreadPoolExecutor(max_workers=min(16, len(os.sched_getaffinity(0)))) as pool:
            made = {key: pool.submit(compile_part, *key, arch) for key in wanted}
        self.tell("compiled", kernels=len(wanted), seconds=round(time.monotonic() - begun, 2))
        refused = {edits: made[code, edits].exception() for code, edits in wanted if made[code, edits].exception()}
        for part in parts:
            if part.edits in refused:
                self.tell("failed", cell=cell, part=part.name, error=str(refused[part.edits])[:1000])
        return [part for part in parts if part.edits not in refused]

    def _check(self, cell: Cell, size: Size) -> float:
        """Largest error of the whole kernel, compiled as the others are, against float64 on quantized weights."""
        largest = 0.0
        for name, linear, exact_OI, (segments, d_in) in zip(
            PRODUCTS, size.checked, size.exact, size.shapes, strict=True
        ):
            for rank in {0, cell.rank}:
                parts = adapters(segments, d_in, rank, self.device) if rank else ()
                whole = Linear(weights=linear.weights, dense_OI=linear.dense_OI, bias_O=linear.bias_O, parts=parts)
                x_TI = normal(cell.rows, d_in, scale=1.0, device=self.device)
                reference = exact_product(whole, x_TI, exact_OI)
                with edited(()):
                    y_TO = run_product(whole, x_TI, bool(rank)).double()
                error = float((y_TO - reference).norm() / reference.norm())
                assert error < LARGEST_ERROR, f"{name} of {cell}, rank {rank}: error {error:.2e}"
                largest = max(largest, error)
        return largest

    def _launches(self, cell: Cell, linears: Sequence[Linear], inputs: dict[int, Tensor]) -> dict[str, Any]:
        """How each product is cut: the compile-time constants of its kernel, without and with adapters."""
        return {
            name: [
                dict(code_of(cell.kernel, linear, inputs[linear.weight.shape[1]], with_adapters).defines)
                for with_adapters in (False, True)
            ]
            for name, linear in zip(PRODUCTS, linears, strict=True)
        }

    def _times(self, part: Part, linears: Sequence[Sequence[Linear]], inputs: dict[int, Tensor]) -> dict[str, Any]:
        """Microseconds of each product by itself, and of the whole kernel also of the four in turn."""

        def runs(copies: Sequence[Linear]) -> list[Callable[[], Any]]:
            return [lambda each=each: run_product(each, inputs[each.weight.shape[1]], part.adapters) for each in copies]

        found = {name: spread(runs(copies)) for name, copies in zip(PRODUCTS, linears, strict=True)}
        if not part.edits:
            layers = [linear for linears_of in zip(*linears, strict=False) for linear in linears_of]
            found[IN_TURN] = spread(runs(layers), len(PRODUCTS))
        return found

    def _clean(self) -> None:
        """What a kernel with a part left out may have left behind for the next one."""
        torch.cuda.synchronize()
        space = workspace(self.device)
        space.counters().zero_()
        space.sums(1).view(torch.int32).fill_(-1)
        torch.cuda.synchronize()


def spread(runs: Sequence[Callable[[], Any]], together: int = 1) -> dict[str, float]:
    """Microseconds of `together` calls of a graph that makes each in turn, all of them equally often."""
    calls = len(runs) * math.ceil(FEWEST_CALLS / len(runs))
    times = captured(*runs, calls=calls)
    return {name: round(us * together, 3) for name, us in zip(("us", "us_p20", "us_p80"), times, strict=True)}
