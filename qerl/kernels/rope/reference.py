"""Rotary embedding in plain torch. Legend: T tokens, H query heads, K key/value heads, d head size, X = (H + 2 K) d."""

from __future__ import annotations

import torch
from torch import Tensor

from qerl.kernels.rms_norm import NormNoise, noise_values, rms_norm
from qerl.kernels.rope.norms import CachePlaces, HeadBias, HeadNorms
from qerl.kernels.types import as_type


def rotate(x_TNd: Tensor, rotation: tuple[Tensor, Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Rotary embedding of [T, heads, d]: pairs (j, j + d/2) turn by position * frequency j. Computed in float32, given in ``dtype`` or that of x.

    With the sines of the first half negated in the table, x * cos + swap_halves(x) * sin is the whole rotation. (A fused
    multiply-add would be one rounding less, and one unit in the last place away from everybody else's float32.)
    """
    cos_T1d, sin_T1d = rotation
    x = x_TNd.float()
    return as_type((x.roll(x.shape[-1] // 2, -1) * sin_T1d).add_(x * cos_T1d), dtype or x_TNd.dtype)


def rope(
    qkv_TX: Tensor,
    positions_T: Tensor | None,
    cos_Pd: Tensor,
    sin_Pd: Tensor,
    heads: int,
    kv_heads: int,
    norms: HeadNorms | None,
    bias: HeadBias | None = None,
    dtype: torch.dtype | None = None,
    stored: CachePlaces | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `qerl.kernels.rope.rope`."""
    q_THd, k_TKd, v_TKd = _heads(qkv_TX, positions_T, cos_Pd, sin_Pd, heads, kv_heads, norms, bias, dtype)
    if stored is not None:
        for cache_PLKd, values_TKd in ((stored.k_PLKd, k_TKd), (stored.v_PLKd, v_TKd)):
            cache_PLKd.flatten(0, 1).index_copy_(0, stored.place_M, values_TKd.index_select(0, stored.source_M))
    return q_THd, k_TKd, v_TKd


def _heads(
    qkv_TX: Tensor,
    positions_T: Tensor | None,
    cos_Pd: Tensor,
    sin_Pd: Tensor,
    heads: int,
    kv_heads: int,
    norms: HeadNorms | None,
    bias: HeadBias | None,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = dtype or qkv_TX.dtype
    if bias is not None:
        wide = torch.promote_types(qkv_TX.dtype, torch.float32)
        given_TX = qkv_TX.to(wide) + bias.bias_X.to(wide)
        plain = _heads(given_TX, positions_T, cos_Pd, sin_Pd, heads, kv_heads, None, None, None)
        q_THd, k_TKd, v_TKd = plain
        return q_THd.to(dtype), (k_TKd - bias.shift_Kd).to(dtype), v_TKd.to(dtype)
    tokens, size = qkv_TX.shape[0], cos_Pd.shape[-1]
    heads_TNd = qkv_TX.reshape(tokens, heads + 2 * kv_heads, size)
    qk_TNd, v_TKd = heads_TNd.split_with_sizes((heads + kv_heads, kv_heads), dim=1)
    if norms is not None:
        q_THd, k_TKd = qk_TNd.split((heads, kv_heads), dim=1)
        q_THd = head_norm(q_THd, norms.q_weight_d, norms.eps, norms.q_noise, kernel="reference")
        k_TKd = head_norm(k_TKd, norms.k_weight_d, norms.eps, norms.k_noise, kernel="reference")
        qk_TNd = torch.cat((q_THd, k_TKd), dim=1)
    if positions_T is not None:
        cos_Pd, sin_Pd = cos_Pd.index_select(0, positions_T), sin_Pd.index_select(0, positions_T)
    turned_TNd = rotate(qk_TNd, (cos_Pd.unsqueeze(1), sin_Pd.unsqueeze(1)), dtype)
    q_THd, k_TKd = turned_TNd.split_with_sizes((heads, kv_heads), dim=1)
    return q_THd, k_TKd, as_type(v_TKd, dtype)


def head_norm(x_TNd: Tensor, weight_d: Tensor, eps: float, noise: NormNoise | None, *, kernel: str) -> Tensor:
    """RMSNorm over each head; the noise is one draw [d], or one a token [T, d]."""
    z = noise_values(noise)
    if z is not None and z.dim() == 2:
        z = z.unsqueeze(1).expand_as(x_TNd)
    return rms_norm(x_TNd, weight_d, eps, z, kernel=kernel)
