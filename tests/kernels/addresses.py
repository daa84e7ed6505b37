"""Offsets of 32 bits in a compiled Triton kernel that grow as a row times a width does: beyond 2^31 elements they would point elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_LINE = re.compile(r"^\s*(%[\w#]+)(?::\d+)? = (\"?[\w.]+\"?)(.*)$")
_NAME = re.compile(r"%[\w]+(?:#\d+)?")
_CONSTANT = re.compile(r"(?:dense<)?(-?\d+)>? : ")
LARGE = 1024
"""From this on a number that is known at compile time may be a width of a tensor."""


@dataclass(frozen=True, slots=True)
class _Value:
    """How a value is made: the operation, what it takes, and the text of the line after the operation."""

    op: str = "?"
    inputs: list[str] = field(default_factory=list)
    text: str = ""

    def wide(self) -> bool:
        found = _CONSTANT.search(self.text) if self.op == "arith.constant" else None
        return found is not None and int(found[1]) >= LARGE


def growing_offsets(ttir: str) -> list[str]:
    """Lines of Triton's intermediate code that add to a pointer an offset of 32 bits with a product in it of a number that is known only when the
    kernel runs and of a width: an argument of the kernel, or a large constant. (Offsets that a loop carries along are not followed.)"""
    made: dict[str, _Value] = {}
    arguments = set(re.findall(r"(%\w+): i32", next(line for line in ttir.splitlines() if "tt.func" in line)))
    found = []

    def any_of(name: str, wanted) -> bool:
        """Whether a value is wanted, or is made of one that is."""
        todo, seen = [name], set()
        while todo:
            one = todo.pop()
            if one in seen:
                continue
            seen.add(one)
            if wanted(one):
                return True
            todo += made.get(one, _Value()).inputs
        return False

    def unknown(name: str) -> bool:
        return name in arguments or made.get(name, _Value()).op in ("tt.get_program_id", "tt.load", "?")

    def unbounded(name: str) -> bool:
        """As `unknown`, but for the second and third dimension of a grid, which have 65,535 programs at most."""
        value = made.get(name, _Value())
        return unknown(name) and not (value.op == "tt.get_program_id" and value.text.split()[0] in ("y", "z"))

    def product(name: str) -> bool:
        value = made.get(name, _Value())
        if value.op != "arith.muli":
            return False
        first, second = value.inputs
        return any(
            (any_of(a, lambda one: one in arguments) and any_of(b, unknown))
            or (any_of(a, lambda one: made.get(one, _Value()).wide()) and any_of(b, unbounded))
            for a, b in ((first, second), (second, first))
        )

    for line in ttir.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, op, rest = match.groups()
        # What is loaded is a number of its own, wherever it comes from.
        inputs = [] if op == "tt.load" else _NAME.findall(rest.split(" : ")[0])
        made[name] = _Value(op, inputs, rest)
        narrow = "i64" not in rest.split(", ")[-1].split(" loc(")[0]
        if op == "tt.addptr" and narrow and any_of(inputs[1], product):
            found.append(line.strip())
    return found
