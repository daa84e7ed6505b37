"""What is compiled before the first step of a run, so that no step waits for a compiler."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch

from qerl.config.schema import Config
from qerl.kernels.fp4_linear import Layer, compile_ahead, served
from qerl.model.decoder import Decoder
from qerl.model.linear import GroupedLinear
from qerl.train.noise.ahead import meet_noise


def compile_kernels(config: Config, model: Decoder) -> str | None:
    """Have the kernels that products with the model's packed weights may ask for: a training pass, like a prefill, has any number of tokens up to
    the budget; and those of the noise that a run begins without. Nothing where the CUDA kernels do not multiply.

    Returns:
        Why they could not be made ahead, for a warning; a product that needs one has it made then, or says what is missing. None where all is well.
    """
    if not served(model.device, model.dtype):
        return None
    try:
        layers = list(different_layers(model, reference=config.objective.kl_coef > 0.0))
        if layers:
            compile_ahead(layers, config.pass_tokens)
        meet_noise(config, model)
    except Exception as error:  # noqa: BLE001 (a run does not depend on it)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return f"kernels were not compiled before the first step, which makes them as they are met: {reason}"
    return None


@torch.no_grad()
def different_layers(model: Decoder, *, reference: bool) -> Iterator[Layer]:
    """Linear layers with packed weights, one of each kind: with their adapters, and for the ``reference`` without too."""
    seen: set[Hashable] = set()
    for linear, dtype in model.products():
        ways = (True, False) if reference and linear.lora is not None else (True,)
        for adapters in ways if linear.trained_OI is None else ():
            found = _layer(linear, dtype, adapters)
            if (key := _key(found)) not in seen:
                seen.add(key)
                yield found


def _layer(linear: GroupedLinear, dtype: torch.dtype, adapters: bool) -> Layer:
    parts = linear.lora.adapter_parts(torch.bfloat16) if adapters and linear.lora is not None else ()
    return Layer(weight=linear.weight, bias_O=linear.added_O, adapters=parts, dense_OI=linear.dense_OI, dtype=dtype)


def _key(layer: Layer) -> Hashable:
    """What the choice of a kernel may depend on."""
    weight = layer.weight
    parts = tuple((part.start, part.stop, part.rank_start, *part.b_OR.shape) for part in layer.adapters)
    copies = weight.kept_OI is not None, layer.dense_OI is not None, layer.bias_O is not None
    return weight.format, weight.order, weight.shape, weight.segments, *copies, layer.dtype, parts
