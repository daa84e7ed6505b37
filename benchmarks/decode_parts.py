"""The kernel of decode attention with parts left out, for `decode_attention.py --parts`: today's source with some of its text replaced.

What is left out stands behind a condition that never holds and that the compiler cannot know (numbers of rows and slots, which are above 0, are compared with 0), so that
registers and what leads to it stay, unless it says otherwise. Results are wrong by design. No loop of these kernels waits for another program, so none can wait for ever.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from unittest.mock import patch

from benchmarks.ablation_parts import Edit

PACKAGE = "qerl.kernels.cached_attention"
FILES = ("device", "contexts")
"""What the kernel is written in, each importing from those before it."""
_COUNT = 'arrived = tl.atomic_add(counter + 1 + eight, 1, sem="acq_rel", scope="gpu")'

NO_SECOND_JOIN = (
    Edit("contexts", 'if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == eights - 1:', "if rows < 0:"),
)
JOINS_READ_NOTHING = (
    Edit(
        "device",
        "there_J = lane_J < count\n",
        "there_J = lane_J < tl.where(slots < 0, count, 0)\n",
    ),
)
NO_JOINS = (Edit("contexts", "tl.debug_barrier()\n            " + _COUNT, "arrived = -1"),)
# One product after the other, as they are, but what is between them.
_SOFTMAX = """        scores_ST = tl.where(inside_T[None, :], scores_ST, float("-inf"))
        new_top_S = tl.maximum(top_S, tl.max(scores_ST, 1))
        weights_ST = tl.exp2(scores_ST - new_top_S[:, None])
        shrink_S = tl.exp2(top_S - new_top_S)
        sum_S = sum_S * shrink_S + tl.sum(weights_ST, 1)
        out_Sd = out_Sd * shrink_S[:, None]
"""
NO_SOFTMAX = (
    Edit("device", _SOFTMAX, "        weights_ST = scores_ST\n"),
    Edit("device", "        top_S = new_top_S\n        page = next_page\n", "        page = next_page\n"),
)
# Copies are put ahead for the sake of a product, so each tile keeps one, with constants: neither waits for the other.
STREAMED = (
    *NO_SOFTMAX,
    Edit(
        "device",
        "            scores_ST = tl.dot(q_Sd, tl.trans(k_Td)) * scale\n",
        "            scores_ST = tl.full((SIDE, TILE), 1.0, tl.float32)\n"
        "            out_Sd += tl.dot(scores_ST.to(k_Td.dtype), k_Td)\n",
    ),
)
_NOTHING_AHEAD = Edit("contexts", "            if early != 0:\n", "            if early > 1:\n")
NO_LOADS = (
    _NOTHING_AHEAD,
    Edit(
        "device",
        "mask_Td = inside_T[:, None] & inside_d[None, :]\n",
        "mask_Td = inside_T[:, None] & inside_d[None, :] & (length < 0)\n",
    ),
)
NO_TILES = (
    _NOTHING_AHEAD,
    Edit("device", "for tile in range(first, last):", "for tile in range(first, tl.where(scale < 0.0, last, first)):"),
)
NO_TASKS = (
    Edit(
        "contexts",
        "for listed in range(program, further + pairs, tl.num_programs(0)):",
        "for listed in range(program, tl.where(rows < 0, further + pairs, 0), tl.num_programs(0)):",
    ),
)

PARTS: dict[str, tuple[Edit, ...]] = {
    "all": (),
    "one join: that of eights, no result": NO_SECOND_JOIN,
    "joins count, and read nothing": JOINS_READ_NOTHING,
    "no joins: parts leave their sums": NO_JOINS,
    "no softmax": NO_SOFTMAX,
    "streamed: a product with constants a tile": STREAMED,
    "streamed, no joins": (*STREAMED, *NO_JOINS),
    "no loads": NO_LOADS,
    "no loads, no joins": (*NO_LOADS, *NO_JOINS),
    "no tiles: start, rotation, append, joins": NO_TILES,
    "no tiles, no joins": (*NO_TILES, *NO_JOINS),
    "start alone": NO_TASKS,
    "all again": (),
}
"""Name -> what is replaced."""


def patched(edits: Sequence[Edit]) -> dict[str, str]:
    """File -> its text, edited.

    Raises:
        ValueError: a text that is to be replaced is not there once: the source has changed, and the edit must follow it.
    """
    texts = {}
    for name in FILES:
        texts[name] = Path(str(importlib.import_module(f"{PACKAGE}.{name}").__file__)).read_text(encoding="utf-8")
    for edit in edits:
        found = texts[edit.file].count(edit.old)
        if found != 1:
            raise ValueError(f"{edit.file} has {found} times what an ablation replaces once:\n{edit.old}")
        texts[edit.file] = texts[edit.file].replace(edit.old, edit.new)
    return texts


@dataclass(frozen=True, slots=True)
class Variants:
    """The kernels, each of files of its own: Triton reads the source of what it compiles."""

    folder: Path

    def kernel(self, name: str) -> ModuleType:
        """The module of the kernels with a part left out."""
        number = [*PARTS].index(name)
        modules = {f"{PACKAGE}.{file}": f"decode_part_{number}_{file}" for file in FILES}
        module = None
        for file, text in patched(PARTS[name]).items():
            for original, ours in modules.items():
                text = text.replace(f"from {original} import", f"from {ours} import")
            path = self.folder / f"{modules[f'{PACKAGE}.{file}']}.py"
            path.write_text(text, encoding="utf-8")
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module
            spec.loader.exec_module(module)
        assert module is not None
        return module


@contextmanager
def left_out(name: str) -> Iterator[None]:
    """`cached_attention` on a GPU runs the kernel with that part left out."""
    with TemporaryDirectory() as folder:
        kernel = Variants(Path(folder)).kernel(name)
        with patch(f"{PACKAGE}.triton.attend", kernel.attend):
            yield
