"""The one interface of weight formats, and the record that holds a packed weight.

Four facts about a low-precision weight are kept apart: how it is stored (this folder), the compute type after
unpacking, the accumulator type (both chosen in `qerl.kernels`), and the hardware.

Legend: O output rows (d_out), I inputs (d_in).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qerl.errors import FormatError


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """One weight matrix as it is stored; several fused projections are stacked by rows into one.

    The tensors are what the format's documentation says they are; everything outside `qerl.formats` and the kernels
    treats them as opaque.
    """

    format: str
    """Name of the format, one of `qerl.formats.FORMAT_NAMES`."""
    shape: tuple[int, int]
    """Logical [d_out, d_in]; storage may be padded beyond d_in."""
    tensors: dict[str, Tensor]
    segments: tuple[int, ...]
    """Row counts of the fused parts, in order; their sum is d_out."""

    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same weight on `device`; dtypes never change."""
        return replace(self, tensors={name: tensor.to(device) for name, tensor in self.tensors.items()})

    @property
    def device(self) -> torch.device:
        """Where the stored tensors are."""
        return next(iter(self.tensors.values())).device


class WeightFormat(ABC):
    """How a matrix [d_out, d_in] is stored. Implementations hold no state: one instance serves all weights."""

    name: str
    per_segment: frozenset[str] = frozenset()
    """Stored tensors that have one entry a segment; all others have one row an output row."""

    @abstractmethod
    def quantize(
        self, weight: Tensor, *, rounding: str = "ct", segments: Sequence[int] | None = None, name: str = "weight"
    ) -> PackedWeight:
        """Store `weight`.

        Args:
            weight: floating point [d_out, d_in].
            rounding: named rounding of formats that round; an unknown name is refused by every format.
            segments: row counts of fused parts; None is one part.
            name: how errors call the tensor.

        Raises:
            FormatError: not a matrix, NaN or infinity inside, segments that do not add up, unknown rounding.
        """

    @abstractmethod
    def dequantize(self, packed: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix [d_out, d_in] that the stored bytes stand for, computed in float32, then cast to `dtype`."""

    @abstractmethod
    def factored(self, packed: PackedWeight, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """(values [d_out, d_in] in `dtype`, row divisor float32 [d_out] or None) with w_hat = values / divisor.

        The values are exact in bfloat16 where the format allows it, so that a product can be formed from them without
        rounding the weight, and divided once, in the accumulator's type, after the dot product.
        """

    @abstractmethod
    def nbytes(self, shape: tuple[int, int], segments: int = 1, itemsize: int = 2) -> int:
        """Bytes a weight of `shape` will take, predicted without making a tensor.

        Args:
            shape: logical [d_out, d_in].
            segments: number of fused parts.
            itemsize: bytes of one element of the compute type; only unquantized storage depends on it.
        """

    def join(self, parts: Sequence[PackedWeight]) -> PackedWeight:
        """Stack already packed weights by rows, bytes untouched; each part keeps its own scales.

        Raises:
            FormatError: the parts differ in format or in d_in.
        """
        first = parts[0]
        for part in parts:
            if part.format != self.name or part.shape[1] != first.shape[1]:
                raise FormatError(
                    "packed weights cannot be stacked",
                    got=f"{part.format} {list(part.shape)}",
                    expected=f"{self.name} with {first.shape[1]} inputs",
                )
        return PackedWeight(
            format=self.name,
            shape=(sum(part.shape[0] for part in parts), first.shape[1]),
            tensors={key: torch.cat([part.tensors[key] for part in parts]) for key in first.tensors},
            segments=tuple(rows for part in parts for rows in part.segments),
        )

    def split(self, packed: PackedWeight) -> tuple[PackedWeight, ...]:
        """The inverse of `join`: one packed weight a segment, as views."""
        parts, start = [], 0
        for index, rows in enumerate(packed.segments):
            tensors = {
                key: tensor[index : index + 1] if key in self.per_segment else tensor[start : start + rows]
                for key, tensor in packed.tensors.items()
            }
            parts.append(replace(packed, shape=(rows, packed.shape[1]), tensors=tensors, segments=(rows,)))
            start += rows
        return tuple(parts)


def check_weight(weight: Tensor, segments: Sequence[int] | None, name: str) -> tuple[int, ...]:
    """Refuse what no format can store; returns the segments.

    Raises:
        FormatError: see `WeightFormat.quantize`. Non-finite values are found by `check_finite`.
    """
    if weight.ndim != 2 or 0 in weight.shape or not weight.is_floating_point():
        raise FormatError(
            f"tensor '{name}' cannot be stored as a weight",
            got=f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}",
            expected="a non-empty floating point matrix [d_out, d_in]",
        )
    rows = (weight.shape[0],) if segments is None else tuple(segments)
    if sum(rows) != weight.shape[0] or min(rows) < 1:
        raise FormatError(
            f"the fused parts of tensor '{name}' do not add up",
            got=f"segments {list(rows)}",
            expected=f"positive row counts with sum {weight.shape[0]}",
        )
    return rows


def check_finite(amax: Tensor, name: str) -> None:
    """Refuse a tensor whose largest magnitude `amax` (a scalar that NaN propagates into) is not finite.

    Raises:
        FormatError: NaN or infinity, by tensor name.
    """
    if not torch.isfinite(amax):
        raise FormatError(
            f"tensor '{name}' holds a value that is not finite",
            got="NaN" if torch.isnan(amax) else "infinity",
            expected="finite values only",
            remedy="The checkpoint is damaged or overflowed when it was converted; get a sound copy.",
        )
