"""What the CUDA kernels of this operation share on one device: compiled code and buffers of torch's allocator.

One stream at a time may use it. A call on another stream waits for those on the stream before; replays of captured graphs, and branches of one
capture, must take turns by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from qerl.formats import PackedWeight
from qerl.kernels.cuda import (
    Kernel,
    Launch,
    architecture,
    compile_cuda,
    multiprocessors,
    shared_memory_limit,
    stream_handle,
)
from qerl.kernels.fp4_linear.geometry import Geometry
from qerl.kernels.fp4_linear.tiled import TILED

SCALE_BASE = 0x70007000
"""What the kernels add to the bits of two scales; see `expand_scales` in cuda/format.cuh."""


TILE_COUNTERS = 16384
"""Output tiles of which the middle kernel may count the parts."""
LEAST_SUMS = 1 << 18
"""Numbers of the partial sums that the decode kernel's blocks tell each other, at most: as many as four adapters of rank 128 need."""
BLOCK_SUMS = 2 * 64 * 2 * 64
"""Numbers of such sums of a block of the middle kernel, at most: two places for 128 rows x 64 tokens, or 256 x 32."""
DECODE_COUNTERS = TILE_COUNTERS
"""With this one the decode kernel counts the blocks that have read h."""
H_COUNTERS = TILE_COUNTERS + 4
"""The first of two that the middle kernel counts pieces of h with."""
_COUNTERS = TILE_COUNTERS + 8


class Workspace:
    """Kernels and buffers of one device. Made by `workspace`."""

    def __init__(self, device: torch.device):
        self.device = device
        self.multiprocessors = multiprocessors(device)
        self.shared_limit = shared_memory_limit(device)
        self.geometries: dict[tuple[int, str, tuple[int, int], int], Geometry | None] = {}
        """What the decode kernel chose, by the eights of rows of x, the weight's format and shape, and the rows of the stacked A."""
        self._scratch: Tensor | None = None
        self._counters: Tensor | None = None
        self._sums: Tensor | None = None
        self._stream: tuple[int, torch.cuda.Stream] | None = None
        """The stream of the last call outside a capture, with its handle in front."""
        self._kept: list[Tensor] = []
        """Counters of captures that were the first to ask: of the graph's memory, which must not go to anything else."""
        self._alphas: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._clusters: dict[tuple[int, int], int] = {}

    def scratch(self, rows: int, columns: int) -> Tensor:
        """bfloat16 [rows, columns], overwritten by the next call; as large as the largest layer that asked.

        While a graph is captured the memory is the graph's own, since a later, larger layer would free the shared one.
        """
        if torch.cuda.is_current_stream_capturing():
            return torch.empty(rows, columns, dtype=torch.bfloat16, device=self.device)
        self._take_turn()
        if self._scratch is None or self._scratch.numel() < rows * columns:
            self._scratch = None
            self._scratch = torch.empty(rows * columns, dtype=torch.bfloat16, device=self.device)
        return self._scratch[: rows * columns].view(rows, columns)

    def counters(self) -> Tensor:
        """int32 zeros: those of tiles and those of h; kernels leave zeros behind. Graphs share them, unless a capture is the first to ask."""
        capturing = torch.cuda.is_current_stream_capturing()
        if not capturing:
            self._take_turn()
        if self._counters is not None:
            return self._counters
        counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=self.device)
        if capturing:
            self._kept.append(counters)
        else:
            self._counters = counters
        return counters

    def sums(self, numbers: int) -> Tensor:
        """float32 of the bits that stand for no number: kernels leave them behind. Graphs share them, unless a capture is the first to ask."""
        if self._sums is not None and self._sums.numel() >= numbers:
            return self._sums
        numbers = max(numbers, LEAST_SUMS, BLOCK_SUMS * self.multiprocessors)
        sums = torch.full((numbers,), -1, dtype=torch.int32, device=self.device)
        if self._sums is not None or torch.cuda.is_current_stream_capturing():
            self._kept.append(sums)
        else:
            self._sums = sums
        return sums

    def _take_turn(self) -> None:
        """Let the current stream, if it is another than that of the last call, wait for what that one was given."""
        handle = stream_handle(self.device)
        if self._stream is not None and handle == self._stream[0]:
            return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None:
            stream.wait_stream(self._stream[1])
            for buffer in (self._scratch, self._counters, self._sums):
                if buffer is not None:
                    # Freed, its memory goes to nobody before this stream is done with it, either.
                    buffer.record_stream(stream)
        self._stream = handle, stream

    def release(self) -> None:
        """Give the scratch back to torch's allocator; the next use takes it again."""
        self._scratch = None

    def alphas(self, weight: PackedWeight) -> tuple[float, ...]:
        """1 / divisor of every segment. The first call of a weight that stores divisors waits for the device."""
        scale = weight.tensors.get("global_scale")
        if scale is None:
            return (1.0 / TILED[weight.format].divisor,) * len(weight.segments)
        found = self._alphas.get(scale)
        if found is None:
            found = self._alphas[scale] = tuple((1.0 / scale.double()).tolist())
        return found

    def resident_clusters(self, launch: Launch) -> int:
        """Most clusters of this geometry that run at the same time on the whole device."""
        key = (launch.cluster, launch.shared)
        if key not in self._clusters:
            self._clusters[key] = compiled(self.device, "probe").resident_clusters(launch)
        return self._clusters[key]


@cache
def workspace(device: torch.device) -> Workspace:
    """The one workspace of a device."""
    return Workspace(device)


@cache
def compiled(device: torch.device, name: str, defines: tuple[tuple[str, int], ...] = (), extra: str = "") -> Kernel:
    """The kernel `name` of `cuda/name.cu`, compiled for a device with the given macros and `extra` source in front of it.

    Raises:
        KernelUnavailableError: it cannot be compiled or loaded.
    """
    return Kernel(compile_source(name, architecture(device), dict(defines), extra), name)


class Code(NamedTuple):
    """What `compiled` makes a kernel of."""

    name: str
    defines: tuple[tuple[str, int], ...]
    extra: str = ""


_IN_FRONT = {
    "dequantize": ("tile", "format"),
    "decode": ("tile", "format", "layer", "decode"),
    "middle": ("tile", "format", "layer", "middle", "team", "adapters"),
    "shrink": ("tile", "layer"),
}
"""Kernel -> the `.cuh` files that its source goes on from; NVRTC is given one text without includes."""


def source_files(name: str) -> dict[str, str]:
    """Text of `cuda/name.cu` and of what it needs in front of it, by file, in order."""
    folder = resources.files("qerl.kernels.fp4_linear") / "cuda"
    files = [*(f"{part}.cuh" for part in _IN_FRONT.get(name, ())), f"{name}.cu"]
    return {file: (folder / file).read_text(encoding="utf-8") for file in files}


def whole_source(name: str, extra: str = "") -> str:
    """`cuda/name.cu` with what it needs in front of it, and `extra` between them."""
    *front, kernel = source_files(name).values()
    return "".join(front) + extra + kernel


def compile_source(name: str, arch: str, defines: Mapping[str, int], extra: str = "", *, quiet: bool = False) -> bytes:
    """Machine code of `whole_source(name, extra)`; `quiet` without a line of progress."""
    return compile_cuda(whole_source(name, extra), name=name, arch=arch, defines=defines, quiet=quiet)
