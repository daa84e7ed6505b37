"""The one interface of weight formats, and the records that hold a packed weight and its scales.

Four facts about a low-precision weight are kept apart: how it is stored (this folder), the compute type after
unpacking, the accumulator type (both chosen in `qerl.kernels`), and the hardware.

Every format stores w_hat = value(code) * step, with one step for a block of neighboring elements. Two things can be chosen
for a given weight: the steps (`block_scales`) and, for given steps, the codes (`quantize_with_scales`). `quantize` does
both; a method with feedback between elements does them apart:

    scales = fmt.block_scales(weight, segments=rows)              # or of a clipped weight, or searched
    steps_OI = fmt.steps(scales)
    for each column j:  w_hat = fmt.snap(work[:, j], steps_OI[:, j]);  spread work[:, j] - w_hat over later columns
    packed = fmt.quantize_with_scales(work, scales)

Legend: O output rows (d_out), I inputs (d_in).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from qerl.errors import FormatError, nearest

METHODS = ("rtn", "mse", "four_over_six")
"""All methods that choose scales from a weight alone; which of them a format has is its `methods`."""
ROUNDINGS = ("ct", "torchao")
"""Libraries whose rounding can be asked for by name; a format that they agree on gives the same bytes under both."""


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
    order: str = "natural"
    """`natural`, as files have it, or `tiles`, as the CUDA kernels read it (see `WeightFormat.for_device`)."""
    kept_OI: Tensor | None = None
    """What the CUDA kernels multiply with instead of the stored tensors where it is faster, bfloat16 [d_out, d_in]
    (`qerl.kernels.fp4_linear.keep`); it says nothing that they do not, and is
    the stored tensor itself of a small unquantized weight. Whoever cuts or moves the weight leaves it behind."""

    def __post_init__(self) -> None:
        assert self.kept_OI is None or self.kept_OI.shape == self.shape, (self.kept_OI.shape, self.shape)

    def nbytes(self) -> int:
        """Bytes of all stored tensors, without `kept_OI`."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same weight on `device`; dtypes never change."""
        return replace(self, tensors={name: tensor.to(device) for name, tensor in self.tensors.items()}, kept_OI=None)

    @property
    def device(self) -> torch.device:
        """Where the stored tensors are."""
        return next(iter(self.tensors.values())).device


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScales:
    """The scales of one weight, before there are codes. Made by `WeightFormat.block_scales`; opaque elsewhere."""

    format: str
    """Name of the format."""
    shape: tuple[int, int]
    """Logical [d_out, d_in] that they belong to."""
    segments: tuple[int, ...]
    """Row counts of the fused parts."""
    rounding: str
    """Named rounding that the codes will follow."""
    reach: Tensor
    """The magnitude that a tensor-wide scale is made for, float32 scalar: the largest of the weight, or twice that after a
    search that wants room above."""
    tensors: dict[str, Tensor]
    """What is stored beside the codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLayout:
    """How compressed-tensors names and describes a format in a checkpoint."""

    name: str
    """`format` in quantization_config."""
    suffixes: Mapping[str, str]
    """Stored tensor -> the ending of its name in the checkpoint, in the order in which they are written."""
    weights: Mapping[str, Any]
    """The `weights` arguments of a config group."""


class WeightFormat(ABC):
    """How a matrix [d_out, d_in] is stored. Implementations hold no state: one instance serves all weights."""

    name: str
    block: int
    """Neighboring elements that share a scale; 0 stands for a whole row."""
    methods: tuple[str, ...] = ("rtn",)
    """Ways to choose the scales."""
    per_segment: frozenset[str] = frozenset()
    """Stored tensors that have one entry a segment; all others have one row an output row."""
    layout: PackLayout | None = None
    """Its layout in a checkpoint folder, if compressed-tensors has one."""

    def quantize(
        self,
        weight: Tensor,
        *,
        method: str = "rtn",
        rounding: str = "ct",
        segments: Sequence[int] | None = None,
        name: str = "weight",
    ) -> PackedWeight:
        """Store `weight`: scales by `method`, then for each element the code nearest to it.

        Args:
            weight: floating point [d_out, d_in].
            method: `rtn` takes each block's scale from its largest magnitude; `mse` searches the scales for the least
                squared error; others as the format says.
            rounding: named rounding of formats that round; an unknown name is refused by every format.
            segments: row counts of fused parts; None is one part.
            name: how errors call the tensor.

        Raises:
            FormatError: not a matrix, NaN or infinity inside, segments that do not add up, unknown rounding, a method
                that the format does not have.
        """
        scales = self.block_scales(weight, method=method, rounding=rounding, segments=segments, name=name)
        return self.quantize_with_scales(weight, scales)

    @abstractmethod
    def block_scales(
        self,
        weight: Tensor,
        *,
        method: str = "rtn",
        rounding: str = "ct",
        segments: Sequence[int] | None = None,
        name: str = "weight",
        importance_I: Tensor | None = None,
        shared: BlockScales | None = None,
    ) -> BlockScales:
        """The scales that `quantize` would use; arguments and errors as there, and:

        Args:
            weight: as `quantize`. Clip it first (`weight.clamp(-c, c)`) to get the scales of a clipped block: a code that
                would exceed the largest saturates.
            importance_I: non-negative float32 [d_in], the weight of each input's squared error in a search (such as the
                mean square of its activations); None weighs all alike. Without effect on `rtn`.
            shared: take the tensor-wide part (NVFP4's global scale) from these scales instead of from `weight`, which then
                may be a block-aligned slice of columns (see `column_block`) or a clipped copy.
        """

    @abstractmethod
    def quantize_with_scales(self, weight: Tensor, scales: BlockScales) -> PackedWeight:
        """Codes of `weight` [d_out, d_in] for given scales: the nearest each, saturating, ties as the format rounds.

        Of `weight` nothing but its shape needs to be what the scales were made for.
        """

    @abstractmethod
    def steps(self, scales: BlockScales, columns: slice | None = None) -> Tensor:
        """Step of every element, float32 [d_out, d_in], or of the given columns."""

    @abstractmethod
    def snap(self, weight: Tensor, steps: Tensor) -> Tensor:
        """The representable value nearest to each element, float32; any shape, `steps` broadcasts to it.

        Under the rounding `ct`, dequantize(quantize_with_scales(w, scales)) == snap(w, steps(scales)), to the bit. (NF4 with
        double quantization rounds its scales once more when they are stored.)
        """

    def column_block(self, d_in: int) -> int:
        """Columns [k * n, (k + 1) * n) of a matrix with `d_in` inputs have scales of their own, for this n."""
        return self.block if 0 < self.block < d_in else d_in

    def join_columns(self, parts: Sequence[BlockScales]) -> BlockScales:
        """Put the scales of neighboring column slices together; all made with the same `shared`, in order.

        All slices but the last are multiples of `column_block` wide.
        """
        first = parts[0]
        blocks = {
            key: first.tensors[key]
            if key in self.per_segment
            else torch.cat([part.tensors[key] for part in parts], dim=1)
            for key in first.tensors
        }
        return replace(first, shape=(first.shape[0], sum(part.shape[1] for part in parts)), tensors=blocks)

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
    def nbytes(self, shape: tuple[int, int], segments: Sequence[int] | None = None, itemsize: int = 2) -> int:
        """Bytes a weight of `shape` will take, predicted without making a tensor.

        Args:
            shape: logical [d_out, d_in].
            segments: row counts of fused parts; None is one part.
            itemsize: bytes of one element of the compute type; only unquantized storage depends on it.
        """

    def for_device(self, packed: PackedWeight) -> PackedWeight:
        """The weight in the order of bytes that the kernels of its device read best; the natural one unless a format says
        otherwise. Everything here takes either order."""
        return packed

    def natural(self, packed: PackedWeight) -> PackedWeight:
        """The weight in its natural order: itself, or a copy."""
        assert packed.order == "natural", (packed.format, packed.order)
        return packed

    def join(self, parts: Sequence[PackedWeight]) -> PackedWeight:
        """Stack already packed weights by rows, bytes untouched; each part keeps its own scales.

        Raises:
            FormatError: the parts differ in format or in d_in.
        """
        parts = [self.natural(part) for part in parts]
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

    def rows(self, packed: PackedWeight, start: int, stop: int) -> PackedWeight:
        """Output rows [start, stop) of a packed weight in its natural order, as views where it is in that order already."""
        first, last, counts = segment_range(packed.segments, start, stop)
        tensors = {
            key: tensor[first:last] if key in self.per_segment else tensor[start:stop]
            for key, tensor in packed.tensors.items()
        }
        shape = (stop - start, packed.shape[1])
        return replace(packed, shape=shape, tensors=tensors, segments=counts, kept_OI=None)

    def split(self, packed: PackedWeight) -> tuple[PackedWeight, ...]:
        """The inverse of `join`: one packed weight a segment; see `rows`."""
        stops = list(accumulate(packed.segments))
        return tuple(self.rows(packed, stop - rows, stop) for rows, stop in zip(packed.segments, stops, strict=True))


def segment_range(segments: Sequence[int], start: int, stop: int) -> tuple[int, int, tuple[int, ...]]:
    """(first segment, one past the last, their row counts) of the part of `segments` that rows [start, stop) cover."""
    stops = list(accumulate(segments))
    covered = [min(stop, end) - max(start, end - rows) for rows, end in zip(segments, stops, strict=True)]
    used = [index for index, count in enumerate(covered) if count > 0]
    assert used and start >= 0 and stop <= stops[-1], (segments, start, stop)
    return used[0], used[-1] + 1, tuple(covered[index] for index in used)


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


def check_choices(fmt: WeightFormat, method: str, rounding: str) -> None:
    """Refuse an unknown rounding, or a method that the format does not have.

    Raises:
        FormatError: with the nearest known name.
    """
    for what, value, known in (("rounding", rounding, ROUNDINGS), (f"{fmt.name} method", method, fmt.methods)):
        if value not in known:
            close = nearest(value, known)
            raise FormatError(
                f"unknown {what}",
                got=repr(value),
                expected=" or ".join(known),
                remedy=f"Did you mean '{close}'?" if close else None,
            )


def slice_elements(device: torch.device, *, search: bool = False) -> int:
    """How many weights to work on at once: bounds temporaries, stays in a CPU's cache, keeps a GPU busy."""
    if device.type != "cpu":
        return 1 << 25
    return 1 << 18 if search else 1 << 20


def row_slices(d_out: int, d_in: int, device: torch.device, *, search: bool = False) -> list[slice]:
    """Slices that cover all rows, each of about `slice_elements` weights."""
    step = max(1, slice_elements(device, search=search) // d_in)
    return [slice(start, start + step) for start in range(0, d_out, step)]
