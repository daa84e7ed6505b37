"""How much of what young adapters add is in outputs of bfloat16, on average. They add less than half of an output's spacing, which is nothing where
a product is rounded before they are added, and all of it where the sum is rounded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qerl.kernels.fp4_linear import AdapterPart

MOST = 0.2
"""Of an output's spacing, what adapters add at most: to an element. All of them add, none takes away."""


def positive(rows: int, d_in: int, device: str, seed: int = 7) -> Tensor:
    """A weight, bfloat16, whose products with positive x are far from 0, so that spacings of its outputs differ little."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return (torch.randn(rows, d_in, generator=generator, device=device) + 0.5).bfloat16()


def spacing(y: Tensor) -> Tensor:
    """Of bfloat16 at y, float64."""
    return torch.ldexp(torch.ones_like(y, dtype=torch.float64), torch.frexp(y.double())[1] - 8)


def share_kept(
    product: Callable[[Tensor, Tensor | None, Sequence[AdapterPart]], Tensor],
    values_OI: Tensor,
    segments: Sequence[int],
    rows: int,
    *,
    biased: bool = False,
    rank: int = 8,
    outputs: int = 20_000,
) -> float:
    """1 for all of it.

    Args:
        product: y of x, bias and adapters.
        values_OI: the weight, as `positive` or a format's rounding of it.
        segments: its output rows, each with an adapter, which share one stacked A.
        rows: of x in a call.
        outputs: numbers to average over, at least; calls are repeated for them. The mean of n is off by about 3 / sqrt(n), since each output has all of a
            spacing or nothing of it.
    """
    (d_out, d_in), device = values_OI.shape, str(values_OI.device)
    kept = added = 0.0
    for seed in range(-(-outputs // (rows * d_out))):
        generator = torch.Generator(device=device).manual_seed(seed)

        def drawn(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.rand(shape, generator=generator, device=device)

        x_TI = (drawn(rows, d_in) + 0.5).bfloat16()
        bias_O = drawn(d_out).bfloat16() if biased else None
        a_RI = (drawn(rank * len(segments), d_in) / d_in).bfloat16()
        h_TR = (x_TI.double() @ a_RI.double().T).bfloat16().double()
        exact_TO = x_TI.double() @ values_OI.double().T + (0 if bias_O is None else bias_O.double())
        parts, c_TO, start = [], torch.empty(exact_TO.shape, dtype=torch.float64, device=device), 0
        for index, count in enumerate(segments):
            b_OR = drawn(count, rank) + 0.5
            own, ranks = slice(start, start + count), slice(rank * index, rank * (index + 1))
            largest = (h_TR[:, ranks] @ b_OR.double().T / spacing(exact_TO[:, own])).max()
            b_OR = (b_OR * (MOST / 1.5 / largest)).bfloat16()
            c_TO[:, own] = 1.5 * h_TR[:, ranks] @ b_OR.double().T
            parts.append(
                AdapterPart(
                    start=own.start, stop=own.stop, a_RI=a_RI, b_OR=b_OR, scale=1.5, rank_start=rank * index
                )
            )  # fmt: skip
            start += count
        assert (c_TO > 0).all() and (c_TO / spacing(exact_TO)).max() < MOST + 0.01
        with_TO, without_TO = product(x_TI, bias_O, parts), product(x_TI, bias_O, ())
        assert with_TO.dtype == without_TO.dtype == torch.bfloat16
        kept += float((with_TO.double() - without_TO.double()).sum())
        added += float(c_TO.sum())
    return kept / added
