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

from qerl.errors import FormatError, nearest
from qerl.formats import e2m1
from qerl.formats.base import PackedWeight, WeightFormat, check_finite, check_weight

BLOCK = 16
E4M3_MAX = 448.0
E4M3_SMALLEST_NORMAL = 2.0**-6
SCALE_RANGE = E4M3_MAX * e2m1.LARGEST
ROUNDINGS = ("ct", "torchao")

# Rows are processed in slices of about this many elements: bounds temporaries and stays in cache.
_SLICE_ELEMENTS = 1 << 20


class Nvfp4Format(WeightFormat):
    """See the module's docstring for layout and rounding."""

    name = "nvfp4"
    per_segment = frozenset({"global_scale"})

    def quantize(
        self,
        weight: Tensor,
        *,
        rounding: str = "ct",
        segments: Sequence[int] | None = None,
        name: str = "weight",
    ) -> PackedWeight:
        """As `WeightFormat.quantize`; all fused parts share one G, that of the largest magnitude."""
        check_rounding(rounding)
        rows = check_weight(weight, segments, name)
        amax = weight.abs().amax().float()
        check_finite(amax, name)
        d_out, d_in = weight.shape
        blocks = -(-d_in // BLOCK)
        packed = torch.empty(d_out, blocks * BLOCK // 2, dtype=torch.uint8, device=weight.device)
        scales = torch.empty(d_out, blocks, dtype=torch.float8_e4m3fn, device=weight.device)
        encode = _encode_ct if rounding == "ct" else _encode_torchao
        for part in _row_slices(d_out, d_in):
            w = torch.nn.functional.pad(weight[part].float(), (0, blocks * BLOCK - d_in))
            scales[part], codes = encode(w.view(-1, blocks, BLOCK), amax)
            packed[part] = e2m1.pack(codes.view(-1, blocks * BLOCK))
        tensors = {
            "packed": packed,
            "block_scales": scales,
            "global_scale": global_scale(amax, rounding).repeat(len(rows)),
        }
        return PackedWeight(format=self.name, shape=(d_out, d_in), tensors=tensors, segments=rows)

    def dequantize(self, packed: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        scales = packed.tensors["block_scales"].float() / self._row_divisor(packed)[:, None]
        return _expand(packed, scales, dtype)

    def factored(self, packed: PackedWeight, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Values q * s: at most six significant bits, exact in float16, bfloat16 and wider; divisor G."""
        return _expand(packed, packed.tensors["block_scales"].float(), dtype), self._row_divisor(packed)

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
    def _row_divisor(packed: PackedWeight) -> Tensor:
        """G of every output row, float32 [d_out]."""
        scale = packed.tensors["global_scale"]
        rows = torch.tensor(packed.segments, device=scale.device)
        return torch.repeat_interleave(scale, rows, output_size=packed.shape[0])


def check_rounding(rounding: str) -> None:
    """Refuse an unknown rounding name.

    Raises:
        FormatError: with the nearest known name.
    """
    if rounding not in ROUNDINGS:
        close = nearest(rounding, ROUNDINGS)
        raise FormatError(
            "unknown NVFP4 rounding",
            got=repr(rounding),
            expected=" or ".join(ROUNDINGS),
            remedy=f"Did you mean '{close}'?" if close else None,
        )


def global_scale(amax: Tensor, rounding: str = "ct") -> Tensor:
    """G = 2688 / amax, float32 [1]; see the module's docstring for amax below 7.9e-36."""
    amax = amax.float().reshape(1)
    scale = SCALE_RANGE / amax
    if rounding == "torchao":
        scale = torch.where(amax / SCALE_RANGE > 0, scale.clamp(max=torch.finfo(torch.float32).max), 1.0)
    return torch.where(torch.isinf(scale), 1.0, scale)


def _row_slices(d_out: int, d_in: int) -> list[slice]:
    step = max(1, _SLICE_ELEMENTS // d_in)
    return [slice(start, start + step) for start in range(0, d_out, step)]


def _encode_ct(w_OBK: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """(block scales [O, blocks], codes [O, blocks, 16]) under the rounding `ct`."""
    divisor = global_scale(amax)
    scales = (divisor * (w_OBK.abs().amax(-1) / e2m1.LARGEST)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    wide = scales.float()
    wide = torch.where(wide == 0, 0.125, wide)
    x = w_OBK / (wide / divisor)[..., None]
    return wide.to(torch.float8_e4m3fn), e2m1.encode(x, x < 0)


def _encode_torchao(w_OBK: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """(block scales [O, blocks], codes [O, blocks, 16]) under the rounding `torchao`."""
    tensor_scale = amax.float() / SCALE_RANGE
    tensor_scale = torch.where(tensor_scale > 0, tensor_scale, 1.0)
    scales = (w_OBK.abs().amax(-1) / e2m1.LARGEST) / tensor_scale
    scales = scales.clamp(E4M3_SMALLEST_NORMAL, E4M3_MAX).to(torch.float8_e4m3fn)
    x = w_OBK * ((1.0 / tensor_scale) / scales.float())[..., None]
    x = torch.where(w_OBK == 0, w_OBK, x)
    return scales, e2m1.encode(x, torch.signbit(x))


def _expand(packed: PackedWeight, scales_OB: Tensor, dtype: torch.dtype) -> Tensor:
    """codes * scales [d_out, d_in]: the product in float32, then cast."""
    d_out, d_in = packed.shape
    out = torch.empty(d_out, d_in, dtype=dtype, device=scales_OB.device)
    for part in _row_slices(d_out, d_in):
        q = e2m1.unpack(packed.tensors["packed"][part]).view(-1, scales_OB.shape[1], BLOCK)
        out[part] = q.mul_(scales_OB[part, :, None]).flatten(1)[:, :d_in]
    return out
