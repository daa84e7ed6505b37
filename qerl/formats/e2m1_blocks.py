"""What NVFP4 and MXFP4 share: E2M1 codes in blocks along the inputs, rows padded with zeros to whole blocks.

    w_hat = code * step,     step = value(block scale) / row divisor     (MXFP4 has no divisor)

Legend: O output rows, B blocks of a row, K elements of a block, I inputs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from qerl.errors import FormatError
from qerl.formats import e2m1
from qerl.formats.base import (
    BlockScales,
    PackedWeight,
    PackLayout,
    check_choices,
    check_finite,
    check_weight,
    row_slices,
)
from qerl.formats.search import least_error
from qerl.formats.tiles import TiledFormat

DIVISOR = "global_scale"


class E2m1Format(TiledFormat):
    """Stored tensors: `packed` uint8 [d_out, B * K / 2], `block_scales` [d_out, B], and perhaps `global_scale` [segments]."""

    layout: PackLayout
    scale_dtype: torch.dtype

    @abstractmethod
    def scale_values(self, scales_OB: Tensor) -> Tensor:
        """What stored block scales stand for, float32."""

    @abstractmethod
    def nearest_scales(self, amax_OB: Tensor, reach: Tensor, rounding: str) -> Tensor:
        """Stored block scales that the block maxima call for, [O, B] in `scale_dtype`."""

    @abstractmethod
    def candidates(self, method: str, scales_OB: Tensor, amax_OB: Tensor, reach: Tensor) -> Iterable[Tensor]:
        """Block scales that a searching method tries, as bytes (uint8 [O, B] each); the first is `scales_OB`."""

    @abstractmethod
    def codes(self, w_OBK: Tensor, steps_OB: Tensor, scales_OB: Tensor, scales: BlockScales) -> Tensor:
        """uint8 codes under the rounding that `scales` names."""

    @abstractmethod
    def check_stored(self, tensors: Mapping[str, Tensor], name: str) -> None:
        """Refuse scales that a sound file does not hold.

        Raises:
            FormatError: by the name of the weight.
        """

    @abstractmethod
    def tile_scales(self, codes_OI: Tensor, scales_OB: Tensor) -> Tensor:
        """What tiles hold for stored scales, bytes [O, B or, in whole words, more]; `codes_OI`, one a byte, may be changed with them."""

    @abstractmethod
    def natural_scales(self, stored_OB: Tensor) -> Tensor:
        """The way back of `tile_scales`, with all bytes that the tiles of a row have for scales."""

    def to_parts(self, packed: PackedWeight, rows: slice) -> tuple[Tensor, Tensor]:
        data = packed.tensors["packed"][rows]
        codes = torch.stack((data & 15, data >> 4), dim=2).flatten(1)
        return codes, self.tile_scales(codes, packed.tensors["block_scales"][rows].view(torch.uint8))

    def from_parts_of_tiles(self, parts: Iterable[tuple[Tensor, Tensor]], shape: tuple[int, int]) -> dict[str, Tensor]:
        blocks = -(-shape[1] // self.block)
        found = [
            (e2m1.pack(codes[:, : blocks * self.block]), self.natural_scales(scales)[:, :blocks])
            for codes, scales in parts
        ]
        packed, scales = (torch.cat(column) for column in zip(*found, strict=True))
        return {"packed": packed, "block_scales": scales.view(self.scale_dtype)}

    def tensor_scales(self, reach: Tensor, rounding: str, segments: int) -> dict[str, Tensor]:
        """Stored tensors with one entry a segment, for a tensor whose largest magnitude is `reach`."""
        del reach, rounding, segments
        return {}

    def search_reach(self, reach: Tensor, scales_OB: Tensor, amax_OB: Tensor) -> Tensor:
        """The magnitude for which a searching method makes the tensor-wide scale."""
        del scales_OB, amax_OB
        return reach

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
        check_choices(self, method, rounding)
        rows = check_weight(weight, segments, name)
        own_reach = weight.abs().amax().float()
        check_finite(own_reach, name)
        reach = own_reach if shared is None else shared.reach
        amax_OB = self._block_maxima(weight)
        scales_OB = self.nearest_scales(amax_OB, reach, rounding)
        if method != "rtn" and shared is None:
            reach = self.search_reach(reach, scales_OB, amax_OB)
            scales_OB = self.nearest_scales(amax_OB, reach, rounding)
        source = self.tensor_scales(reach, rounding, len(rows)) if shared is None else shared.tensors
        tensors = {"block_scales": scales_OB, **{key: source[key] for key in sorted(self.per_segment)}}
        scales = BlockScales(
            format=self.name,
            shape=(weight.shape[0], weight.shape[1]),
            segments=rows,
            rounding=rounding,
            reach=reach,
            tensors=tensors,
        )
        if method != "rtn":
            self._search(weight, method, scales, amax_OB, importance_I)
        return scales

    def _block_maxima(self, weight: Tensor) -> Tensor:
        """float32 [O, B]."""
        d_out, d_in = weight.shape
        amax_OB = torch.empty(d_out, -(-d_in // self.block), device=weight.device)
        for part in row_slices(d_out, d_in, weight.device):
            amax_OB[part] = self._blocks(weight[part]).abs().amax(-1)
        return amax_OB

    def _search(
        self, weight: Tensor, method: str, scales: BlockScales, amax_OB: Tensor, importance_I: Tensor | None
    ) -> None:
        """Replaces block scales, in place, by better ones where there are any."""
        importance_BK = None if importance_I is None else self._blocks(importance_I[None])[0]
        divisor_O = self.row_divisor(scales)
        all_scales_OB = scales.tensors["block_scales"]
        for part in row_slices(*scales.shape, weight.device, search=True):
            divisor_o = None if divisor_O is None else divisor_O[part]

            def round_trip(w_OBK: Tensor, bytes_OB: Tensor, divisor_o: Tensor | None = divisor_o) -> Tensor:
                steps_OB1 = self._steps(bytes_OB.view(self.scale_dtype), divisor_o)[..., None]
                return e2m1.nearest_value(w_OBK / steps_OB1).mul_(steps_OB1)

            tried = self.candidates(method, all_scales_OB[part], amax_OB[part], scales.reach)
            best = least_error(self._blocks(weight[part]), tried, round_trip, importance_BK)
            all_scales_OB[part] = best.view(self.scale_dtype)

    def quantize_with_scales(self, weight: Tensor, scales: BlockScales) -> PackedWeight:
        d_out, d_in = scales.shape
        scales_OB = scales.tensors["block_scales"]
        steps_OB = self._steps(scales_OB, self.row_divisor(scales))
        packed = torch.empty(d_out, scales_OB.shape[1] * self.block // 2, dtype=torch.uint8, device=weight.device)
        for part in row_slices(d_out, d_in, weight.device):
            codes = self.codes(self._blocks(weight[part]), steps_OB[part], scales_OB[part], scales)
            packed[part] = e2m1.pack(codes.flatten(1))
        tensors = {"packed": packed, **scales.tensors}
        return PackedWeight(format=self.name, shape=scales.shape, tensors=tensors, segments=scales.segments)

    def steps(self, scales: BlockScales, columns: slice | None = None) -> Tensor:
        steps_OB = self._steps(scales.tensors["block_scales"], self.row_divisor(scales))
        start, stop, _ = (columns or slice(None)).indices(scales.shape[1])
        first = start // self.block
        wide = steps_OB[:, first : -(-stop // self.block)].repeat_interleave(self.block, dim=1)
        return wide[:, start - first * self.block : stop - first * self.block]

    def snap(self, weight: Tensor, steps: Tensor) -> Tensor:
        return e2m1.nearest_value(weight.float() / steps).mul_(steps)

    def dequantize(self, packed: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        packed = self.natural(packed)
        steps_OB = self._steps(packed.tensors["block_scales"], self.row_divisor(packed))
        return self._expand(packed, steps_OB, dtype)

    def factored(self, packed: PackedWeight, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Values code * value(scale): at most six significant bits, exact in bfloat16 and wider."""
        packed = self.natural(packed)
        values_OB = self.scale_values(packed.tensors["block_scales"])
        return self._expand(packed, values_OB, dtype), self.row_divisor(packed)

    def nbytes(self, shape: tuple[int, int], segments: Sequence[int] | None = None, itemsize: int = 2) -> int:
        del itemsize  # storage does not depend on the compute type
        stored = self.stored_shapes(*shape)
        (d_out, half), (_, blocks) = stored["packed"], stored["block_scales"]
        return d_out * (half + blocks) + 4 * len(self.per_segment) * len(segments or (d_out,))

    def stored_shapes(self, d_out: int, d_in: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the stored tensors of one projection."""
        blocks = -(-d_in // self.block)
        shapes: dict[str, tuple[int, ...]] = {
            "packed": (d_out, blocks * self.block // 2),
            "block_scales": (d_out, blocks),
        }
        return shapes | dict.fromkeys(self.per_segment, (1,))

    def from_parts(self, parts: Mapping[str, Tensor], *, d_in: int | None = None, name: str = "weight") -> PackedWeight:
        """Wrap tensors that were quantized elsewhere (one projection), bytes untouched.

        Args:
            parts: the stored tensors by name; a global scale is G, a divisor.
            d_in: logical inputs; None takes all that are stored.
            name: how errors call the weight.

        Raises:
            FormatError: dtypes or shapes that do not fit together, or scales that are unusable.
        """
        d_out, half = parts["packed"].shape if parts["packed"].ndim == 2 else (0, 0)
        width = 2 * half if d_in is None else d_in
        shapes = self.stored_shapes(d_out, width)
        dtypes = {"packed": torch.uint8, "block_scales": self.scale_dtype}
        fits = all(
            parts[key].dtype == dtype and tuple(parts[key].shape) == shapes[key] for key, dtype in dtypes.items()
        )
        if not fits or 0 in (d_out, width) or any(parts[key].numel() != 1 for key in self.per_segment):
            got = [f"{str(parts[key].dtype).removeprefix('torch.')} {list(parts[key].shape)}" for key in shapes]
            scale_name = str(self.scale_dtype).removeprefix("torch.")
            raise FormatError(
                f"the stored parts of '{name}' do not fit the {self.name.upper()} layout",
                got=", ".join(got) + ("" if d_in is None else f" for {d_in} inputs"),
                expected=f"uint8 [O, P/2], {scale_name} [O, P/{self.block}]" + ", float32 [1]" * len(self.per_segment),
            )
        tensors = {key: parts[key].reshape(1).float() if key in self.per_segment else parts[key] for key in shapes}
        self.check_stored(tensors, name)
        return PackedWeight(format=self.name, shape=(d_out, width), tensors=tensors, segments=(d_out,))

    def row_divisor(self, stored: PackedWeight | BlockScales) -> Tensor | None:
        """Divisor of every output row, float32 [d_out]; None where the format has none."""
        if DIVISOR not in stored.tensors:
            return None
        scale = stored.tensors[DIVISOR]
        rows = torch.tensor(stored.segments, device=scale.device)
        return torch.repeat_interleave(scale, rows, output_size=stored.shape[0])

    def _steps(self, scales_OB: Tensor, divisor_O: Tensor | None) -> Tensor:
        values_OB = self.scale_values(scales_OB)
        return values_OB if divisor_O is None else values_OB / divisor_O[:, None]

    def _expand(self, packed: PackedWeight, factors_OB: Tensor, dtype: torch.dtype) -> Tensor:
        """codes * factors [d_out, d_in]: the product in float32, then cast."""
        d_out, d_in = packed.shape
        out = torch.empty(d_out, d_in, dtype=dtype, device=factors_OB.device)
        for part in row_slices(d_out, d_in, out.device):
            q = e2m1.unpack(packed.tensors["packed"][part]).view(-1, factors_OB.shape[1], self.block)
            out[part] = q.mul_(factors_OB[part, :, None]).flatten(1)[:, :d_in]
        return out

    def _blocks(self, weight: Tensor) -> Tensor:
        """Rows as float32 [rows, B, K], padded with zeros."""
        padded = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % self.block))
        return padded.unflatten(1, (-1, self.block))
