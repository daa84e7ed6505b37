"""Float32 logits of LM heads by format: part of `benchmarks/kernels.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from synthetic import normal
from torch import Tensor

from qerl.formats import dequantize, get_format
from qerl.kernels.token_logprobs import Head, head_logits

if TYPE_CHECKING:
    from kernels import Bench

HEAD_ROWS = (1, 8, 64, 256)
HEADS = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
"""Formats, and their bytes a weight."""
LARGEST_ERROR = 2e-5


def head_rows(bench: Bench, name: str, shape: tuple[int, int], tokens: Sequence[int]) -> None:
    """One row a number of tokens: times of all formats beside their floors. A small head of each is compared with float64 first."""
    times: dict[int, dict[str, Any]] = {}
    for fmt, weight_bytes in HEADS.items():
        if not bench.time_left(f"{name} {fmt} head"):
            break
        _check(bench, fmt, (min(shape[0], 4999), shape[1]), tokens)
        size = shape[0] * shape[1] * weight_bytes
        first = _head(bench, fmt, shape)
        heads = [first, *(_copied(first) for _ in range(int(3 * bench.cache_bytes // size)))]
        for count in tokens:
            hidden_ND = normal(count, shape[1], scale=1.0, device=bench.device)

            def walk(heads: Sequence[Head] = heads, hidden_ND: Tensor = hidden_ND) -> None:
                for head in heads:
                    head_logits(hidden_ND, head)

            moved = size + count * (2 * shape[1] + 4 * shape[0])
            floor = max(moved / bench.copy_rate, 2.0 * count * shape[0] * shape[1] / bench.matrix_rate)
            cell = dict(zip(("us", "us_p20", "us_p80"), bench.times(walk, len(heads)), strict=True))
            times.setdefault(count, {})[fmt] = cell | {"floor_us": 1e6 * floor}
    for count, formats in times.items():
        bench.rows.append({"head": name, "shape": list(shape), "rows": count, **formats})
        cells = [
            f"{fmt} {cell['us']:.1f} us ({cell['floor_us'] / cell['us']:.0%} of the floor)"
            for fmt, cell in formats.items()
        ]
        print(f"{name:>5} head M {count:<5} " + "  ".join(cells), flush=True)
    bench.write()


def _check(bench: Bench, fmt: str, shape: tuple[int, int], tokens: Sequence[int]) -> None:
    head = _head(bench, fmt, shape)
    exact_VD = head.double() if isinstance(head, Tensor) else dequantize(head, torch.float64)
    for count in tokens:
        hidden_ND = normal(count, shape[1], scale=1.0, device=bench.device)
        reference = hidden_ND.double() @ exact_VD.T
        error = float((head_logits(hidden_ND, head).double() - reference).norm() / reference.norm())
        assert error < LARGEST_ERROR, f"{fmt} head, {count} rows: error {error:.2e}"


def _head(bench: Bench, fmt: str, shape: tuple[int, int]) -> Head:
    dense_VD = normal(*shape, scale=0.02, device=bench.device)
    return dense_VD if fmt == "bf16" else get_format(fmt).for_device(get_format(fmt).quantize(dense_VD))


def _copied(head: Head) -> Head:
    """The same head in memory of its own."""
    if isinstance(head, Tensor):
        return head.clone()
    return replace(head, tensors={key: tensor.clone() for key, tensor in head.tensors.items()})
