"""Decode attention in Triton, one launch: rotate, append, attend, split over the context, parts joined in fixed order.

Legend: B rows, H query heads, K key/value heads, G = H / K heads that share one, d head size, P pages, L tokens a page, N pages a
row has at most, J slots for the sums of a row's parts, M rows of a group.

A part is a run of tiles of one (row, key/value head). Its G query heads stand together on the row side of the matrix product (padded
to 16), so keys and values are read once for all of them. The new token never comes from the cache: the first part of a row rotates its
key, stores it with its value, and adds them to its running sums at the end, when the tiles are done. How a context is cut follows
from its own length and the batch's plan (`plan`), never from the rows beside it; the parts beyond each context's first are shared out
evenly among programs, so that one long context among short ones is worked on by all of them. Who ends last joins the parts, in the
order of the context and not of time. Lengths and page numbers are read on the device, so one captured graph serves every length. Softmax
is in float32, base 2; weights are rounded to the type of the values for the second product.

Where rows of a group read the same first pages (`SharedPages`), a launch before reads those once for all of them: their heads stand on the row side
of one product together, and each row gets its part of the result. The row's own part is then what comes after these pages.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.cached_attention.contexts import attend, attend_together
from qerl.kernels.cached_attention.plan import (
    LEAST_TILES,
    LONG_TILES,
    PROGRAMS_PER_PROCESSOR,
    Plan,
    plan_for,
    shared_plan,
)
from qerl.kernels.cached_attention.rows import CacheRows
from qerl.kernels.cached_attention.storage import FP8
from qerl.kernels.overlap import overlap
from qerl.kernels.rms_norm import NormNoise, noise_values
from qerl.kernels.rope import HeadBias, HeadNorms

TILE = 64
"""Positions per step of a program's loop."""
LOG2_E = 1.4426950408889634
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_SIDE = 16
"""Least rows of a matrix product."""
JOINED = 8
"""Parts that are read at once when they are joined."""
FETCHED = 1
"""Tiles that a program asks for before the kernel in front has ended, where all programs fit at one time; where more wait, what is asked for
ahead stands in front of what is needed now."""


def cached_attention(
    qkv_BX: Tensor,
    rotation: tuple[Tensor, Tensor],
    heads: int,
    kv_heads: int,
    k_cache_PLKd: Tensor,
    v_cache_PLKd: Tensor,
    rows: CacheRows,
    scale: float,
    norms: HeadNorms | None = None,
    plan: Plan | None = None,
    *,
    bias: HeadBias | None = None,
    dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """See `qerl.kernels.cached_attention.cached_attention`; ``plan`` overrides how contexts are cut."""
    cos_Bd, sin_Bd = (table.contiguous() for table in rotation)
    batch, size = cos_Bd.shape
    group = heads // kv_heads
    device, table_BN, shared = qkv_BX.device, rows.table_BN, rows.shared
    assert qkv_BX.stride(1) == 1 and qkv_BX.shape[1] == (heads + 2 * kv_heads) * size
    assert table_BN is None or rows.page_tokens % TILE == 0, "pages hold whole tiles"
    processors = _processors(device)
    if plan is None:
        most_tokens = rows.page_tokens * (1 if table_BN is None else table_BN.shape[1])
        plan = plan_for(batch, kv_heads, processors, -(-most_tokens // TILE))
    together = None if shared is None else shared_plan(shared.likely_groups, kv_heads, processors)
    before = 0 if together is None else together.most
    slots = before + (plan.slots if plan.most > 1 else 0)
    dtype = dtype or qkv_BX.dtype
    out_BHd = qkv_BX.new_empty(batch, heads, size, dtype=output_dtype or dtype)
    parts_BHJd = stats_BHJ2 = arrived_C = out_BHd
    if slots:
        parts_BHJd = torch.empty(batch, heads, slots, size, dtype=torch.float32, device=device)
        stats_BHJ2 = torch.empty(batch, heads, slots, 2, dtype=torch.float32, device=device)
    if plan.most > 1:
        arrived_C = _arrivals(device, triton.next_power_of_2(batch * kv_heads) * (1 + JOINED))
    q_weight_d, k_weight_d, eps, q_z, k_z = _head_norms(norms)
    bias_X = None if bias is None else bias.bias_X
    exact = dtype == torch.float32
    common: dict[str, Any] = {
        "NORMS": norms is not None,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "SIZE": size,
        "PADDED": triton.next_power_of_2(size),
        "TILE": TILE,
        "PAGE": rows.page_tokens,
        "LEAST": LEAST_TILES,
        "LONG": LONG_TILES,
        "DTYPE": _TYPES[dtype],
        "EXACT": exact,
        "num_warps": 4,
        "enable_fp_fusion": False,
        **overlap(device),
    }
    strides = (
        0 if table_BN is None else table_BN.stride(0),
        k_cache_PLKd.stride(0),
        k_cache_PLKd.stride(1),
    )
    if shared is not None and together is not None:
        assert table_BN is not None
        members = shared.members_CM.shape[1]
        attend_together[(together.programs,)](
            qkv_BX,
            cos_Bd,
            sin_Bd,
            q_weight_d,
            eps,
            *q_z,
            bias_X,
            k_cache_PLKd,
            v_cache_PLKd,
            table_BN,
            shared.pages_B,
            shared.members_CM,
            parts_BHJd,
            stats_BHJ2,
            scale * LOG2_E,
            qkv_BX.stride(0),
            len(shared.members_CM),
            together.first,
            together.most,
            slots,
            *strides,
            MEMBERS=members,
            SIDE=members * triton.next_power_of_2(group),
            LANES=_lanes(len(shared.members_CM)),
            num_stages=1 if exact else 3,
            **common,
        )
    few = plan.programs <= PROGRAMS_PER_PROCESSOR * processors
    attend[(plan.programs,)](
        qkv_BX,
        cos_Bd,
        sin_Bd,
        q_weight_d,
        k_weight_d,
        eps,
        *q_z,
        *k_z,
        bias_X,
        None if bias is None else bias.shift_Kd,
        k_cache_PLKd,
        v_cache_PLKd,
        rows.lengths_B,
        rows.lengths_B if table_BN is None else table_BN,
        rows.lengths_B if shared is None else shared.pages_B,
        out_BHd,
        parts_BHJd,
        stats_BHJ2,
        arrived_C,
        scale * LOG2_E,
        qkv_BX.stride(0),
        batch,
        plan.first,
        plan.most,
        slots,
        before,
        1 if together is None else together.first,
        1 if together is None else together.most,
        # In a captured step, what was stored for earlier tokens is not what the kernel in front writes; outside, it may be.
        int(device.type == "cuda" and torch.cuda.is_current_stream_capturing()),
        *strides,
        SIDE=max(_SIDE, triton.next_power_of_2(group)),
        JOIN_SIDE=triton.next_power_of_2(group),
        LANES=_lanes(batch) if plan.most > 1 else 1,
        FETCHED=FETCHED if few else 0,
        PAGED=table_BN is not None,
        SPLIT=plan.most > 1,
        SHARED=shared is not None,
        JOINED=JOINED,
        K_FP8=k_cache_PLKd.dtype == FP8,
        V_FP8=v_cache_PLKd.dtype == FP8,
        # With many programs a multiprocessor has four, which hide the way of a tile by the others' work: one tile each in shared memory, not two.
        # Tiles of float32 in several stages would not fit the shared memory of smaller devices.
        num_stages=1 if exact else 3 if few else 2,
        maxnreg=None if few or exact else 128,
        **common,
    )
    return out_BHd


def _lanes(count: int) -> int:
    """Lanes that hold a number for each of so many rows; few different ones, since kernels are compiled for each."""
    return next((lanes for lanes in (64, 512) if count <= lanes), triton.next_power_of_2(count))


def _head_norms(norms: HeadNorms | None) -> tuple[Any, ...]:
    """(weights of q and of k, eps, noise of q and of k), as the kernels take them."""
    if norms is None:
        return None, None, 0.0, (None, 0), (None, 0)
    return norms.q_weight_d, norms.k_weight_d, norms.eps, _values(norms.q_noise), _values(norms.k_noise)


def _values(noise: NormNoise | None) -> tuple[Tensor | None, int]:
    """z and the distance of its rows."""
    z = noise_values(noise)
    if z is None:
        return None, 0
    z = z.contiguous()
    return z, z.shape[-1] if z.dim() == 2 and len(z) > 1 else 0


@cache
def _arrivals(device: torch.device, count: int) -> Tensor:
    """How many parts of each row and head have ended; whoever joins them puts it back to 0. Kept, since captured steps use it."""
    return torch.zeros(count, dtype=torch.int32, device=device)


@cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of the device; 1 on the CPU, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
