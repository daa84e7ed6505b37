"""NVFP4: E2M1 codes, one FP8 E4M3 scale a block of 16 along the inputs, one FP32 scale a tensor.

    w_hat = q * (s / G),     G = 2688 / amax  (2688 = 448 * 6, the largest block scale times the largest code)

G is kept as compressed-tensors keeps it and never as its reciprocal: 1 / (1 / G) differs from G for 12 % of floats.
4.5 bits a weight. Stored tensors (P = d_in padded to a multiple of 16, with zeros):

    packed        uint8          [d_out, P / 2]    even element in the low nibble
    block_scales  float8_e4m3fn  [d_out, P / 16]
    global_scale  float32        [segments]        one G for all parts of a fused group when quantized here

Two named roundings, each equal to the byte to the library it is named after, both on w.float():

    ct       G = 2688/amax (inf -> 1);  s = E4M3(min(G * (amax_b / 6), 448)), 0 -> 0.125
             code = RNE(clamp(w / (s / G)));  sign where that quotient is < 0, so -0.0 has code 0
    torchao  p = amax/2688;  s = E4M3(clamp((amax_b / 6) / p, 2^-6, 448)), never subnormal
             code = RNE(clamp(w * ((1 / p) / s)));  sign bit kept, so -0.0 has code 8

Where torchao's own arithmetic gives NaN it is not followed: a tensor with p = 0 (all zeros, or amax below 1.9e-42) is
stored as zero, and so are zeros in a tensor with amax below 5.1e-34 (0 * inf there). Where 2688/amax overflows (amax below
7.9e-36), G is 1 under `ct`, as in that library, and the largest float under `torchao`, whose codes saturate; either way the
error is below 1e-35.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.errors import FormatError
from qerl.formats import e2m1
from qerl.formats.base import (
    ROUNDINGS,
    BlockScales,
    PackedWeight,
    PackLayout,
    WeightFormat,
    check_choices,
    check_finite,
    check_weight,
    row_slices,
)

__all__ = ["BLOCK", "ROUNDINGS", "Nvfp4Format", "global_scale"]

BLOCK = 16
E4M3_MAX = 448.0
E4M3_SMALLEST_NORMAL = 2.0**-6
SCALE_RANGE = E4M3_MAX * e2m1.LARGEST


class Nvfp4Format(WeightFormat):
    """See the module's docstring for layout and rounding."""

    name = "nvfp4"
    block = BLOCK
    per_segment = frozenset({"global_scale"})

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
        """As `WeightFormat.block_scales`; all fused parts share one G, that of the largest magnitude."""
        check_choices(self, method, rounding)
        rows = check_weight(weight, segments, name)
        amax = weight.abs().amax().float()
        check_finite(amax, name)
        if shared is not None:
            amax = shared.amax
        d_out, d_in = weight.shape
        blocks = -(-d_in // BLOCK)
        scales = torch.empty(d_out, blocks, dtype=torch.float8_e4m3fn, device=weight.device)
        scales_of = _scales_ct if rounding == "ct" else _scales_torchao
        for part in row_slices(d_out, d_in):
            scales[part] = scales_of(_blocks(weight[part], blocks).abs().amax(-1), amax)
        if shared is not None:
            divisor = shared.tensors["global_scale"]
        else:
            divisor = global_scale(amax, rounding).repeat(len(rows))
        return BlockScales(
            format=self.name,
            shape=(d_out, d_in),
            segments=rows,
            rounding=rounding,
            amax=amax,
            tensors={"block_scales": scales, "global_scale": divisor},
        )

    def quantize_with_scales(self, weight: Tensor, scales: BlockScales) -> PackedWeight:
        d_out, d_in = scales.shape
        block_scales = scales.tensors["block_scales"]
        blocks = block_scales.shape[1]
        packed = torch.empty(d_out, blocks * BLOCK // 2, dtype=torch.uint8, device=weight.device)
        factor = _factor_torchao(scales) if scales.rounding == "torchao" else self._row_divisor(scales)[:, None]
        for part in row_slices(d_out, d_in):
            w_OBK = _blocks(weight[part], blocks)
            wide = block_scales[part].float()
            if scales.rounding == "torchao":
                x = w_OBK * (factor / wide)[..., None]
                # Zeros times an overflowed factor would be NaN.
                x = torch.where(w_OBK == 0, w_OBK, x)
                codes = e2m1.encode(x, torch.signbit(x))
            else:
                x = w_OBK / (wide / factor[part])[..., None]
                codes = e2m1.encode(x, x < 0)
            packed[part] = e2m1.pack(codes.view(-1, blocks * BLOCK))
        tensors = {"packed": packed, **scales.tensors}
        return PackedWeight(format=self.name, shape=scales.shape, tensors=tensors, segments=scales.segments)

    def steps(self, scales: BlockScales, columns: slice | None = None) -> Tensor:
        """s / G, the rounded quotient that dequantizing multiplies by."""
        steps_OB = scales.tensors["block_scales"].float() / self._row_divisor(scales)[:, None]
        return e2m1.spread(steps_OB, BLOCK, scales.shape[1], columns)

    def snap(self, weight: Tensor, steps: Tensor) -> Tensor:
        return e2m1.nearest_value(weight.float() / steps).mul_(steps)

    def dequantize(self, packed: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        scales = packed.tensors["block_scales"].float() / self._row_divisor(packed)[:, None]
        return e2m1.expand(packed.tensors["packed"], scales, BLOCK, packed.shape[1], dtype)

    def factored(self, packed: PackedWeight, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Values q * s: at most six significant bits, exact in float16, bfloat16 and wider; divisor G."""
        scales = packed.tensors["block_scales"].float()
        values = e2m1.expand(packed.tensors["packed"], scales, BLOCK, packed.shape[1], dtype)
        return values, self._row_divisor(packed)

    def nbytes(self, shape: tuple[int, int], segments: int = 1, itemsize: int = 2) -> int:
        del itemsize  # storage does not depend on the compute type
        d_out, d_in = shape
        blocks = -(-d_in // BLOCK)
        return d_out * blocks * (BLOCK // 2 + 1) + 4 * segments

    def from_parts(
        self,
        packed: Tensor,
        block_scales: Tensor,
        global_scale: Tensor,
        *,
        d_in: int | None = None,
        name: str = "weight",
    ) -> PackedWeight:
        """Wrap tensors that were quantized elsewhere (one projection), bytes untouched.

        Args:
            packed: uint8 [d_out, P / 2].
            block_scales: float8_e4m3fn [d_out, P / 16].
            global_scale: float32, one element: G, a divisor.
            d_in: logical inputs; None takes P.
            name: how errors call the tensor.

        Raises:
            FormatError: dtypes or shapes that do not fit together, or a G that is not positive and finite.
        """
        d_out, half = packed.shape if packed.ndim == 2 else (0, 0)
        fits = (
            packed.dtype == torch.uint8
            and block_scales.dtype == torch.float8_e4m3fn
            and tuple(block_scales.shape) == (d_out, half * 2 // BLOCK)
            and half * 2 % BLOCK == 0
            and global_scale.numel() == 1
            and (d_in is None or half * 2 - BLOCK < d_in <= half * 2)
        )
        if not fits or d_out == 0:
            got = [
                f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (packed, block_scales, global_scale)
            ]
            raise FormatError(
                f"the stored parts of '{name}' do not fit the NVFP4 layout",
                got=", ".join(got) + ("" if d_in is None else f" for {d_in} inputs"),
                expected=f"uint8 [O, P/2], float8_e4m3fn [O, P/{BLOCK}], float32 [1]",
            )
        divisor = global_scale.reshape(1).float()
        if not bool(torch.isfinite(divisor) & (divisor > 0)):
            raise FormatError(
                f"the global scale of '{name}' is unusable", got=float(divisor), expected="a positive finite number"
            )
        tensors = {"packed": packed, "block_scales": block_scales, "global_scale": divisor}
        shape = (d_out, half * 2 if d_in is None else d_in)
        return PackedWeight(format=self.name, shape=shape, tensors=tensors, segments=(d_out,))

    @staticmethod
    def _row_divisor(stored: PackedWeight | BlockScales) -> Tensor:
        """G of every output row, float32 [d_out]."""
        scale = stored.tensors["global_scale"]
        rows = torch.tensor(stored.segments, device=scale.device)
        return torch.repeat_interleave(scale, rows, output_size=stored.shape[0])


def global_scale(amax: Tensor, rounding: str = "ct") -> Tensor:
    """G = 2688 / amax, float32 [1]; see the module's docstring for amax below 7.9e-36."""
    amax = amax.float().reshape(1)
    scale = SCALE_RANGE / amax
    if rounding == "torchao":
        scale = torch.where(amax / SCALE_RANGE > 0, scale.clamp(max=torch.finfo(torch.float32).max), 1.0)
    return torch.where(torch.isinf(scale), 1.0, scale)


def _blocks(weight: Tensor, blocks: int) -> Tensor:
    """Rows as float32 [rows, blocks, 16], padded with zeros."""
    return torch.nn.functional.pad(weight.float(), (0, blocks * BLOCK - weight.shape[1])).view(-1, blocks, BLOCK)


def _scales_ct(amax_OB: Tensor, amax: Tensor) -> Tensor:
    """Block scales of given block maxima under the rounding `ct`."""
    scales = (global_scale(amax) * (amax_OB / e2m1.LARGEST)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
    return torch.where(scales == 0, 0.125, scales).to(torch.float8_e4m3fn)


def _scales_torchao(amax_OB: Tensor, amax: Tensor) -> Tensor:
    """Block scales of given block maxima under the rounding `torchao`."""
    scales = (amax_OB / e2m1.LARGEST) / _tensor_scale(amax)
    return scales.clamp(E4M3_SMALLEST_NORMAL, E4M3_MAX).to(torch.float8_e4m3fn)


def _tensor_scale(amax: Tensor) -> Tensor:
    """p = amax / 2688 of the rounding `torchao`, 1 where that is 0."""
    scale = amax / SCALE_RANGE
    return torch.where(scale > 0, scale, 1.0)


def _factor_torchao(scales: BlockScales) -> Tensor:
    """1 / p; a code is w * ((1 / p) / s)."""
    return 1.0 / _tensor_scale(scales.amax)
