"""Models with the shapes of Qwen2.5 and random weights, built on the device: speed does not depend on the values."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from qerl.config.schema import PROJECTIONS
from qerl.formats import PackedWeight, get_format
from qerl.kernels import philox
from qerl.model.decoder import Decoder, DecoderLayer
from qerl.model.linear import GroupedLinear, with_copy
from qerl.model.lora import LoraGroup
from qerl.model.spec import GroupShape, ModelSpec

EOS_ID = 151645

SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_layers": 24, "heads": (14, 2), "tied": True},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_layers": 28, "heads": (12, 2), "tied": True},
    "3B": {"hidden_size": 2048, "intermediate_size": 11008, "num_layers": 36, "heads": (16, 2), "tied": True},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_layers": 28, "heads": (28, 4), "tied": False},
    "14B": {"hidden_size": 5120, "intermediate_size": 13824, "num_layers": 48, "heads": (40, 8), "tied": False},
    "32B": {"hidden_size": 5120, "intermediate_size": 27648, "num_layers": 64, "heads": (40, 8), "tied": False},
}


def normal(*shape: int, scale: float, device: torch.device) -> Tensor:
    """bfloat16 normal numbers."""
    return torch.randn(*shape, device=device).mul_(scale).bfloat16()


def model_spec(size: str, *, layers: int | None = None) -> ModelSpec:
    """Spec of Qwen2.5 of a size in ``SHAPES``; ``layers`` makes it shallower."""
    shape = SHAPES[size]
    heads, kv_heads = shape["heads"]
    return ModelSpec.from_config(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": 151936 if size in ("0.5B", "1.5B", "3B") else 152064,
            "hidden_size": shape["hidden_size"],
            "intermediate_size": shape["intermediate_size"],
            "num_hidden_layers": layers or shape["num_layers"],
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 32768,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": shape["tied"],
            "eos_token_id": EOS_ID,
        },
        source=f"Qwen2.5-{size}",
    )


def random_model(
    spec: ModelSpec,
    *,
    format: str = "nvfp4",
    rank: int = 32,
    dense_cache: bool = False,
    head: str = "bf16",
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    full: bool = False,
) -> Decoder:
    """A decoder with random weights, packed as ``format``, with a head in format ``head``, and adapters (B not zero) on all seven projections.

    ``full``: without adapters, and every weight learns; both formats are bf16. The weights of one layer are drawn and packed; the others are copies with memory of their own.
    """
    assert not full or format == head == "bf16"
    device, rank = torch.device(device), 0 if full else rank
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, std: float = 0.02) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device).mul_(std)

    fmt = get_format(format)
    first = {
        shape.attribute: fmt.for_device(
            fmt.quantize(normal(shape.out_features, shape.in_features), segments=shape.sizes)
        )
        for shape in spec.groups()
    }

    def group(index: int, shape: GroupShape) -> GroupedLinear:
        own = _copy(first[shape.attribute])
        weight, dense_OI = with_copy(own, dtype, keep_dense=dense_cache, kernel_reads_plain=not full)
        return GroupedLinear(
            shape.group_name(index),
            shape.parts,
            shape.sizes,
            weight,
            bias_O=normal(shape.out_features) if shape.bias else None,
            lora=_adapters(index, shape, rank, device) if rank else None,
            dense_OI=dense_OI,
            trained=full,
        )

    def norm(width: int) -> Tensor:
        return torch.ones(width, device=device)

    layers = []
    for index in range(spec.num_layers):
        parts: dict[str, Any] = {shape.attribute: group(index, shape) for shape in spec.groups()}
        layers.append(
            DecoderLayer(
                index,
                spec,
                dtype=dtype,
                stream_dtype=dtype,
                attention_dtype=dtype,
                attn_norm=norm(spec.hidden_size),
                mlp_norm=norm(spec.hidden_size),
                **parts,
                train_norms=True,
                train_head_norms=full,
            )
        )
    embed_tokens = normal(spec.vocab_size, spec.hidden_size)
    lm_head: Tensor | PackedWeight | None = None
    if not spec.tie_embeddings or head != "bf16":
        lm_head = embed_tokens if spec.tie_embeddings else normal(spec.vocab_size, spec.hidden_size)
    if head != "bf16" and lm_head is not None:
        lm_head = get_format(head).for_device(get_format(head).quantize(lm_head))
    final_norm = norm(spec.hidden_size)
    return Decoder(spec, embed_tokens=embed_tokens, layers=layers, final_norm=final_norm, lm_head=lm_head, full=full)


def _copy(weight: PackedWeight) -> PackedWeight:
    return dataclasses.replace(weight, tensors={name: tensor.clone() for name, tensor in weight.tensors.items()})


def _adapters(index: int, shape: GroupShape, rank: int, device: torch.device) -> LoraGroup:
    assert set(shape.parts) <= set(PROJECTIONS)
    stops = [sum(shape.sizes[: i + 1]) for i in range(len(shape.sizes))]
    rows = [(stop - size, stop) for stop, size in zip(stops, shape.sizes, strict=True)]
    lora = LoraGroup(
        shape.part_names(index), rows, shape.in_features, rank=rank, alpha=float(rank), seed=0, device=device
    )
    for place, parameter in enumerate(lora.lora_b):
        values = philox.normal(0, f"benchmark/{index}/{shape.attribute}/{place}", parameter.numel(), device=device)
        parameter.data.copy_(values.view_as(parameter).mul_(0.01))
    return lora


def set_rank(model: Decoder, rank: int) -> None:
    """New adapters of another rank, where the model has others."""
    for index, layer in enumerate(model.layers):
        for shape in model.spec.groups():
            linear = getattr(layer, shape.attribute)
            if linear.lora is None or linear.lora.rank != rank:
                linear.lora = _adapters(index, shape, rank, model.device)


class StubTokenizer:
    """Stands in for a tokenizer where prompts are made of random token ids.

    Args:
        eos_ids: tokens that end an answer; one outside the vocabulary disables the stop.
    """

    def __init__(self, eos_ids: tuple[int, ...]):
        self.eos_ids = eos_ids

    def decode(self, ids: Any) -> str:
        """No text."""
        return ""
