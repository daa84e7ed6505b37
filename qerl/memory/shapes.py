"""Sizes that follow from the model's shapes and the configuration alone.

Legend: D hidden size, F inner width of the MLP, V vocabulary, q and kv rows of the query and of the key projection.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from qerl.config.schema import Config
from qerl.formats import get_format
from qerl.kernels.fp4_linear.regimes import SMALL_WEIGHT
from qerl.model.aqn import places
from qerl.model.spec import ModelSpec
from qerl.model.storage import group_formats

StoredGroup: TypeAlias = tuple[str, tuple[int, int], tuple[int, ...]]
"""Format, shape and rows of each part of one packed weight."""
ITEMSIZE = {"float32": 4, "bfloat16": 2}
BITSANDBYTES_SMALLEST, BITSANDBYTES_BLOCK = 4096, 256
"""Tensors with fewer elements keep float32 moments in bitsandbytes' 8-bit AdamW; others have a float32 scale a block."""


def trained_tensors(spec: ModelSpec, config: Config) -> dict[str, list[int]]:
    """Elements of every trained tensor, by owner: ``adapters``, or in full mode ``weights``, and ``norms``."""
    layers = range(spec.num_layers)
    norms = [spec.hidden_size] * 2
    if config.train.mode == "lora":
        rank, chosen = config.lora.rank, config.lora.targets
        adapters: list[int] = []
        for group in spec.groups():
            rows = [size for name, size in zip(group.parts, group.sizes, strict=True) if name in chosen]
            # The A of a group are one stacked tensor.
            adapters += [rank * group.in_features * len(rows), *(rank * size for size in rows)] if rows else []
        return {
            "adapters": [size for _ in layers for size in adapters],
            "norms": [size for _ in layers for size in norms] if config.lora.train_norms else [],
        }
    heads = [spec.head_dim] * 2 if spec.qk_norm else []
    weights = [group.out_features * group.in_features for group in spec.groups()]
    biases = [group.out_features for group in spec.groups() if group.bias]
    vocabulary = [spec.vocab_size * spec.hidden_size] * (1 if spec.tie_embeddings else 2)
    return {
        "weights": [*(size for _ in layers for size in (*weights, *biases)), *vocabulary],
        "norms": [*(size for _ in layers for size in (*norms, *heads)), spec.hidden_size],
    }


def moment_bytes(elements: int, name: str) -> int:
    """Bytes of the two moments of one trained tensor under ``optim.name``."""
    if name == "adamw" or elements < BITSANDBYTES_SMALLEST:
        return 8 * elements
    return 2 * (elements + 4 * -(-elements // BITSANDBYTES_BLOCK))


def policy_bytes(spec: ModelSpec, config: Config) -> int:
    """Bytes of one saved adapter, or in full mode of one saved model."""
    sizes = {owner: sum(part) for owner, part in trained_tensors(spec, config).items()}
    return 4 * (sizes.get("adapters", 0) + sizes["norms"]) + ITEMSIZE[config.model.dtype] * sizes.get("weights", 0)


def uses_dense_cache(config: Config, device_type: str) -> bool:
    """Whether dequantized copies of what is packed are kept. What ``auto`` leaves to the plan on a GPU (``memory.resolve``) counts as off."""
    if config.quant.dense_cache == "off":
        return False
    return config.quant.dense_cache == "on" or device_type == "cpu"


def stored_groups(config: Config, spec: ModelSpec) -> list[StoredGroup]:
    """Every group of linear layers. A folder that is quantized already is taken to hold every projection packed."""
    layers = range(spec.num_layers)
    names = frozenset(name for layer in layers for group in spec.groups() for name in group.part_names(layer))
    formats = group_formats(spec, config.quant, names)
    return [
        (formats[group.group_name(layer)], (group.out_features, group.in_features), group.sizes)
        for layer in layers
        for group in spec.groups()
    ]


def weight_bytes(stored: Iterable[StoredGroup], itemsize: int) -> int:
    """Bytes of the linear layers as stored."""
    return sum(get_format(name).nbytes(shape, rows, itemsize) for name, shape, rows in stored)


def scratch_elements(stored: Iterable[StoredGroup], rank: int) -> list[int]:
    """Numbers that each weight takes in the scratch of products of many tokens, its adapters of this rank beside it (``kernels.fp4_linear.dense``):
    packed ones, and small unquantized ones that have adapters."""
    return [
        rows * (columns + rank * len(parts))
        for name, (rows, columns), parts in stored
        if name != "bf16" or (rank and rows * columns < SMALL_WEIGHT)
    ]


def dense_cache_elements(config: Config, spec: ModelSpec, stored: Iterable[StoredGroup], device_type: str) -> int:
    """Weights of which a dequantized copy is kept: on a GPU in bfloat16 small ones, of which the kernels make use."""
    if not uses_dense_cache(config, device_type):
        return 0
    packed = [rows * columns for name, (rows, columns), _ in stored if name != "bf16"]
    if device_type == "cuda" and config.model.dtype == "bfloat16":
        if config.quant.lm_head == "nvfp4":
            packed.append(spec.vocab_size * spec.hidden_size)
        return sum(numbers for numbers in packed if numbers < SMALL_WEIGHT)
    linears = sum(packed)
    head = 0 if config.quant.lm_head == "bf16" else spec.vocab_size * spec.hidden_size
    return linears + head


def head_bytes(config: Config, spec: ModelSpec, itemsize: int) -> int:
    """Bytes of the LM head beside the embedding."""
    if config.quant.lm_head == "bf16" and spec.tie_embeddings:
        return 0
    return get_format(config.quant.lm_head).nbytes((spec.vocab_size, spec.hidden_size), itemsize=itemsize)


def norm_parameters(spec: ModelSpec) -> int:
    """Norm scales of the whole model."""
    per_layer = 2 * spec.hidden_size + (2 * spec.head_dim if spec.qk_norm else 0)
    return spec.num_layers * per_layer + spec.hidden_size


def noise_width(config: Config, spec: ModelSpec) -> int:
    """Channels of all noisy places together; 0 when noise is off.

    Raises:
        ConfigError: ``aqn.sites`` names a norm that the model does not have.
    """
    if not config.aqn.enabled:
        return 0
    names = [name for _, name in places(config.aqn.sites, config.aqn.sharing, spec)]
    return sum(spec.head_dim if name in ("q_norm", "k_norm") else spec.hidden_size for name in names)


def largest_group(spec: ModelSpec) -> int:
    """Elements of the largest fused weight."""
    return max(group.out_features * group.in_features for group in spec.groups())


def float16_heads(config: Config, spec: ModelSpec) -> int:
    """Values of q, k and v of a token, if they are in float16 (``model.attention_dtype``) beside projections in float32; else 0."""
    return spec.q_size + 2 * spec.kv_size if config.model.attention_dtype == "float16" else 0
