"""Twins of decode and middle that tell what a report of racecheck is worth: what `scripts/sanitize.py` runs beside its cases.

racecheck is asked about the same kernels, changed in a few places of their source:

* `plain`: what the tool may misread is put in a plainer way, which makes no order that the kernel does not have between the accesses reported. In decode
  no warp arrives at a named barrier without waiting there. In middle the threads that tell and learn that an adapter's B is there do so at a named
  barrier, and every lane tells for itself that it has read it, instead of lane 0 for all behind a `__syncwarp`. A store and a load without an
  order between them would be reported here too.
* `fault`: an order is taken out: in decode the last sums are made without the block's barrier and in front of the wait for what other blocks sent (behind
  that wait the tool may say nothing of a barrier that is missing), and in middle B is read in front of the wait. The tool must report it, else its silence
  says nothing.
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
_FINISH = "    finish(p, s, of, round, tiles, first, last, warp, lane);\n"
_SHARES = 'asm volatile("bar.arrive 2,'
_TOLD = "      tell_laid(feed.adapter_full + 8 * place);\n"
_LEARNT = "      barrier_wait(feed.adapter_full + 8 * place, uses / PLACES & 1);\n"
_READ = "      const u64 h = h_operand("
_FREE = "if (lane == 0) arrive(feed.adapter_empty + 8 * place);\n"
_FREE_FOR_ALL = "      __syncwarp();  // lane 0 speaks for the reads of all\n      " + _FREE
_COUNTS = "i < 2 || (i >= 4 && i < 4 + PLACES) ? HELPERS : WARPS"
_LANDED = "      copy_async_commit();\n      copy_async_wait<0>();\n      laid_visible();\n      "


def _named(kind: str) -> str:
    """At a named barrier of the place's own; the kernel's are below 8."""
    return f'asm volatile("bar.{kind} %0, %1;" ::"r"(8 + place), "n"(CONSUMERS + HELPERS) : "memory");\n'


CHANGES = {
    "plain": {
        "decode": ((_SHARES, _SHARES.replace("arrive", "sync")),),
        "middle": (
            (_TOLD, _LANDED + _named("arrive")),
            (_LEARNT, _named("sync")),
            (_FREE_FOR_ALL, _FREE.removeprefix("if (lane == 0) ")),
            (_COUNTS, _COUNTS.replace(": WARPS", ": i >= 4 + PLACES ? CONSUMERS : WARPS")),
        ),
    },
    "fault": {
        "decode": ((_BLOCK + _SUMS + _FINISH, _FINISH + _SUMS),),
        "middle": ((_LEARNT, ""), (_READ, _LEARNT + _READ)),
    },
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
