"""Quantizing one decoder layer: the algorithm, in the order in which a token meets the weights.

With a calibrated recipe every group sees the inputs that the groups before it, quantized already, really give it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qerl.formats import PackedWeight, WeightFormat
from qerl.formats.awq import relative_output_error, search_channel_scales, search_clips, second_moments
from qerl.formats.gptq import compensate, feedback_factor
from qerl.model.attention import PackedSequences
from qerl.model.spec import GroupShape, ModelSpec
from qerl.quantize.folding import fold_name, fold_norm, fold_rows, spread_heads, tie_heads
from qerl.quantize.layer_tensors import LayerForward, LayerTensors, linear
from qerl.quantize.quality import TensorQuality, measure
from qerl.quantize.recipes import Recipe
from qerl.quantize.streams import Stream

Inputs = Callable[[Tensor, PackedSequences], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLayer:
    """One layer after quantization."""

    packed: dict[str, PackedWeight]
    """Group -> its stacked rows."""
    compute: LayerTensors | None
    """The same dequantized, in compute type, with norms and biases after folding: ready to run; None if nothing will run."""
    norms: dict[str, Tensor]
    """Norms that folding changed, in the checkpoint's type."""
    biases: dict[str, Tensor]
    """Biases that folding changed, likewise."""
    folds: dict[str, Tensor]
    """Channel scales by their names in `qerl_folds.st`."""
    quality: dict[str, TensorQuality]
    """Error of each projection, by the name of its weight in the checkpoint."""
    searches: dict[str, dict[str, Any]]
    """What was chosen for each group, for people: exponents, errors, clipping."""


@dataclass(slots=True)
class _Work:
    """A layer while it is quantized."""

    layer: LayerTensors
    """Weights to quantize: as stored, or folded in float32."""
    compute: LayerTensors | None
    """What runs: groups that are done are dequantized, the others as they will be quantized. None if nothing will run."""
    packed: dict[str, PackedWeight] = field(default_factory=dict)
    quality: dict[str, TensorQuality] = field(default_factory=dict)
    searches: dict[str, dict[str, Any]] = field(default_factory=dict)


class LayerQuantizer:
    """Quantizes layers of one model, one after the other.

    Args:
        spec: the model.
        fmt: format of all linear layers.
        rounding: its named rounding.
        recipe: what to do.
        forward: runs layers.
        dtype: compute type of the layers that run.
        on_group: called with the name of every group that is done.
    """

    def __init__(
        self,
        spec: ModelSpec,
        fmt: WeightFormat,
        rounding: str,
        recipe: Recipe,
        forward: LayerForward,
        dtype: torch.dtype,
        on_group: Callable[[str], None] | None = None,
    ):
        self.spec = spec
        self.fmt = fmt
        self.rounding = rounding
        self.recipe = recipe
        self.forward = forward
        self.dtype = dtype
        self.on_group = on_group
        self.shapes = {shape.attribute: shape for shape in spec.groups()}

    def quantize(self, plain: LayerTensors, stream: Stream | None, *, runs: bool = True) -> QuantizedLayer:
        """Quantize one layer.

        Args:
            plain: the layer as stored.
            stream: hidden states that enter it; they leave it as the quantized layer makes them. None for a recipe that needs none.
            runs: whether the quantized layer will be run.
        """
        self.stored_itemsize = plain.weights["qkv"].itemsize
        layer = plain
        folds: dict[str, Tensor] = {}
        exponents: dict[str, dict[str, Any]] = {}
        if self.recipe.fold:
            assert stream is not None
            layer, folds, exponents = self._fold(plain, stream)
        compute = layer.cast(self.dtype) if runs or stream is not None else None
        work = _Work(layer, compute, searches=exponents)
        if stream is None:
            assert not self.recipe.calibrated
            for group in self.shapes:
                self._group(work, group, None)
        else:
            self._in_order(work, stream)
        return QuantizedLayer(
            packed=work.packed,
            compute=work.compute,
            norms={key: value for key, value in layer.norms.items() if value is not plain.norms[key]},
            biases={key: value for key, value in layer.biases.items() if value is not plain.biases[key]},
            folds={fold_name(plain.index, place): value for place, value in folds.items()},
            quality=work.quality,
            searches=work.searches,
        )

    def _in_order(self, work: _Work, stream: Stream) -> None:
        run, compute = self.forward, work.compute
        assert compute is not None
        self._group(work, "qkv", self._moments(stream, lambda x_TD, _: run.attention_input(x_TD, compute)))
        self._group(work, "o", self._moments(stream, lambda x_TD, c: run.attention_inner(x_TD, compute, c)))
        stream.replace(lambda x_TD, c: run.after_attention(x_TD, compute, c))
        self._group(work, "gate_up", self._moments(stream, lambda x_TD, _: run.mlp_input(x_TD, compute)))
        self._group(work, "down", self._moments(stream, lambda x_TD, _: run.mlp_inner(x_TD, compute)))
        stream.replace(lambda x_TD, _: run.after_mlp(x_TD, compute))

    def _moments(self, stream: Stream, inputs: Inputs) -> Tensor:
        """Mean of x^T x over all tokens, float32 [I, I]."""
        total: Tensor | None = None
        for x_TD, context in stream:
            x_TI = inputs(x_TD, context)
            if total is None:
                total = torch.zeros(x_TI.shape[1], x_TI.shape[1], device=x_TI.device)
            second_moments(x_TI, total)
        assert total is not None
        return total.div_(stream.tokens)

    def _group(self, work: _Work, group: str, moments_II: Tensor | None) -> None:
        """Quantize one group of projections and let `work` run with the result."""
        shape = self.shapes[group]
        names = [f"model.{name}" for name in shape.part_names(work.layer.index)]
        weight_OI = work.layer.weights[group]
        scales = self.fmt.block_scales(
            weight_OI,
            method=self.recipe.scales,
            rounding=self.rounding,
            segments=shape.sizes,
            name=" + ".join(names),
        )
        chosen = work.searches.setdefault(group, {})
        source_OI = weight_OI
        if self.recipe.clip:
            assert moments_II is not None
            scales, ratios_OB = search_clips(weight_OI, moments_II, scales, self.fmt)
            chosen["clipped"] = _share(ratios_OB < 1)
            chosen["stretched"] = _share(ratios_OB > 1)
            chosen["mean_ratio"] = float(ratios_OB.mean())
        if self.recipe.feedback:
            assert moments_II is not None
            factor = feedback_factor(moments_II)
            chosen["damping"] = factor[2]
            source_OI = compensate(weight_OI, factor, scales, self.fmt)
        packed = self.fmt.quantize_with_scales(source_OI, scales)
        work.packed[group] = packed
        self._record(work, shape, names, packed, moments_II)

    def _record(
        self, work: _Work, shape: GroupShape, names: list[str], packed: PackedWeight, moments_II: Tensor | None
    ) -> None:
        group = shape.attribute
        weight_OI = work.layer.weights[group]
        dense_OI = self.fmt.dequantize(packed)
        if moments_II is not None:
            work.searches[group]["output_error"] = relative_output_error(weight_OI, dense_OI, moments_II)
        parts = zip(
            names, weight_OI.split(shape.sizes), dense_OI.split(shape.sizes), self.fmt.split(packed), strict=True
        )
        for name, weight, dense, part in parts:
            before = weight.numel() * self.stored_itemsize
            work.quality[f"{name}.weight"] = measure(weight, dense, nbytes=part.nbytes(), dense_nbytes=before)
        if work.compute is not None:
            work.compute.weights[group] = dense_OI.to(self.dtype)
        if self.on_group is not None:
            self.on_group(shape.group_name(work.layer.index))

    def _fold(
        self, plain: LayerTensors, stream: Stream
    ) -> tuple[LayerTensors, dict[str, Tensor], dict[str, dict[str, Any]]]:
        """(folded layer, exact scales by place, what was found by group)."""
        statistics = self._input_statistics(plain.cast(self.dtype), stream)
        layer, spec = plain.copy(), self.spec
        folds: dict[str, Tensor] = {}
        found: dict[str, dict[str, Any]] = {}
        scales: dict[str, Tensor] = {}
        for group in self.shapes:
            moments_II, magnitudes_I = statistics.pop(group)
            if group == "o":
                magnitudes_I = spread_heads(tie_heads(magnitudes_I, spec), spec)
            best = search_channel_scales(
                plain.weights[group], moments_II, magnitudes_I, self.fmt, rounding=self.rounding
            )
            scales[group] = best.scales_I
            found[group] = {
                "exponent": best.exponent,
                "scaled_output_error": best.error,
                "unscaled_output_error": best.plain_error,
            }
        folds["attn_norm"] = fold_norm(layer, "attn_norm", "qkv", scales["qkv"])
        v_rows = slice(spec.q_size + spec.kv_size, None)
        folds["v"] = fold_rows(layer, "qkv", v_rows, "o", tie_heads(scales["o"], spec), spec)
        folds["o"] = spread_heads(folds["v"], spec)
        folds["mlp_norm"] = fold_norm(layer, "mlp_norm", "gate_up", scales["gate_up"])
        up_rows = slice(spec.intermediate_size, None)
        folds["up"] = fold_rows(layer, "gate_up", up_rows, "down", scales["down"], spec)
        return layer, folds, found

    def _input_statistics(self, compute: LayerTensors, stream: Stream) -> dict[str, tuple[Tensor, Tensor]]:
        """Group -> (second moments [I, I], mean magnitudes [I]) of its inputs in the unquantized layer."""
        run, device = self.forward, stream.device
        sums = {
            group: (
                torch.zeros(shape.in_features, shape.in_features, device=device),
                torch.zeros(shape.in_features, device=device),
            )
            for group, shape in self.shapes.items()
        }
        for x_TD, context in stream:
            inner_TI = run.attention_inner(x_TD, compute, context)
            middle_TD = x_TD + linear(inner_TI, compute, "o")
            inputs = {
                "qkv": run.attention_input(x_TD, compute),
                "o": inner_TI,
                "gate_up": run.mlp_input(middle_TD, compute),
                "down": run.mlp_inner(middle_TD, compute),
            }
            for group, x_TI in inputs.items():
                second_moments(x_TI, sums[group][0])
                sums[group][1].add_(x_TI.float().abs_().sum(0))
        return {group: (a.div_(stream.tokens), b.div_(stream.tokens)) for group, (a, b) in sums.items()}


def _share(mask: Tensor) -> float:
    return float(mask.float().mean())
