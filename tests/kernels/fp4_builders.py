"""Inputs of the packed linear layer's GPU tests, and what float64 makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qerl.kernels.fp4_linear import AdapterPart


def cuda(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers on the GPU, bfloat16."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, device="cuda")).bfloat16()


def adapters_of(segments, d_in, rank, members=None, scales: Sequence[float] = (1.5, 1.5, 1.5)) -> list[AdapterPart]:
    """Adapters on the chosen segments, all by default, on one stacked A."""
    stops = [sum(segments[: i + 1]) for i in range(len(segments))]
    chosen = [i for i in range(len(segments)) if members is None or i in members]
    a = cuda(len(chosen) * rank, d_in, seed=1, scale=d_in**-0.5)
    return [
        AdapterPart(
            start=stops[i] - segments[i],
            stop=stops[i],
            a_RI=a,
            b_OR=cuda(segments[i], rank, seed=2 + i, scale=0.1),
            scale=scales[i],
            rank_start=index * rank,
        )
        for index, i in enumerate(chosen)
    ]


def exact_product(x, dense_OI, bias=None, parts=()) -> torch.Tensor:
    """x W^T + bias + adapters in float64, with h rounded to bfloat16 as everywhere."""
    y = x.double() @ dense_OI.T
    if bias is not None:
        y += bias.double()
    for part in parts:
        a = part.a_RI[part.rank_start : part.rank_start + part.b_OR.shape[1]].double()
        h = (x.double() @ a.T).bfloat16().double()
        y[:, part.start : part.stop] += part.scale * (h @ part.b_OR.double().T)
    return y
