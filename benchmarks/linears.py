"""The linear layers of one decoder layer, in several formats, that `benchmarks/kernels.py` times; and the same in bfloat16 with separate adapters."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.synthetic import normal
from benchmarks.timing import host_seconds
from qerl.formats import PackedWeight, get_format, tiles
from qerl.formats.nvfp4 import Nvfp4Format
from qerl.kernels.fp4_linear import AdapterPart, keep, keeps

KEPT = "+kept"
"""Behind the name of a format: V is kept beside the weights of which the product keeps it (`quant.dense_cache`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One fused projection of a layer."""

    weights: dict[str, PackedWeight]
    """By format, the first one first."""
    dense_OI: Tensor
    bias_O: Tensor | None
    parts: tuple[AdapterPart, ...]

    @property
    def weight(self) -> PackedWeight:
        """In the first format."""
        return next(iter(self.weights.values()))


def projections(size: dict[str, Any]) -> list[tuple[tuple[int, ...], int]]:
    """(rows of the fused parts, inputs) of the four products of a layer."""
    hidden, inner = size["hidden_size"], size["intermediate_size"]
    heads, kv_heads = size["heads"]
    kv = hidden // heads * kv_heads
    return [((hidden, kv, kv), hidden), ((hidden,), hidden), ((inner, inner), hidden), ((hidden,), inner)]


def adapters(segments: Sequence[int], d_in: int, rank: int, device: torch.device) -> tuple[AdapterPart, ...]:
    a_RI = normal(len(segments) * rank, d_in, scale=d_in**-0.5, device=device)
    stops = [sum(segments[: index + 1]) for index in range(len(segments))]
    return tuple(
        AdapterPart(
            start=stop - rows,
            stop=stop,
            a_RI=a_RI,
            b_OR=normal(rows, rank, scale=0.05, device=device),
            scale=1.0,
            rank_start=index * rank,
        )
        for index, (rows, stop) in enumerate(zip(segments, stops, strict=True))
    )


def layer(size: dict[str, Any], rank: int, device: torch.device, formats: Sequence[str], *, real: bool) -> list[Linear]:
    """The four products of a layer; `real` weights are quantized ones, others, of NVFP4, random bytes beside an unrelated dense weight."""
    found = []
    for index, (segments, d_in) in enumerate(projections(size)):
        shape = (sum(segments), d_in)
        dense_OI = normal(*shape, scale=0.02, device=device)
        weights = {}
        for name in formats:
            fmt = get_format(name.removesuffix(KEPT))
            if real or device.type == "cpu" or not isinstance(fmt, Nvfp4Format):
                weights[name] = _held(fmt.for_device(fmt.quantize(dense_OI, segments=segments)), name)
                continue
            weights[name] = _held(random_weight(fmt, segments, d_in, device), name)
        bias_O = normal(shape[0], scale=1.0, device=device) if index == 0 else None
        parts = adapters(segments, d_in, rank, device) if rank else ()
        found.append(Linear(weights=weights, dense_OI=dense_OI, bias_O=bias_O, parts=parts))
    return found


def random_weight(fmt: Nvfp4Format, segments: tuple[int, ...], d_in: int, device: torch.device) -> PackedWeight:
    """Tiles of random bytes, scales between 2^-3 and 2^2."""
    shape = (sum(segments), d_in)
    data = torch.randint(0, 256, fmt.tile_layout.shape(*shape), dtype=torch.uint8, device=device)
    data[..., tiles.CODE_BYTES :] = 152 + data[..., tiles.CODE_BYTES :] % 40
    tensors = {"tiles": data, "global_scale": torch.full((len(segments),), 2e4, device=device)}
    return PackedWeight(format=fmt.name, shape=shape, tensors=tensors, segments=segments, order="tiles")


def _held(weight: PackedWeight, name: str) -> PackedWeight:
    return keep(weight) if name.endswith(KEPT) and keeps(weight, torch.bfloat16) else weight


def separate(y_TO: Tensor, x_TI: Tensor, parts: Sequence[AdapterPart]) -> Tensor:
    """Adapters after a product that does not know of them; y is changed."""
    if parts:
        h_TR = x_TI @ parts[0].a_RI.T
        for part in parts:
            ranks = slice(part.rank_start, part.rank_start + part.b_OR.shape[1])
            y_TO[:, part.start : part.stop].addmm_(h_TR[:, ranks], part.b_OR.T, alpha=part.scale)
    return y_TO


def bfloat16(linear: Linear, x_TI: Tensor, parts: Sequence[AdapterPart]) -> Tensor:
    return separate(torch.nn.functional.linear(x_TI, linear.dense_OI, linear.bias_O), x_TI, parts)


def exact_product(linear: Linear, x_TI: Tensor, exact_OI: Tensor) -> Tensor:
    """y in float64 with the weight `exact_OI`, bias and adapters; h is rounded to bfloat16, as all kernels round it."""
    y_TO = x_TI.double() @ exact_OI.T
    if linear.bias_O is not None:
        y_TO += linear.bias_O.double()
    for part in linear.parts:
        a = part.a_RI[part.rank_start : part.rank_start + part.b_OR.shape[1]].double()
        h_TR = (x_TI.double() @ a.T).bfloat16().double()
        y_TO[:, part.start : part.stop] += part.scale * h_TR @ part.b_OR.double().T
    return y_TO


def floor_seconds(
    segments: Sequence[int], d_in: int, rank: int, count: int, copy_rate: float, matrix_rate: float
) -> float:
    """Seconds of a product of `count` rows of x: everything read or written once, or all multiplications, whichever takes longer."""
    d_out = sum(segments)
    moved = d_out * d_in * 0.5625 + 2 * count * (d_in + d_out) + 2 * rank * (len(segments) * d_in + d_out)
    products = 2.0 * count * (d_out * d_in + rank * (len(segments) * d_in + d_out))
    return max(moved / copy_rate, products / matrix_rate)


def rates(device: torch.device) -> tuple[float, float]:
    """(bytes a second of a copy, operations a second of a bfloat16 matrix product)."""
    on_cuda = device.type == "cuda"
    source = torch.empty(1 << (30 if on_cuda else 20), dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    width = 8192 if on_cuda else 64
    a, b = (normal(width, width, scale=1.0, device=device) for _ in range(2))
    found = []
    for work, run in ((2.0 * source.numel(), lambda: target.copy_(source)), (2.0 * width**3, lambda: a @ b)):
        for _ in range(3):
            run()
        found.append(work / statistics.median(host_seconds(run) for _ in range(10)))
    return found[0], found[1]
