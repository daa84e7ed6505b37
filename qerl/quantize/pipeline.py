"""A checkpoint's layers, read, quantized and run one after the other.

In memory at once: one layer, the second moments of its inputs, and the hidden states of the streams; never the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from qerl.errors import ConfigError
from qerl.formats import WeightFormat, get_format
from qerl.kernels.rms_norm import rms_norm
from qerl.quantize.comparison import Head, make_head
from qerl.quantize.layer import LayerQuantizer, QuantizedLayer
from qerl.quantize.layer_tensors import LayerForward, LayerTensors, read_layer
from qerl.quantize.recipes import get_recipe
from qerl.quantize.source import CheckpointSource
from qerl.quantize.streams import Stream
from qerl.quantize.texts import TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to make of a checkpoint, and how to compute it."""

    format: str
    method: str
    rounding: str = "ct"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    """Compute type of the layers that run."""


class Pipeline:
    """Quantizes the layers of one checkpoint.

    Args:
        source: the checkpoint.
        request: what to make of it.
        longest: tokens of the longest sequence that will run.
        on_group: called with the name of every group of projections that is done.

    Raises:
        ConfigError: method and format do not go together, or sequences are longer than the model's positions.
    """

    def __init__(
        self,
        source: CheckpointSource,
        request: Request,
        *,
        longest: int = 1,
        on_group: Callable[[str], None] | None = None,
    ):
        self.source = source
        self.request = request
        self.recipe = get_recipe(request.method, request.format)
        self.format: WeightFormat = get_format(request.format)
        spec = source.spec
        if longest > spec.max_positions:
            raise ConfigError(
                "a text is longer than the model's positions",
                got=f"{longest} tokens",
                expected=f"at most {spec.max_positions}",
                remedy="Use a smaller --calibration-length or --report-length.",
            )
        self.forward = LayerForward(spec, longest, request.device)
        self.quantizer = LayerQuantizer(
            spec, self.format, request.rounding, self.recipe, self.forward, request.dtype, on_group
        )

    def stream(self, sequences: Sequence[TokenSequence], keep: str | Path = "device") -> Stream:
        """Hidden states of `sequences` before the first layer."""
        embed_VD = self.source.read("model.embed_tokens.weight")
        ids = [sequence.ids for sequence in sequences]
        return Stream(ids, embed_VD, dtype=self.request.dtype, device=self.request.device, keep=keep)

    @torch.no_grad()
    def layers(
        self,
        calibration: Stream | None,
        *,
        quantized: Sequence[Stream] = (),
        plain: Sequence[Stream] = (),
        first: int = 0,
    ) -> Iterator[QuantizedLayer]:
        """Quantize the layers from `first` on.

        Args:
            calibration: what the quantizer looks at; passes through the quantized layers. Needed by a calibrated recipe, and
                by no other.
            quantized: other streams to pass through the quantized layers.
            plain: streams to pass through the layers as they were.
            first: all streams have passed the layers before it (see `replay`).
        """
        assert (calibration is not None) == self.recipe.calibrated
        for index in range(first, self.source.spec.num_layers):
            layer = read_layer(self.source.spec, self.source, index, self.request.device)
            self._pass_plain(plain, layer)
            result = self.quantizer.quantize(layer, calibration, runs=bool(quantized))
            del layer
            if result.compute is not None:
                self._pass(quantized, result.compute)
            yield result
            # Not kept while the next layer is made.
            del result

    @torch.no_grad()
    def replay(self, index: int, done: LayerTensors, quantized: Sequence[Stream], plain: Sequence[Stream]) -> None:
        """Pass streams through a layer that was quantized before: `done`, in compute type."""
        if plain:
            self._pass_plain(plain, read_layer(self.source.spec, self.source, index, self.request.device))
        self._pass(quantized, done)

    @torch.no_grad()
    def plain_layers(self, streams: Sequence[Stream]) -> None:
        """Pass streams through all layers as they are."""
        for index in range(self.source.spec.num_layers):
            self._pass_plain(streams, read_layer(self.source.spec, self.source, index, self.request.device))

    def _pass_plain(self, streams: Sequence[Stream], layer: LayerTensors) -> None:
        if streams:
            self._pass(streams, layer.cast(self.request.dtype))

    def _pass(self, streams: Sequence[Stream], layer: LayerTensors) -> None:
        for stream in streams:
            stream.replace(lambda x_TD, context: self.forward.whole(x_TD, layer, context))

    def head(self) -> Head:
        """The last norm and the LM head."""
        spec, device = self.source.spec, self.request.device
        norm_D = self.source.read("model.norm.weight", device).float()
        name = "model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"
        head_VD = self.source.read(name, device).to(self.request.dtype)

        def final_norm(x_ND: Tensor) -> Tensor:
            return rms_norm(x_ND, norm_D, spec.rms_eps)

        return make_head(final_norm, head_VD)
