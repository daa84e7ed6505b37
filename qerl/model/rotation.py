"""Angles by which heads turn, and what a bias gives all keys on average.

Shape legend: P positions of the rotation table, H query heads, K key/value heads, d head dimension, h pairs of channels, X = (H + 2 K) d.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qerl.kernels.rope import HeadBias, rotate
from qerl.model.rope import RopeSpec
from qerl.model.spec import ModelSpec

SHIFT_POSITIONS = 1024
"""Positions over which the part of k's bias that keys have in common is taken. Any number gives the same attention."""


def rotation_table(rope: RopeSpec, head_dim: int, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, float32 [P, d] each; sines of the first half carry a minus sign.

    A table, and not cosines taken at run time, because vectorized cosines of one angle may differ by place in a batch.
    """
    angle_Ph = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * inverse_frequencies(
        rope, head_dim, device
    )
    cos_Ph, sin_Ph = angle_Ph.cos(), angle_Ph.sin()
    return torch.cat((cos_Ph, cos_Ph), dim=-1), torch.cat((-sin_Ph, sin_Ph), dim=-1)


def head_bias(bias_X: Tensor | None, spec: ModelSpec, rotation: tuple[Tensor, Tensor]) -> HeadBias:
    """The bias of q, k and v as it is added to heads; keys lose what it gives them on average over the first positions."""
    assert bias_X is not None
    k_1Kd = bias_X[spec.q_size : spec.q_size + spec.kv_size].float().view(1, spec.num_kv_heads, spec.head_dim)
    turns = (table_Pd[:SHIFT_POSITIONS].unsqueeze(1) for table_Pd in rotation)
    shift_Kd = rotate(k_1Kd, (next(turns), next(turns))).mean(0)
    return HeadBias(bias_X=bias_X, shift_Kd=shift_Kd.contiguous())


def inverse_frequencies(rope: RopeSpec, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Angle per position of each pair, float32 [d / 2]: theta^(-2j/d), stretched as ``rope.kind`` says."""
    exponents_h = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequency_h = 1.0 / rope.theta**exponents_h
    if rope.kind == "default":
        return frequency_h
    slow_h = frequency_h / rope.factor
    if rope.kind == "linear":
        return slow_h
    turns_h = rope.original_max_positions * frequency_h / (2 * math.pi)
    keep_h = ((turns_h - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return keep_h * frequency_h + (1 - keep_h) * slow_h
