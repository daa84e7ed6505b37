"""Where the time of a packed linear layer of few rows goes: its kernels, decode and middle, with parts left out, beside the floor of memory.

    python benchmarks/ablation.py [--sizes 7B 32B 14B] [--rows 8 32 16 1 64] [--ranks 32 64 128 16] [--seconds 120] [--out results/ablation.json]

A cell is a size, a rank of the adapters and a number of rows of x: up to 16 rows the decode kernel runs, up to 128 the middle one. Each of the four products of a layer is timed by itself, and
the kernels that are whole in turn too, as a layer runs them (`layer in turn`): medians of 20 replays of a graph over copies of the weight that together outgrow the cache, with the second and eighth
decile. `all` is the kernel without adapters; what the others leave out, and that they give wrong numbers by design, is in `benchmarks/ablation_parts.py`. `empty` returns at
once, with the same launch. Of adapters: `h known` makes no h and multiplies with what is there; `h not waited for` makes it and reads it, but does not wait; `h not expanded` makes
it and does not use it; `pieces of h alone` does not add it up either. `all again` is `all` at the end of the cell: how far the clock has gone.

Before a cell is timed, the whole kernel, compiled as the others are, is compared with float64 on quantized weights. The first two `--sizes` come first, at all `--rows` with the first of the
`--ranks`; then the other ranks at 8 and 64 rows, where those are asked for, by the parts of adapters alone; then the other sizes. What `--seconds` does not suffice for is left out from the end (`not_reached`). The
device is in the hands of another process: a kernel that waits for ever is killed with it, is in `failed`, and the rest goes on. The file is written after every cell; the exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.ablation_worker import IN_TURN, PRODUCTS, START_SECONDS, Cell, Plan, work
from benchmarks.options import count, count_from_0
from benchmarks.stored import write_result
from benchmarks.synthetic import SHAPES
from benchmarks.timing import require_gpu

MOST_ROWS = 128
"""Above, blocks of the middle kernel copy x for one another, of which no part is left out here."""
RANK_ROWS = (8, 64)
FIRST_SIZES = 2
MOST_STARTS = 6
ENDING_SECONDS = 15.0
"""After `--seconds`, what a step that has begun may still take."""
NO_ANSWER = "no answer"


def all_cells(sizes: Sequence[str], rows: Sequence[int], ranks: Sequence[int]) -> list[Cell]:
    """Most important first."""
    first, *others = ranks
    main, further = sizes[:FIRST_SIZES], sizes[FIRST_SIZES:]
    found = [Cell(size, number, first) for number in rows for size in main]
    few = [number for number in RANK_ROWS if number in rows]
    found += [Cell(size, number, rank, base=False) for rank in others if rank for number in few for size in main]
    return found + [Cell(size, number, first) for size in further for number in rows]


class Ablation:
    """Follows the processes that measure, and keeps what they find.

    Args:
        cells: most important first.
        seconds: for everything.
        process: what a process runs, with a connection and what is left to do.
        start_method: of `multiprocessing`; a process that is to use CUDA is not forked.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        seconds: float,
        out: Path | None,
        process: Callable[[Any, Plan], None] = work,
        start_method: str = "spawn",
    ):
        self.cells, self.out = tuple(cells), out
        self.until = time.monotonic() + seconds
        self.facts: dict[str, Any] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.failed: list[dict[str, str]] = []
        self._done: set[tuple[str, str]] = set()
        self._hung: set[tuple[str, str]] = set()
        self._process = process
        self._context: Any = multiprocessing.get_context(start_method)

    def run(self) -> None:
        """Starts processes until nothing is left, or the time is over."""
        for _ in range(MOST_STARTS):
            if time.monotonic() > self.until or not self.not_reached():
                break
            if not self._one_process():
                break
        self.write()
        for what in self.not_reached():
            print(f"not reached: {what}", flush=True)

    def _plan(self) -> Plan:
        return Plan(cells=self.cells, until=self.until, done=frozenset(self._done), hung=frozenset(self._hung))

    def not_reached(self) -> list[str]:
        """Cells, or parts of cells, that are neither timed nor failed."""
        plan, found = self._plan(), []
        for cell in self.cells:
            left = plan.parts(cell)
            whole = len(left) == len(cell.parts)
            found += [str(cell)] if whole else [f"{cell} {part.name}" for part in left]
        return found

    def _one_process(self) -> bool:
        """One process to its end; False if no other one would do better."""
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=self._process, args=(theirs, self._plan()), daemon=True)
        process.start()
        theirs.close()
        step: dict[str, Any] = {"what": "start", "seconds": START_SECONDS}
        fault: str | None = NO_ANSWER
        try:
            fault, step = self._follow(ours, step)
        finally:
            # One that has told of its end or of a fault ends by itself, and one that waits for its device never does.
            process.join(timeout=0.1 if fault == NO_ANSWER else 10)
            if process.is_alive():
                process.kill()
                process.join(timeout=30)
            ours.close()
        if fault is None or time.monotonic() > self.until + ENDING_SECONDS:
            return False
        limit = f" within {step['seconds']:g} s" if fault == NO_ANSWER else ""
        self._blame(step, f"{fault}{limit} (exit status {process.exitcode})")
        return "cell" in step

    def _follow(self, connection: Connection, step: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
        """(what went wrong, if anything; the step that was under way)."""
        cell: Cell | None = None
        while True:
            room = min(step["seconds"], self.until + ENDING_SECONDS - time.monotonic())
            if not connection.poll(max(0.0, room)):
                return NO_ANSWER, step
            try:
                kind, content = connection.recv()
            except EOFError:
                return "the process died", step
            if kind == "end":
                self._cell_ended(cell)
                return None, step
            if kind == "fault":
                return content["error"], step
            if kind == "step":
                if content.get("cell") != cell:
                    self._cell_ended(cell)
                step, cell = content, content.get("cell")
            else:
                getattr(self, f"_on_{kind}")(**content)

    def _blame(self, step: dict[str, Any], error: str) -> None:
        cell, part = step.get("cell"), step.get("part", "")
        if cell is None:
            self.failed.append({"cell": "", "part": step["what"], "error": error})
            print(f"FAILED {step['what']}: {error}", flush=True)
        elif part:
            self._hung.add((cell.kernel, part))
            self._on_failed(cell, part, error)
        else:
            self._on_failed(cell, "", f"{step['what']}: {error}")
        self.write()

    def _on_facts(self, **facts: Any) -> None:
        self.facts |= facts

    def _on_compiled(self, kernels: int, seconds: float) -> None:
        print(f"{kernels} kernels compiled or found in {seconds:.1f} s", flush=True)

    def _on_failed(self, cell: Cell, part: str, error: str) -> None:
        """A part of a cell, or all that is left of it."""
        self._done |= {(str(cell), each.name) for each in cell.parts if part in ("", each.name)}
        self.failed.append({"cell": str(cell), "part": part, "error": error})
        print(f"FAILED {cell} {part}: {error}", flush=True)

    def _on_cell(self, cell: Cell, **content: Any) -> None:
        """What is known before any part is timed."""
        for name in ("floor_us", "floor_us_with_adapters"):
            content[name] = dict(zip(PRODUCTS, content[name], strict=True)) | {"sum": sum(content[name])}
        row = {"size": cell.size, "rank": cell.rank, "rows": cell.rows, "kernel": cell.kernel}
        self.rows.setdefault(str(cell), row | content | {"parts": {}})

    def _on_part(self, cell: Cell, part: str, found: dict[str, Any]) -> None:
        self._done.add((str(cell), part))
        row = self.rows[str(cell)]
        adapters = next(each.adapters for each in cell.parts if each.name == part)
        floor = row["floor_us_with_adapters" if adapters else "floor_us"]["sum"]
        total = sum(found[name]["us"] for name in PRODUCTS)
        row["parts"][part] = found | {"sum_us": total, "of_floor": floor / total, "adapters": adapters}
        print(f"{cell} {part}: {total:.1f} us", flush=True)

    def _cell_ended(self, cell: Cell | None) -> None:
        if cell is not None and str(cell) in self.rows:
            print(table(self.rows[str(cell)]), flush=True)
            self.write()

    def write(self) -> None:
        if self.out:
            write_result(
                self.out,
                **self.facts,
                rows=list(self.rows.values()),
                failed=self.failed,
                left_out_after_a_failure=[f"{kernel} {part}" for kernel, part in sorted(self._hung)],
                not_reached=self.not_reached(),
            )


def table(row: dict[str, Any]) -> str:
    """Microseconds by part and product, and how much less the part takes than the whole."""
    lines = [f"{row['size']}, {row['rows']} rows of x, rank {row['rank']}, {row['kernel']}, us"]
    lines.append(f"  {'':38}" + "".join(f"{name:>9}" for name in (*PRODUCTS, "sum", "less", "of floor", "in turn")))
    for label, key in (("floor", "floor_us"), ("floor with adapters", "floor_us_with_adapters")):
        lines.append(f"  {label:38}" + "".join(f"{row[key][name]:9.1f}" for name in (*PRODUCTS, "sum")))
    for name, part in row["parts"].items():
        whole = row["parts"].get("with adapters" if part["adapters"] else "all", part)["sum_us"]
        cells = "".join(f"{part[product]['us']:9.1f}" for product in PRODUCTS)
        in_turn = f"{part[IN_TURN]['us']:9.1f}" if IN_TURN in part else ""
        lines.append(
            f"  {name:38}{cells}{part['sum_us']:9.1f}{whole - part['sum_us']:9.1f}{part['of_floor']:9.0%}{in_turn}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=[*SHAPES], default=["7B", "32B", "14B"])
    parser.add_argument("--rows", nargs="+", type=count, default=[8, 32, 16, 1, 64])
    parser.add_argument("--ranks", nargs="+", type=count_from_0, default=[32, 64, 128, 16], help="0: no adapters")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if max(arguments.rows) > MOST_ROWS:
        parser.error(f"--rows {max(arguments.rows)}: expected at most {MOST_ROWS}")
    if wrong := [rank for rank in arguments.ranks if rank % 8]:
        parser.error(f"--ranks {wrong[0]}: expected multiples of 8, which both kernels take")
    if not arguments.seconds > 0:
        parser.error(f"--seconds {arguments.seconds}: expected more than 0")
    require_gpu(tiny=False)
    ablation = Ablation(all_cells(arguments.sizes, arguments.rows, arguments.ranks), arguments.seconds, arguments.out)
    ablation.run()
    if ablation.failed or not ablation.rows:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
