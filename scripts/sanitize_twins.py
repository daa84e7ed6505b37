"""Twins of decode and middle that tell what a report of racecheck is worth: what `scripts/sanitize.py` runs beside its cases.

Both kernels make order by waits at mbarriers, which racecheck follows poorly (false reports of them are in its release notes up to 2026.3). So it
is asked about the same kernels, changed in one place of their source:

* `plain`: the order is made by what the tool follows, and by no more of it. In decode the wait at the mbarrier stands in front of the block's barrier
  instead of behind it. In middle every lane tells for itself that it has read an adapter's B, instead of lane 0 for all behind a
  `__syncwarp`. A store and a load without an order between them would be reported here too.
* `fault`: that order is taken out: no barrier of the block in decode, and B read in front of the wait in middle. The tool must report it, else its
  silence says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from qerl.kernels.cuda import Kernel, architecture, compile_cuda
from qerl.kernels.fp4_linear import decode, middle
from qerl.kernels.fp4_linear.workspace import whole_source

_BLOCK = "    __syncthreads();\n"
_SUMS = "#if CLUSTER > 1\n    barrier_wait(smem_address(&arrived), parity);\n#endif\n"
_FREE = "if (lane == 0) arrive(feed.adapter_empty);\n"
_FREE_FOR_ALL = "      __syncwarp();  // lane 0 speaks for the reads of all\n      " + _FREE
_COUNTS = "i < 2 || i == 4 ? HELPERS : WARPS"
_WAIT = "      barrier_wait(feed.adapter_full, uses & 1);\n"
_READ = "      const u64 h = h_operand("
CHANGES = {
    "plain": {
        "decode": ((_BLOCK + _SUMS, _SUMS + _BLOCK),),
        "middle": (
            (_FREE_FOR_ALL, _FREE.removeprefix("if (lane == 0) ")),
            (_COUNTS, _COUNTS.replace(": WARPS", ": i == 5 ? CONSUMERS : WARPS")),
        ),
    },
    "fault": {"decode": ((_BLOCK + _SUMS, _SUMS),), "middle": ((_WAIT, ""), (_READ, _WAIT + _READ))},
}
"""Twin -> kernel -> what is replaced in its source by what."""
KERNELS = tuple(CHANGES["plain"])


def source_of(name: str, twin: str, extra: str = "") -> str:
    """CUDA C++ of a twin; its function is `name_twin`."""
    source = whole_source(name, extra)
    for before, after in (*CHANGES[twin][name], (f" {name}(const", f" {name}_{twin}(const")):
        assert source.count(before) == 1, (name, before)
        source = source.replace(before, after)
    return source


@contextmanager
def instead(twin: str) -> Iterator[None]:
    """Inside, both kernels are their twins."""

    @cache
    def compiled(device: torch.device, name: str, defines: tuple[tuple[str, int], ...] = (), extra: str = "") -> Kernel:
        function = f"{name}_{twin}"
        code = compile_cuda(
            source_of(name, twin, extra), name=function, arch=architecture(device), defines=dict(defines)
        )
        return Kernel(code, function)

    whole = {module: module.compiled for module in (decode, middle)}
    try:
        for module in whole:
            module.compiled = compiled
        yield
    finally:
        for module, before in whole.items():
            module.compiled = before
