"""The LM head as the kernels take it: a dense matrix [V, D], or a packed weight that is unpacked a stretch of rows at a time.

Legend: V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from qerl.formats import PackedWeight, get_format, tiles
from qerl.kernels.fp4_linear import dense

Head: TypeAlias = Tensor | PackedWeight

STRETCH_ELEMENTS = 1 << 24
"""Most weights unpacked at once: 64 MiB of float32."""


def row_stretches(head: PackedWeight) -> Iterator[slice]:
    """Slices that cover all rows in order, of about 16 million weights each; they begin at multiples of 16 rows where they are long."""
    vocab_size, hidden_size = head.shape
    step = max(1, STRETCH_ELEMENTS // hidden_size)
    step -= step % tiles.ROWS if step > tiles.ROWS else 0
    for start in range(0, vocab_size, step):
        yield slice(start, min(start + step, vocab_size))


def factored_rows(head: PackedWeight, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """(rows, values [v, D] in `dtype`, row divisor float32 [v] or None) of all rows in order; see `WeightFormat.factored`."""
    fmt = get_format(head.format)
    if head.order == "tiles" and dtype == torch.bfloat16 and head.device.type == "cuda":
        divisor_V = dense.divisors(head)
        for rows in row_stretches(head):
            yield rows, dense.unpacked_rows(head, rows.start, rows.stop), divisor_V[rows]
        return
    for rows in row_stretches(head):
        yield rows, *fmt.factored(fmt.rows(head, rows.start, rows.stop), dtype)
