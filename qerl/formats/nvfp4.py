"""NVFP4: E2M1 codes, one FP8 E4M3 scale a block of 16 along the inputs, one FP32 scale a tensor.

    w_hat = q * (s / G),     G = 2688 / amax  (2688 = 448 * 6, the largest block scale times the largest code)

G is kept as compressed-tensors keeps it and never as its reciprocal: 1 / (1 / G) differs from G for 12 % of floats.
4.5 bits a weight. Stored tensors (P = d_in padded to a multiple of 16, with zeros):

    packed        uint8          [d_out, P / 2]    even element in the low nibble
    block_scales  float8_e4m3fn  [d_out, P / 16]
    global_scale  float32        [segments]        one G for all parts of a fused group when quantized here

On a CUDA device `for_device` replaces the first two by `tiles`, the same numbers in the order of `qerl.formats.tiles`.

Two named roundings, each equal to the byte to the library it is named after, both on w.float():

    ct       G = 2688/amax (inf -> 1);  s = E4M3(min(G * (amax_b / 6), 448)), 0 -> 0.125
             code = RNE(clamp(w / (s / G)));  sign where that quotient is < 0, so -0.0 has code 0
    torchao  p = amax/2688;  s = E4M3(clamp((amax_b / 6) / p, 2^-6, 448)), never subnormal
             code = RNE(clamp(w * ((1 / p) / s)));  sign bit kept, so -0.0 has code 8

Where torchao's own arithmetic gives NaN it is not followed: a tensor with p = 0 (all zeros, or amax below 1.9e-42) is
stored as zero, and so are zeros in a tensor with amax below 5.1e-34 (0 * inf there). Where 2688/amax overflows (amax below
7.9e-36), G is 1 under `ct`, as in that library, and the largest float under `torchao`, whose codes saturate; either way the
error is below 1e-35.

Searched methods:

    mse            s among the neighbors of the rounded-to-nearest one in E4M3, 3 below (the largest weight saturates) to
                   7 above (the largest weight is coded 4, or 3, where steps are finer): the least squared error
    four_over_six  s for amax_b -> 6 or for amax_b -> 4, whichever leaves the smaller squared error

Both halve G first, if no block scale is so small that halving it would round. No step that rounding to nearest can choose
is lost by that, and blocks near the tensor's largest magnitude can be given a larger scale too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from qerl.errors import FormatError
from qerl.formats import e2m1
from qerl.formats.base import METHODS, BlockScales, PackLayout
from qerl.formats.e2m1_blocks import E2m1Format
from qerl.formats.tiles import TileLayout

BLOCK = 16
E4M3_MAX = 448.0
E4M3_SMALLEST_NORMAL = 2.0**-6
SCALE_RANGE = E4M3_MAX * e2m1.LARGEST

# E4M3 bytes 1..126 are its positive numbers in order; 127 is NaN.
_LARGEST_BYTE = 126
_OFFSETS = (-1, 1, -2, 2, -3, 3, 4, 5, 6, 7)


class Nvfp4Format(E2m1Format):
    """See the module's docstring for layout, roundings and methods."""

    name = "nvfp4"
    block = BLOCK
    methods = METHODS
    per_segment = frozenset({"global_scale"})
    tile_layout = TileLayout(scale_bytes=4, pairs=False)
    scale_dtype = torch.float8_e4m3fn
    layout = PackLayout(
        name="nvfp4-pack-quantized",
        suffixes={"packed": "weight_packed", "block_scales": "weight_scale", "global_scale": "weight_global_scale"},
        weights={"strategy": "tensor_group", "group_size": BLOCK, "scale_dtype": "torch.float8_e4m3fn"},
    )

    def scale_values(self, scales_OB: Tensor) -> Tensor:
        return scales_OB.float()

    def tensor_scales(self, reach: Tensor, rounding: str, segments: int) -> dict[str, Tensor]:
        """All fused parts share one G, that of the largest magnitude."""
        return {"global_scale": global_scale(reach, rounding).repeat(segments)}

    def nearest_scales(self, amax_OB: Tensor, reach: Tensor, rounding: str) -> Tensor:
        if rounding == "torchao":
            scales = (amax_OB / e2m1.LARGEST) / _tensor_scale(reach)
            return scales.clamp(E4M3_SMALLEST_NORMAL, E4M3_MAX).to(torch.float8_e4m3fn)
        scales = (global_scale(reach) * (amax_OB / e2m1.LARGEST)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
        return torch.where(scales == 0, 0.125, scales).to(torch.float8_e4m3fn)

    def search_reach(self, reach: Tensor, scales_OB: Tensor, amax_OB: Tensor) -> Tensor:
        smallest = torch.where(amax_OB > 0, scales_OB.float(), torch.inf).amin()
        return torch.where(smallest >= 2 * E4M3_SMALLEST_NORMAL, 2 * reach, reach)

    def candidates(self, method: str, scales_OB: Tensor, amax_OB: Tensor, reach: Tensor) -> Iterable[Tensor]:
        nearest = scales_OB.view(torch.uint8)
        yield nearest
        if method == "four_over_six":
            yield self.nearest_scales(amax_OB * (e2m1.LARGEST / 4), reach, "ct").view(torch.uint8)
        else:
            for offset in _OFFSETS:
                yield (nearest.to(torch.int16) + offset).clamp_(1, _LARGEST_BYTE).to(torch.uint8)

    def codes(self, w_OBK: Tensor, steps_OB: Tensor, scales_OB: Tensor, scales: BlockScales) -> Tensor:
        if scales.rounding == "torchao":
            x = w_OBK * ((1.0 / _tensor_scale(scales.reach)) / scales_OB.float())[..., None]
            # Zeros times an overflowed factor would be NaN.
            x = torch.where(w_OBK == 0, w_OBK, x)
            return e2m1.encode(x, torch.signbit(x))
        x = w_OBK / steps_OB[..., None]
        return e2m1.encode(x, x < 0)

    def tile_scales(self, codes_OI: Tensor, scales_OB: Tensor) -> Tensor:
        blocks = codes_OI.unflatten(1, (-1, BLOCK))
        blocks ^= ((scales_OB >> 7) << 3)[..., None]
        blocks *= ((scales_OB & 127) != 0)[..., None]
        wide = _wide_scales(scales_OB.device)[0].index_select(0, scales_OB.reshape(-1).int()).view(scales_OB.shape)
        words = pad(wide, (0, -wide.shape[1] % _WORD)).unflatten(1, (-1, _WORD))
        return (words << 4 | words.roll(1, 2) >> 4).flatten(1)

    def natural_scales(self, stored_OB: Tensor) -> Tensor:
        words = stored_OB.unflatten(1, (-1, _WORD))
        wide = words >> 4 | words.roll(-1, 2) << 4
        return _wide_scales(stored_OB.device)[1].index_select(0, wide.reshape(-1).int()).view(stored_OB.shape)

    def check_stored(self, tensors: Mapping[str, Tensor], name: str) -> None:
        divisor = tensors["global_scale"]
        if not bool(torch.isfinite(divisor) & (divisor > 0)):
            raise FormatError(
                f"the global scale of '{name}' is unusable", got=float(divisor), expected="a positive finite number"
            )
        scales = tensors["block_scales"]
        # NaN fails the comparison; -0 passes and is 0.
        if not bool((scales.float() >= 0).all()):
            raise FormatError(
                f"a block scale of '{name}' is unusable",
                got=float(scales.float().nan_to_num(nan=-torch.inf).min()),
                expected="finite numbers from 0 on",
                remedy="Copy the file again from its source, or use the plain checkpoint.",
            )


def global_scale(reach: Tensor, rounding: str = "ct") -> Tensor:
    """G = 2688 / reach, float32 [1]; see the module's docstring for magnitudes below 7.9e-36."""
    reach = reach.float().reshape(1)
    scale = SCALE_RANGE / reach
    if rounding == "torchao":
        scale = torch.where(reach / SCALE_RANGE > 0, scale.clamp(max=torch.finfo(torch.float32).max), 1.0)
    return torch.where(torch.isinf(scale), 1.0, scale)


def _tensor_scale(reach: Tensor) -> Tensor:
    """p = reach / 2688 of the rounding `torchao`, 1 where that is 0."""
    scale = reach / SCALE_RANGE
    return torch.where(scale > 0, scale, 1.0)


_WORD = 4
"""Scales of a row of a tile: a word, which is turned by 4 bits."""
_EXPONENT_SHIFT = 22
_NAN = 0xFF


@cache
def _wide_scales(device: torch.device) -> tuple[Tensor, Tensor]:
    """uint8 [256] each: from an E4M3 byte to its magnitude with 5 bits of exponent and 3 of mantissa, and back."""
    forth, back = [0] * 256, [0] * 256
    for byte in range(1, 127):
        value = torch.tensor(byte, dtype=torch.uint8).view(torch.float8_e4m3fn).double().item()
        mantissa, exponent = torch.frexp(torch.tensor(value, dtype=torch.float64))
        wide = 8 * (int(exponent) - 1 + _EXPONENT_SHIFT) + round((2 * float(mantissa) - 1) * 8)
        forth[byte] = forth[byte | 128] = wide
        back[wide] = byte
    forth[127] = forth[255] = _NAN
    back[_NAN] = 127
    return (
        torch.tensor(forth, dtype=torch.uint8).to(device),
        torch.tensor(back, dtype=torch.uint8).to(device),
    )
