"""Sizes and inputs of the packed linear layer's tests, and what float64 makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qerl.kernels.fp4_linear import AdapterPart

# Model -> (hidden, q, k or v, inner): widths of its projections. Mistral 7B has those of Llama-3 8B.
PUBLISHED = {
    "Qwen2.5 0.5B": (896, 896, 128, 4864),
    "Qwen2.5 1.5B": (1536, 1536, 256, 8960),
    "Qwen2.5 3B": (2048, 2048, 256, 11008),
    "Qwen2.5 7B": (3584, 3584, 512, 18944),
    "Qwen2.5 14B": (5120, 5120, 1024, 13824),
    "Qwen2.5 32B": (5120, 5120, 1024, 27648),
    "Qwen2.5 72B": (8192, 8192, 1024, 29568),
    "Qwen3 0.6B": (1024, 2048, 1024, 3072),
    "Qwen3 1.7B": (2048, 2048, 1024, 6144),
    "Qwen3 4B": (2560, 4096, 1024, 9728),
    "Qwen3 8B": (4096, 4096, 1024, 12288),
    "Qwen3 14B": (5120, 5120, 1024, 17408),
    "Qwen3 32B": (5120, 8192, 1024, 25600),
    "Llama-3 1B": (2048, 2048, 512, 8192),
    "Llama-3 3B": (3072, 3072, 1024, 8192),
    "Llama-3 8B": (4096, 4096, 1024, 14336),
    "Llama-3 70B": (8192, 8192, 1024, 28672),
    "Mistral 12B": (5120, 4096, 1024, 14336),
    "Mistral 24B": (5120, 4096, 1024, 32768),
    "Mistral 123B": (12288, 12288, 1024, 28672),
}


def projections() -> list[tuple[tuple[int, ...], int]]:
    """(segments, inputs) of q k v, o, gate up and down of every published size, each once."""
    found = {}
    for hidden, query, kv, inner in PUBLISHED.values():
        for segments, d_in in (
            ((query, kv, kv), hidden),
            ((hidden,), query),
            ((inner, inner), hidden),
            ((hidden,), inner),
        ):
            found[segments, d_in] = None
    return list(found)


def cuda(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers on the GPU, bfloat16."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, device="cuda")).bfloat16()


def adapters_of(segments, d_in, rank, members=None, scales: Sequence[float] = (1.5, 1.5, 1.5)) -> list[AdapterPart]:
    """Adapters on the chosen segments, all by default, on one stacked A; of one rank, or of a rank for each of those chosen."""
    stops = [sum(segments[: i + 1]) for i in range(len(segments))]
    chosen = [i for i in range(len(segments)) if members is None or i in members]
    ranks = [rank] * len(chosen) if isinstance(rank, int) else list(rank)
    a = cuda(sum(ranks), d_in, seed=1, scale=d_in**-0.5)
    return [
        AdapterPart(
            start=stops[i] - segments[i],
            stop=stops[i],
            a_RI=a,
            b_OR=cuda(segments[i], own, seed=2 + i, scale=0.1),
            scale=scales[i],
            rank_start=sum(ranks[:index]),
        )
        for index, (i, own) in enumerate(zip(chosen, ranks, strict=True))
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
