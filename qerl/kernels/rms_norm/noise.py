"""Noise of a norm's scale in the forms that a kernel can read: a vector, a table of vectors, or keys to draw from.

Legend: T tokens (rows of the norm's input), R draws, D channels.

All values that may change while a captured graph is replayed stand in tensors on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from qerl.kernels import philox


@dataclass(frozen=True, slots=True, kw_only=True)
class TableNoise:
    """Draws that are in memory: token t sees row ``rows_T[t]``, or nothing where it is not noisy."""

    z_RD: Tensor
    """float32 [R, D]."""
    rows_T: Tensor | None = None
    """int64 [T]; None when R is 1 (one draw for all) or T (one a token)."""
    noisy_T: Tensor | None = None
    """bool [T]; None when all tokens are noisy."""

    def z(self) -> Tensor:
        """float32 [T, D], or [1, D] where nothing tells the tokens apart."""
        z_TD = self.z_RD if self.rows_T is None else self.z_RD.index_select(0, self.rows_T)
        return _masked(z_TD, self.noisy_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedNoise:
    """Draws that a kernel makes where it needs them: z = spread * normal at counter (c0, c1, c2, c3), c0 = channel // 4.

    Draw r stands at ``c1 + c1_R[r]``, ``c2_R[r]``, ``c3_1``; it equals ``philox.normal_rows`` at that counter times the spread,
    on CUDA within 2e-6 at spread 1.
    """

    key_2: Tensor
    """int64 [2], the Philox key: ``philox.stream_key``."""
    width: int
    """D."""
    c1: int
    """Part of the second counter word that is known to the host."""
    c1_R: Tensor | None = None
    """int64 [R], added to ``c1``."""
    c2_R: Tensor
    """int64 [R], third counter word."""
    c3_1: Tensor
    """int64 [1], fourth counter word."""
    spread: Tensor
    """float32 [1] or [D], standard deviation."""
    rows_T: Tensor | None = None
    """int64 [T], which draw a token sees; None when R is T, one a token in their order."""
    noisy_T: Tensor | None = None
    """bool [T]; None when all tokens are noisy."""

    def draws(self) -> Tensor:
        """float32 [R, D]."""
        c1 = self.c1 if self.c1_R is None else self.c1 + self.c1_R
        return philox.normal_rows_of(self.key_2, self.width, c1=c1, c2=self.c2_R, c3=self.c3_1) * self.spread

    def table(self) -> TableNoise:
        """The same noise with its R draws in memory."""
        return TableNoise(z_RD=self.draws(), rows_T=self.rows_T, noisy_T=self.noisy_T)

    def z(self) -> Tensor:
        """float32 [T, D]."""
        return self.table().z()


NormNoise: TypeAlias = Tensor | TableNoise | KeyedNoise
"""z as a tensor (float32 [D], or a value for each element of the input), or a record of it."""


def noise_values(noise: NormNoise | None) -> Tensor | None:
    """z as a tensor that broadcasts over the norm's input [T, D]."""
    return noise if noise is None or isinstance(noise, Tensor) else noise.z()


def _masked(z_TD: Tensor, noisy_T: Tensor | None) -> Tensor:
    return z_TD if noisy_T is None else z_TD * noisy_T.unsqueeze(1).float()
