# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Norm over heads, rotation, split and storing in a cache, in one pass over memory.

Legend: T tokens, M places in a cache, H query heads, K key/value heads, d head size, X = (H + 2 K) d. A tile is a few heads of one token, as two
halves of d / 2 channels. Float64 goes to the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl.kernels.rms_norm import NormNoise, noise_values
from qerl.kernels.rope import reference
from qerl.kernels.rope.norms import CachePlaces, HeadBias, HeadNorms
from qerl.kernels.rope.reference import head_norm
from qerl.kernels.sizes import ceil_div, power_of_2

_HEADS_A_TILE = 8


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
    if qkv_TX.dtype == torch.float64:
        return reference.rope(qkv_TX, positions_T, cos_Pd, sin_Pd, heads, kv_heads, norms, bias, dtype, stored)
    if (
        norms is not None
        and torch.is_grad_enabled()
        and (norms.q_weight_d.requires_grad or norms.k_weight_d.requires_grad)
    ):
        qkv_TX, norms = _normed(qkv_TX, heads, kv_heads, norms), None
    if not torch.is_grad_enabled():
        return _heads(qkv_TX, positions_T, cos_Pd, sin_Pd, heads, kv_heads, norms, bias, dtype, stored)
    return _Rope.apply(qkv_TX, positions_T, cos_Pd, sin_Pd, heads, kv_heads, norms, bias, dtype)


def _normed(qkv_TX: Tensor, heads: int, kv_heads: int, norms: HeadNorms) -> Tensor:
    """The projections with q and k normalized by the norm's own kernel, which has a gradient to the scales."""
    size = norms.q_weight_d.numel()
    q_TX, k_TX, v_TX = qkv_TX.split((heads * size, kv_heads * size, kv_heads * size), dim=1)
    q_THd, k_TKd = q_TX.unflatten(1, (heads, size)), k_TX.unflatten(1, (kv_heads, size))
    q_THd = head_norm(q_THd, norms.q_weight_d, norms.eps, norms.q_noise, kernel="triton")
    k_TKd = head_norm(k_TKd, norms.k_weight_d, norms.eps, norms.k_noise, kernel="triton")
    return torch.cat((q_THd.flatten(1), k_TKd.flatten(1), v_TX), dim=1)


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
    stored: CachePlaces | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, size = qkv_TX.shape[0], cos_Pd.shape[-1]
    q_THd, k_TKd, v_TKd = (
        qkv_TX.new_empty(tokens, count, size, dtype=dtype or qkv_TX.dtype) for count in (heads, kv_heads, kv_heads)
    )
    outputs = (q_THd, k_TKd, v_TKd)
    _launch(_forward, qkv_TX, positions_T, cos_Pd, sin_Pd, heads, kv_heads, norms, outputs, None, bias, stored)
    return outputs


class _Rope(torch.autograd.Function):
    """Keeps the projections only where a norm needs them."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv_TX: Tensor,
        positions_T: Tensor | None,
        cos_Pd: Tensor,
        sin_Pd: Tensor,
        heads: int,
        kv_heads: int,
        norms: HeadNorms | None,
        bias: HeadBias | None,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, ...]:
        outputs = _heads(qkv_TX, positions_T, cos_Pd, sin_Pd, heads, kv_heads, norms, bias, dtype)
        ctx.save_for_backward(None if norms is None else qkv_TX, positions_T, cos_Pd, sin_Pd)
        ctx.norms, ctx.dtype = norms, qkv_TX.dtype
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv_TX, positions_T, cos_Pd, sin_Pd = ctx.saved_tensors
        pieces = tuple(grad.contiguous() for grad in grads)
        grad_TX = gradient(pieces, qkv_TX, positions_T, cos_Pd, sin_Pd, ctx.norms, ctx.dtype)
        return grad_TX, *[None] * 8


def gradient(
    grads: tuple[Tensor, ...],
    qkv_TX: Tensor | None,
    positions_T: Tensor | None,
    cos_Pd: Tensor,
    sin_Pd: Tensor,
    norms: HeadNorms | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Gradient to the projections [T, X], in ``dtype`` or that of the gradients to q, k and v (contiguous), which it is made from; with norms it
    needs the projections."""
    (tokens, heads, size), kv_heads = grads[0].shape, grads[1].shape[1]
    grad_TX = grads[0].new_empty(tokens, (heads + 2 * kv_heads) * size, dtype=dtype or grads[0].dtype)
    source = grad_TX if qkv_TX is None else qkv_TX
    _launch(_backward, source, positions_T, cos_Pd, sin_Pd, heads, kv_heads, norms, grads, grad_TX)
    return grad_TX


def _launch(
    kernel: Any,
    qkv_TX: Tensor,
    positions_T: Tensor | None,
    cos_Pd: Tensor,
    sin_Pd: Tensor,
    heads: int,
    kv_heads: int,
    norms: HeadNorms | None,
    pieces: tuple[Tensor, ...],
    grad_TX: Tensor | None,
    bias: HeadBias | None = None,
    stored: CachePlaces | None = None,
) -> None:
    size = cos_Pd.shape[-1]
    assert qkv_TX.stride(-1) == 1 and qkv_TX.shape[-1] == (heads + 2 * kv_heads) * size
    arguments: list[Any] = [qkv_TX, qkv_TX.stride(0), positions_T, cos_Pd.contiguous(), sin_Pd.contiguous()]
    if norms is None:
        arguments += [None, None, 0.0, None, 0, None, 0]
    else:
        arguments += [norms.q_weight_d, norms.k_weight_d, norms.eps]
        for noise in (norms.q_noise, norms.k_noise):
            arguments += _values(noise)
    rows = tokens = len(qkv_TX)
    last: tuple[Any, ...] = (grad_TX,)
    if grad_TX is None:
        last = (None, None) if bias is None else (bias.bias_X, bias.shift_Kd)
        if stored is None:
            last += (None, None, None, None, tokens)
        else:
            caches, rows = (stored.k_PLKd, stored.v_PLKd), len(stored.place_M)
            assert rows >= tokens and all(c.dtype == pieces[1].dtype and c.is_contiguous() for c in caches)
            last += (*caches, stored.source_M, stored.place_M, tokens)
    if tokens:
        kernel[(rows, ceil_div(heads + 2 * kv_heads, _HEADS_A_TILE))](
            *arguments,
            *pieces,
            *last,
            NORMS=norms is not None,
            H=heads,
            K=kv_heads,
            HALF=size // 2,
            TILE=_HEADS_A_TILE,
            BLOCK=power_of_2(size // 2),
            num_warps=2,
            enable_fp_fusion=False,
        )


def _values(noise: NormNoise | None) -> tuple[Tensor | None, int]:
    """z and the distance of its rows."""
    z = noise_values(noise)
    if z is None:
        return None, 0
    z = z.contiguous()
    return z, z.shape[-1] if z.dim() == 2 and len(z) > 1 else 0


@triton.jit
def _head_scale(weight, z, z_stride, token, columns, inside):
    """w + z of one half of the channels."""
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if z is not None:
        scale += tl.load(z + token * z_stride + columns, mask=inside, other=0.0).to(tl.float32)
    return scale


@triton.jit
def _scales(
    q_weight, k_weight, q_z, q_z_stride, k_z, k_z_stride, token, head, columns, inside, H: tl.constexpr, K: tl.constexpr
):
    """Scale of each head of the tile, one half of its channels; v has none."""
    q_scale = _head_scale(q_weight, q_z, q_z_stride, token, columns, inside)
    k_scale = _head_scale(k_weight, k_z, k_z_stride, token, columns, inside)
    return tl.where((head < H)[:, None], q_scale[None, :], k_scale[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    qkv,
    qkv_stride,
    positions,
    cos,
    sin,
    q_weight,
    k_weight,
    eps,
    q_z,
    q_z_stride,
    k_z,
    k_z_stride,
    q,
    k,
    v,
    bias,
    shift,
    k_cache,
    v_cache,
    sources,
    places,
    tokens,
    NORMS: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place_row = tl.program_id(0).to(tl.int64)
    token = place_row
    if places is not None:
        token = tl.load(sources + place_row)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, BLOCK)
    inside = columns < HALF
    mask = (head < H + 2 * K)[:, None] & inside[None, :]
    source = qkv + token * qkv_stride + head[:, None] * (2 * HALF) + columns[None, :]
    low, high = tl.load(source, mask=mask, other=0.0), tl.load(source + HALF, mask=mask, other=0.0)
    x_low, x_high = low.to(tl.float32), high.to(tl.float32)
    at = head[:, None] * (2 * HALF) + columns[None, :]
    if bias is not None:
        x_low += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
        x_high += tl.load(bias + at + HALF, mask=mask, other=0.0).to(tl.float32)
        low, high = x_low.to(v.dtype.element_ty), x_high.to(v.dtype.element_ty)
    if NORMS:
        mean = (tl.sum(x_low * x_low, axis=1) + tl.sum(x_high * x_high, axis=1)) / (2 * HALF)
        r = (1.0 / tl.sqrt_rn(mean + eps))[:, None]
        s_low = _scales(q_weight, k_weight, q_z, q_z_stride, k_z, k_z_stride, token, head, columns, inside, H, K)
        s_high = _scales(
            q_weight, k_weight, q_z, q_z_stride, k_z, k_z_stride, token, head, columns + HALF, inside, H, K
        )
        x_low = (x_low * r * s_low).to(low.dtype).to(tl.float32)
        x_high = (x_high * r * s_high).to(low.dtype).to(tl.float32)
    row = token
    if positions is not None:
        row = tl.load(positions + token)
    c = tl.load(cos + row * (2 * HALF) + columns, mask=inside, other=0.0)[None, :]
    s = tl.load(sin + row * (2 * HALF) + HALF + columns, mask=inside, other=0.0)[None, :]
    y_low, y_high = x_low * c - x_high * s, x_high * c + x_low * s
    if shift is not None:
        is_k = mask & ((head >= H) & (head < H + K))[:, None]
        y_low -= tl.load(shift + at - H * 2 * HALF, mask=is_k, other=0.0)
        y_high -= tl.load(shift + at - H * 2 * HALF + HALF, mask=is_k, other=0.0)
    y_low, y_high = y_low.to(q.dtype.element_ty), y_high.to(q.dtype.element_ty)
    if places is not None:
        k_at = tl.load(places + place_row) * (K * 2 * HALF) + at - H * 2 * HALF
        in_k = mask & ((head >= H) & (head < H + K))[:, None]
        tl.store(k_cache + k_at, y_low, mask=in_k)
        tl.store(k_cache + k_at + HALF, y_high, mask=in_k)
        in_v = mask & (head >= H + K)[:, None]
        tl.store(v_cache + k_at - K * 2 * HALF, low.to(v.dtype.element_ty), mask=in_v)
        tl.store(v_cache + k_at - K * 2 * HALF + HALF, high.to(v.dtype.element_ty), mask=in_v)
        # A token that goes to further places is returned by the first of its programs alone.
        mask = mask & (place_row < tokens)
    to_q = mask & (head < H)[:, None]
    q_at = q + token * (H * 2 * HALF) + at
    tl.store(q_at, y_low, mask=to_q)
    tl.store(q_at + HALF, y_high, mask=to_q)
    to_k = mask & ((head >= H) & (head < H + K))[:, None]
    k_at = k + token * (K * 2 * HALF) + at - H * 2 * HALF
    tl.store(k_at, y_low, mask=to_k)
    tl.store(k_at + HALF, y_high, mask=to_k)
    to_v = mask & (head >= H + K)[:, None]
    v_at = v + token * (K * 2 * HALF) + at - (H + K) * 2 * HALF
    tl.store(v_at, low.to(v.dtype.element_ty), mask=to_v)
    tl.store(v_at + HALF, high.to(v.dtype.element_ty), mask=to_v)


@triton.jit
def _load_half(dq, dk, dv, token, at, mask, head, H: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr):
    """Gradient of one half of the tile's heads, from the three tensors that hold it; float32."""
    from_q = tl.load(dq + token * (H * SIZE) + at, mask=mask & (head < H)[:, None], other=0.0)
    in_k = ((head >= H) & (head < H + K))[:, None]
    from_k = tl.load(dk + token * (K * SIZE) + at - H * SIZE, mask=mask & in_k, other=0.0)
    in_v = (head >= H + K)[:, None]
    from_v = tl.load(dv + token * (K * SIZE) + at - (H + K) * SIZE, mask=mask & in_v, other=0.0)
    return from_q.to(tl.float32) + from_k.to(tl.float32) + from_v.to(tl.float32)


@triton.jit
def _backward(
    qkv,
    qkv_stride,
    positions,
    cos,
    sin,
    q_weight,
    k_weight,
    eps,
    q_z,
    q_z_stride,
    k_z,
    k_z_stride,
    dq,
    dk,
    dv,
    grad,
    NORMS: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, BLOCK)
    inside = columns < HALF
    mask = (head < H + 2 * K)[:, None] & inside[None, :]
    at = head[:, None] * (2 * HALF) + columns[None, :]
    d_low = _load_half(dq, dk, dv, token, at, mask, head, H, K, 2 * HALF)
    d_high = _load_half(dq, dk, dv, token, at + HALF, mask, head, H, K, 2 * HALF)
    row = token
    if positions is not None:
        row = tl.load(positions + token)
    c = tl.load(cos + row * (2 * HALF) + columns, mask=inside, other=0.0)[None, :]
    s = tl.load(sin + row * (2 * HALF) + HALF + columns, mask=inside, other=0.0)[None, :]
    back_low, back_high = d_low * c + d_high * s, d_high * c - d_low * s
    if NORMS:
        source = qkv + token * qkv_stride + at
        x_low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        x_high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        mean = (tl.sum(x_low * x_low, axis=1) + tl.sum(x_high * x_high, axis=1)) / (2 * HALF)
        r = (1.0 / tl.sqrt_rn(mean + eps))[:, None]
        back_low *= _scales(q_weight, k_weight, q_z, q_z_stride, k_z, k_z_stride, token, head, columns, inside, H, K)
        back_high *= _scales(
            q_weight, k_weight, q_z, q_z_stride, k_z, k_z_stride, token, head, columns + HALF, inside, H, K
        )
        u_low, u_high = x_low * r, x_high * r
        dot = ((tl.sum(back_low * u_low, axis=1) + tl.sum(back_high * u_high, axis=1)) / (2 * HALF))[:, None]
        back_low, back_high = r * (back_low - u_low * dot), r * (back_high - u_high * dot)
    is_v = (head >= H + K)[:, None]
    result = grad + token * ((H + 2 * K) * 2 * HALF) + at
    tl.store(result, tl.where(is_v, d_low, back_low).to(grad.dtype.element_ty), mask=mask)
    tl.store(result + HALF, tl.where(is_v, d_high, back_high).to(grad.dtype.element_ty), mask=mask)
