"""Order in machine code: whether a barrier of the whole block stands between two accesses to shared memory on every way of the program.

Ways between barriers are searched over all instructions and branches, possible or not, so that an order that is found is one. Barriers are
`BAR.SYNC 0` of all threads and the barrier of a cluster; barriers of some threads, mbarriers and predicated barriers count for nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[T\d]+)\s+)?(\S+)\s*(.*?)\s*;")
_LABEL = re.compile(r"(\.L_x_\w+|\$[\w$]+):")
_TARGET = re.compile(r"`\(([^)]+)\)")
_KINDS = {"Write": ("STS", "STSM", "LDGSTS"), "Read": ("LDS", "LDSM")}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a disassembly."""

    offset: int
    predicate: str | None
    code: str
    operands: str

    @property
    def target(self) -> str | None:
        """The label it may go on at."""
        found = _TARGET.search(self.operands)
        return found[1] if found else None

    @property
    def is_barrier(self) -> bool:
        """Whether all threads of the block wait here for one another."""
        whole = self.code.startswith("BAR.SYNC") and self.operands == "0x0"
        return self.predicate is None and (whole or self.code == "UCGABAR_WAIT")


class Code:
    """The machine code of one kernel, as `nvdisasm -c` prints it."""

    def __init__(self, text: str):
        self.lines: list[Instruction] = []
        self._labels: dict[str, int] = {}
        for line in text.splitlines():
            if label := _LABEL.match(line):
                self._labels[label[1]] = len(self.lines)
            elif found := _INSTRUCTION.match(line):
                self.lines.append(Instruction(int(found[1], 16), found[2], found[3], found[4]))
        self._joins: dict[int, set[int]] = {}
        self._at = {line.offset: index for index, line in enumerate(self.lines)}

    def has(self, kind: str, offset: int) -> bool:
        """Whether there is such an access ("Write" or "Read") to shared memory."""
        index = self._at.get(offset)
        return index is not None and self.lines[index].code.split(".")[0] in _KINDS[kind]

    def ordered(self, one: int, other: int) -> bool:
        """Whether no two threads can be at these accesses, given by offset, without a barrier of the block between them."""
        if not self._joins:
            self._find_joins()
        pair = {self._at[one], self._at[other]}
        if pair & self._between_halves:
            return False
        return not any(pair <= self._region(group) for group in self._groups)

    def _after(self, index: int) -> Iterator[int]:
        """Where a thread may be next."""
        line = self.lines[index]
        operation = line.code.split(".")[0]
        if operation in ("BRX", "JMX", "JMP"):
            raise ValueError(f"a branch to anywhere: {line}")
        if line.target is not None and operation in ("BRA", "CALL", "WARPSYNC"):
            yield self._labels[line.target]
        if operation == "BSYNC":
            yield from self._joins.get(index, ())
        # A branch may have its predicate among its operands.
        leaves = operation in ("EXIT", "RET") or (operation == "BRA" and line.operands.startswith("`"))
        leaves = leaves and not line.code.startswith("BRA.DIV")
        if (line.predicate is not None or not leaves) and index + 1 < len(self.lines):
            yield index + 1

    def _register(self, index: int, operation: str) -> str | None:
        """The convergence barrier that a `BSSY` or `BSYNC` is of."""
        line = self.lines[index]
        return line.operands.split(",")[0] if line.code.split(".")[0] == operation else None

    def _find_joins(self) -> None:
        """`_joins`: of every wait for the other threads of a warp, where all go on together. A wait may lead to others, so until nothing is new."""
        changed = True
        while changed:
            changed = False
            for start, line in enumerate(self.lines):
                register = self._register(start, "BSSY")
                if register is None or line.target is None:
                    continue
                target, seen, ahead = self._labels[line.target], set[int](), [start + 1]
                while ahead:
                    index = ahead.pop()
                    if index in seen or self._register(index, "BSSY") == register:
                        continue
                    seen.add(index)
                    if self._register(index, "BSYNC") != register:
                        ahead += self._after(index)
                    elif target not in self._joins.setdefault(index, set()):
                        self._joins[index].add(target)
                        changed = True

    def _reach(self, start: int) -> tuple[set[int], set[int]]:
        """(what a thread may do from here on before its next barrier, the barriers that may be next)."""
        seen: set[int] = set()
        barriers: set[int] = set()
        ahead = [start]
        while ahead:
            index = ahead.pop()
            if self.lines[index].is_barrier:
                barriers.add(index)
            elif index not in seen:
                seen.add(index)
                ahead += self._after(index)
        return seen, barriers

    @cached_property
    def _ways(self) -> dict[int, tuple[set[int], set[int]]]:
        """Of the entry (-1) and of every barrier: `_reach` behind it."""
        ways = {-1: self._reach(0)}
        ways |= {index: self._reach(index + 1) for index, line in enumerate(self.lines) if line.is_barrier}
        return ways

    @cached_property
    def _groups(self) -> list[set[int]]:
        """Barriers at which the threads of a block may be at the same time: those that may follow one group are one."""
        groups = [{index} for index in self._ways]
        changed = True
        while changed:
            changed = False
            for group in list(groups):
                following = set().union(*(self._ways[index][1] for index in group))
                touched = [other for other in groups if other & following]
                if len(touched) > 1:
                    groups = [other for other in groups if other not in touched] + [set().union(*touched)]
                    changed = True
                    break
        return groups

    def _region(self, group: set[int]) -> set[int]:
        return set().union(*(self._ways[index][0] for index in group))

    @cached_property
    def _between_halves(self) -> set[int]:
        """What threads may do between their arrival at a cluster's barrier and the wait there."""
        arrivals = (index for index, line in enumerate(self.lines) if line.code == "UCGABAR_ARV")
        return set().union(*(self._reach(index)[0] for index in arrivals))


def disassembler() -> str | None:
    """`nvdisasm`: on the path, or Triton's."""
    import triton.backends.nvidia as backend

    own = Path(backend.__file__).parent / "bin" / "nvdisasm"
    return shutil.which("nvdisasm") or (str(own) if own.exists() else None)


def code_of(cubin: Path) -> Code:
    """The machine code in a file."""
    program = disassembler()
    assert program is not None, "nvdisasm comes with the CUDA toolkit, and with Triton"
    return Code(subprocess.run([program, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout)
