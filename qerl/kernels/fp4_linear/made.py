"""What a product may be given in place of x, to make x of on the way into it: work that would else be a launch of its own.

Legend: T tokens, I inputs of the product, X = 2 I.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gated:
    """x = silu(gate) * up, of [T, X], gate and up side by side; rounded as `qerl.kernels.activation.silu_mul` rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Normed:
    """x = `qerl.kernels.rms_norm.rms_norm` of the stream, which is what is given plus the residual; rounded as `add_rms_norm` rounds."""

    residual_TI: Tensor | None
    """None where what is given is the stream itself."""
    stream_TI: Tensor
    """Where the stream goes; what is given, without a residual."""
    weight_I: Tensor
    """float32 scale."""
    eps: float
    z: Tensor | None
    """float32 [I], or [T, I]: added to the scale."""

    def tensors(self) -> Iterator[Tensor]:
        """All of them."""
        yield from (self.stream_TI, self.weight_I)
        if self.residual_TI is not None:
            yield self.residual_TI
        if self.z is not None:
            yield self.z


Made: TypeAlias = Gated | Normed
