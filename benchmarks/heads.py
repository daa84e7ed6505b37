"""Float32 logits of LM heads by format: part of `benchmarks/kernels.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.synthetic import normal
from qerl.formats import dequantize, get_format
from qerl.kernels.token_logprobs import Head, head_logits, reference

if TYPE_CHECKING:
    from benchmarks.kernels import Bench

HEAD_ROWS = (1, 8, 64, 256)
NATURAL, TILES, DENSE = "+natural", "+tiles", "+dense"
"""Behind the name of a format: its natural order, or its tiles, whichever the device has by default; tiles that are unpacked and multiplied by cuBLAS
whatever the rows."""
HEADS = {"bf16": 2.0, **dict.fromkeys(("fp8", "fp8" + NATURAL, "fp8" + TILES, "fp8" + DENSE), 1.0), "nvfp4": 0.5625}
"""Formats, and their bytes a weight."""
MEASURED = ("bf16", "fp8", "nvfp4")
LARGEST_ERROR = 2e-5
CHECKED = 33_801
"""Rows of a head that is compared with float64: few, but so many that kernels have the shapes that they have for large ones, and no whole tile at the end."""


def head_rows(
    bench: Bench, name: str, shape: tuple[int, int], tokens: Sequence[int], formats: Sequence[str] = MEASURED
) -> None:
    """One row a number of tokens: times of all formats beside their floors. A small head of each is compared with float64 first."""
    times: dict[int, dict[str, Any]] = {}
    for fmt in formats:
        weight_bytes = HEADS[fmt]
        if not bench.time_left(f"{name} {fmt} head"):
            break
        _check(bench, fmt, (min(shape[0], CHECKED), shape[1]), tokens)
        size = shape[0] * shape[1] * weight_bytes
        first = _head(bench, fmt, shape)
        heads = [first, *(_copied(first) for _ in range(int(3 * bench.cache_bytes // size)))]
        for count in tokens:
            hidden_ND = normal(count, shape[1], scale=1.0, device=bench.device)

            def walk(heads: Sequence[Head] = heads, hidden_ND: Tensor = hidden_ND, fmt: str = fmt) -> None:
                for head in heads:
                    _logits(fmt, hidden_ND, head)

            moved = size + count * (2 * shape[1] + 4 * shape[0])
            floor = max(moved / bench.copy_rate, 2.0 * count * shape[0] * shape[1] / bench.matrix_rate)
            cell = dict(zip(("us", "us_p20", "us_p80"), bench.times(walk, len(heads)), strict=True))
            times.setdefault(count, {})[fmt] = cell | {"floor_us": 1e6 * floor}
    for count, cells in times.items():
        bench.rows.append({"head": name, "shape": list(shape), "rows": count, **cells})
        printed = [
            f"{fmt} {cell['us']:.1f} us ({cell['floor_us'] / cell['us']:.0%} of the floor"
            + (f", {cells['bf16']['us'] / cell['us']:.2f}x bf16)" if "bf16" in cells else ")")
            for fmt, cell in cells.items()
        ]
        print(f"{name:>5} head M {count:<5} " + "  ".join(printed), flush=True)
    bench.write()


def _check(bench: Bench, fmt: str, shape: tuple[int, int], tokens: Sequence[int]) -> None:
    head = _head(bench, fmt, shape)
    exact_VD = head.double() if isinstance(head, Tensor) else dequantize(head, torch.float64)
    for count in tokens:
        hidden_ND = normal(count, shape[1], scale=1.0, device=bench.device)
        exact_NV = hidden_ND.double() @ exact_VD.T
        error = float((_logits(fmt, hidden_ND, head).double() - exact_NV).norm() / exact_NV.norm())
        assert error < LARGEST_ERROR, f"{fmt} head, {count} rows: error {error:.2e}"


def _head(bench: Bench, fmt: str, shape: tuple[int, int]) -> Head:
    dense_VD = normal(*shape, scale=0.02, device=bench.device)
    if fmt == "bf16":
        return dense_VD
    packing = get_format(fmt.partition("+")[0])
    packed = packing.quantize(dense_VD)
    if fmt.endswith(NATURAL):
        return packed
    return packing.tiled(packed) if fmt.endswith((TILES, DENSE)) else packing.for_device(packed)


def _logits(fmt: str, hidden_ND: Tensor, head: Head) -> Tensor:
    return reference.head_logits(hidden_ND, head, None) if fmt.endswith(DENSE) else head_logits(hidden_ND, head)


def _copied(head: Head) -> Head:
    """The same head in memory of its own."""
    if isinstance(head, Tensor):
        return head.clone()
    return replace(head, tensors={key: tensor.clone() for key, tensor in head.tensors.items()})
