"""One decoder layer as plain tensors, and its forward pass in the four steps at which a quantizer looks in.

    attention_input   h = RMSNorm(x)                  read by q, k, v
    attention_inner   a = attention(q, k, v of h)     read by o;      x += o(a)
    mlp_input         h = RMSNorm(x)                  read by gate, up
    mlp_inner         m = silu(gate(h)) * up(h)       read by down;   x += down(m)

Legend: T tokens, D hidden size, O output rows, I inputs, F inner size of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from qerl.kernels.rms_norm import rms_norm
from qerl.kernels.rope import rotate
from qerl.model.attention import PackedSequences
from qerl.model.rotation import rotation_table
from qerl.model.spec import ModelSpec
from qerl.quantize.source import CheckpointSource

NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""Attribute of a layer -> the norm's name in a checkpoint."""


@dataclass(slots=True)
class LayerTensors:
    """Weights of one layer, by group of projections (`qkv`, `o`, `gate_up`, `down`: `GroupShape.attribute`)."""

    index: int
    weights: dict[str, Tensor]
    """Stacked rows of each group [O, I], as stored or float32."""
    biases: dict[str, Tensor]
    """Stacked biases [O] of the groups that have one."""
    norms: dict[str, Tensor]
    """`attn_norm`, `mlp_norm` [D]."""
    head_norms: dict[str, Tensor] = field(default_factory=dict)
    """`q_norm`, `k_norm` [d] where the architecture has them."""

    def copy(self) -> LayerTensors:
        """Other dicts, the same tensors: replacing an entry of the copy leaves this one alone."""
        return LayerTensors(self.index, dict(self.weights), dict(self.biases), dict(self.norms), dict(self.head_norms))

    def cast(self, dtype: torch.dtype) -> LayerTensors:
        """Weights and biases in compute type, norms in float32: ready for `LayerForward`."""
        return LayerTensors(
            self.index,
            {key: tensor.to(dtype) for key, tensor in self.weights.items()},
            {key: tensor.to(dtype) for key, tensor in self.biases.items()},
            {key: tensor.float() for key, tensor in self.norms.items()},
            {key: tensor.float() for key, tensor in self.head_norms.items()},
        )


def read_layer(spec: ModelSpec, source: CheckpointSource, index: int, device: torch.device) -> LayerTensors:
    """Layer `index` of a plain checkpoint, dtypes as stored.

    Raises:
        CheckpointError: a tensor cannot be read.
        FormatError: it holds NaN or infinity.
    """
    prefix = f"model.layers.{index}"
    weights, biases = {}, {}
    for shape in spec.groups():
        names = [f"model.{name}" for name in shape.part_names(index)]
        weights[shape.attribute] = stack([source.read(f"{name}.weight", device) for name in names])
        if shape.bias:
            biases[shape.attribute] = stack([source.read(f"{name}.bias", device) for name in names])
    norms = {key: source.read(f"{prefix}.{name}.weight", device) for key, name in NORMS.items()}
    head_norms = {}
    if spec.qk_norm:
        head_norms = {key: source.read(f"{prefix}.self_attn.{key}.weight", device) for key in ("q_norm", "k_norm")}
    return LayerTensors(index, weights, biases, norms, head_norms)


def stack(tensors: list[Tensor]) -> Tensor:
    """Rows of all, one after the other; a single tensor as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


class LayerForward:
    """The forward pass of any layer of one model."""

    def __init__(self, spec: ModelSpec, positions: int, device: torch.device):
        self.spec = spec
        self._cos_Pd, self._sin_Pd = rotation_table(spec.rope, spec.head_dim, positions, device)

    def attention_input(self, x_TD: Tensor, layer: LayerTensors) -> Tensor:
        return rms_norm(x_TD, layer.norms["attn_norm"], self.spec.rms_eps)

    def attention_inner(self, x_TD: Tensor, layer: LayerTensors, context: PackedSequences) -> Tensor:
        spec = self.spec
        h_TD = self.attention_input(x_TD, layer)
        sizes = (spec.q_size, spec.kv_size, spec.kv_size)
        heads = [part.unflatten(1, (-1, spec.head_dim)) for part in linear(h_TD, layer, "qkv").split(sizes, dim=1)]
        q_THd, k_TKd, v_TKd = heads
        if layer.head_norms:
            q_THd = rms_norm(q_THd, layer.head_norms["q_norm"], spec.rms_eps)
            k_TKd = rms_norm(k_TKd, layer.head_norms["k_norm"], spec.rms_eps)
        rotation = (
            self._cos_Pd.index_select(0, context.positions_T).unsqueeze(1),
            self._sin_Pd.index_select(0, context.positions_T).unsqueeze(1),
        )
        o_THd = context.attend_heads(rotate(q_THd, rotation), rotate(k_TKd, rotation), v_TKd)
        return o_THd.flatten(1)

    def after_attention(self, x_TD: Tensor, layer: LayerTensors, context: PackedSequences) -> Tensor:
        return x_TD + linear(self.attention_inner(x_TD, layer, context), layer, "o")

    def mlp_input(self, x_TD: Tensor, layer: LayerTensors) -> Tensor:
        return rms_norm(x_TD, layer.norms["mlp_norm"], self.spec.rms_eps)

    def mlp_inner(self, x_TD: Tensor, layer: LayerTensors) -> Tensor:
        gate_TF, up_TF = linear(self.mlp_input(x_TD, layer), layer, "gate_up").chunk(2, dim=1)
        return F.silu(gate_TF) * up_TF

    def after_mlp(self, x_TD: Tensor, layer: LayerTensors) -> Tensor:
        return x_TD + linear(self.mlp_inner(x_TD, layer), layer, "down")

    def whole(self, x_TD: Tensor, layer: LayerTensors, context: PackedSequences) -> Tensor:
        """What the layer gives to the next."""
        return self.after_mlp(self.after_attention(x_TD, layer, context), layer)


def linear(x_TI: Tensor, layer: LayerTensors, group: str) -> Tensor:
    """x W^T + bias of one group, [T, O]."""
    return F.linear(x_TI, layer.weights[group], layer.biases.get(group))
