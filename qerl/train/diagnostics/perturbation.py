"""What the noise on a norm does to the outputs of the projections that read it, and how their perturbations hang together.

Shape legend: T probe tokens, D hidden size, M noise draws, O output rows of a group, P output rows of a projection.

With h = u * (w + z) the output of projection a moves by d_a = W_a (u * z). Its covariance over draws of z, given u, is
C_ab = E[d_a d_b^T]. When projections share one z (q, k, v; gate, up), C_ab is large: they move together. With a draw for
each, C_ab is 0. Reported are the size of d_a against the output, and the RV coefficient (Robert and Escoufier, 1976)

    |C_ab|_F^2 / sqrt(|C_aa|_F^2 |C_bb|_F^2),  which is 1 for d_b proportional to d_a and 0 for unrelated ones.

Each squared norm is estimated without bias from pairs of draws m != n: |C_ab|_F^2 = E[(d_a^m . d_a^n) (d_b^m . d_b^n)].
Upstream noise is left out: u is that of the clean pass, so that each projection is seen alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from qerl.kernels.rms_norm import rms_norm
from qerl.model.aqn import Noise, NoisePass
from qerl.model.decoder import Decoder
from qerl.model.linear import GroupedLinear
from qerl.records import TrainBatch

DRAWS = 16
MAX_LAYERS = 8
"""Layers looked at, evenly spread."""
MAX_TOKENS = 64
"""Answer positions looked at."""
GROUPS = {"attn_norm": "qkv", "mlp_norm": "gate_up"}
"""Norm -> the group of projections that reads it, as attribute of a layer."""


def perturbation_metrics(model: Decoder, batch: TrainBatch, noises: Sequence[Noise]) -> dict[str, float]:
    """Metrics ``perturbation/...``, means over up to :data:`MAX_LAYERS` layers and :data:`MAX_TOKENS` tokens of a batch.

    Args:
        model: its current weights, adapters and clean scales.
        batch: packed probe answers.
        noises: M >= 2 independent draws. A norm without noise gives no metric.
    """
    context = batch.context()
    passes = [noise.for_pass(context) for noise in noises]
    rows_T = batch.predictor_N[:MAX_TOKENS]
    chosen = set(_spread(model.spec.num_layers))
    found: dict[str, list[float]] = {}
    for layer, site, x_TD in model.norm_inputs(batch.tokens_T, context):
        if layer not in chosen:
            continue
        linear: GroupedLinear = getattr(model.layers[layer], GROUPS[site])
        u_TD = rms_norm(x_TD[rows_T].float(), torch.ones_like(x_TD[0]).float(), model.spec.rms_eps)
        moved = [_moved(linear, site, layer, u_TD, one, rows_T, model.dtype) for one in passes]
        kept = [moved_TO for moved_TO in moved if moved_TO is not None]
        if kept:
            clean_TO = _product(linear, u_TD * model.norm_weight(layer, site).detach(), model.dtype)
            for name, value in projection_statistics(linear, torch.stack(kept), clean_TO).items():
                found.setdefault(name, []).append(value)
    return {f"perturbation/{name}": math.fsum(values) / len(values) for name, values in found.items()}


def projection_statistics(linear: GroupedLinear, moved_MTO: Tensor, clean_TO: Tensor) -> dict[str, float]:
    """Relative size of each member's perturbation, and the RV coefficient of each pair of members.

    Args:
        linear: the group, for the rows of its members.
        moved_MTO: output perturbation of each draw.
        clean_TO: output without noise and without bias.

    Returns:
        ``{member}/relative``: root mean square of the perturbation over that of the output. ``{a}_{b}/dependence``: RV
        coefficient; an estimate, so that unrelated members give values around 0 that may be negative.
    """
    short = {part: part.removesuffix("_proj") for part in linear.parts}
    products: dict[str, Tensor] = {}
    result: dict[str, float] = {}
    for part in linear.parts:
        start, stop = linear.rows_of(part)
        moved_MTP, clean_TP = moved_MTO[..., start:stop].double(), clean_TO[:, start:stop].double()
        size = moved_MTP.pow(2).mean() / clean_TP.pow(2).mean().clamp(min=1e-30)
        result[f"{short[part]}/relative"] = float(size.sqrt())
        products[part] = torch.einsum("mtp,ntp->tmn", moved_MTP, moved_MTP)
    for a, b in combinations(linear.parts, 2):
        cross = squared_norm(products[a], products[b])
        own, other = squared_norm(products[a], products[a]), squared_norm(products[b], products[b])
        if own > 0 and other > 0:
            result[f"{short[a]}_{short[b]}/dependence"] = cross / math.sqrt(own * other)
    return result


def squared_norm(products_a_TMM: Tensor, products_b_TMM: Tensor) -> float:
    """Unbiased estimate of |C_ab|_F^2, averaged over tokens, from the inner products of draws; float64 [T, M, M]."""
    draws = products_a_TMM.shape[-1]
    both_TMM = products_a_TMM * products_b_TMM
    off_T = both_TMM.sum((-1, -2)) - both_TMM.diagonal(dim1=-2, dim2=-1).sum(-1)
    return float(off_T.mean()) / (draws * (draws - 1))


def _moved(
    linear: GroupedLinear, site: str, layer: int, u_TD: Tensor, noise: NoisePass, rows_T: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Change of the group's output under one draw, float32 [T, O]; None where the norm has no noise."""

    def change(name: str) -> Tensor | None:
        z = noise.z(layer, name)
        if z is None:
            return None
        return _product(linear, u_TD * (z if z.dim() == 1 else z[rows_T]), dtype)

    if not noise.independent:
        return change(site)
    parts = []
    for part in linear.parts:
        moved_TO = change(f"{site}/{part}")
        if moved_TO is None:
            return None
        start, stop = linear.rows_of(part)
        parts.append(moved_TO[:, start:stop])
    return torch.cat(parts, dim=-1)


def _product(linear: GroupedLinear, x_TD: Tensor, dtype: torch.dtype) -> Tensor:
    """Linear part of a group: base and adapters, no bias; float32 [T, O]."""
    y_TO = linear.stacked(x_TD.to(dtype)).float()
    return y_TO if linear.added_O is None else y_TO - linear.added_O.float()


def _spread(count: int) -> list[int]:
    """Up to :data:`MAX_LAYERS` of ``count`` layers, the first and the last among them."""
    if count <= MAX_LAYERS:
        return list(range(count))
    return [round(i * (count - 1) / (MAX_LAYERS - 1)) for i in range(MAX_LAYERS)]
