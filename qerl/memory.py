"""The memory ledger: bytes by owner, predicted from shapes and the configuration, then measured.

Prediction needs no weights and no device. Owners are disjoint. 1 GB = 1e9 bytes.

========================  =====================================================================================
base_weights              decoder linears as stored (packed codes, scales, biases)
dense_cache               dequantized copies beside them (``quant.dense_cache``)
embeddings                embedding matrix, and the LM head when it is not tied, or packed
norms                     float32 RMSNorm scales, and the reference copy when a KL term needs one
adapters                  float32 LoRA masters
masters                   full mode: float32 copies of weights that are narrower
gradients                 float32, one per trained parameter
optimizer                 AdamW moments, two a trained parameter: float32, or 8 bits with a float32 scale a block of 256
kv_cache                  keys and values of all slots at full length; exists during a rollout only
noise                     draws of the running answers (``aqn.scope`` group or response); exists during a rollout only
activations               saved for backward by one micro-batch of ``train.token_budget`` tokens; training only
========================  =====================================================================================
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from qerl.config.schema import Config
from qerl.formats import get_format
from qerl.model.aqn import places
from qerl.model.decoder import Decoder, DecoderLayer
from qerl.model.spec import ModelSpec
from qerl.model.storage import group_formats

StoredGroup: TypeAlias = tuple[str, tuple[int, int], tuple[int, ...]]
"""Format, shape and rows of each part of one packed weight."""
ITEMSIZE = {"float32": 4, "bfloat16": 2}
BITSANDBYTES_SMALLEST, BITSANDBYTES_BLOCK = 4096, 256
"""Tensors with fewer elements keep float32 moments in bitsandbytes' 8-bit AdamW; others have a float32 scale a block."""
PHASE_OWNERS = {"rollout": ("kv_cache", "noise"), "training": ("gradients", "activations")}
"""Owners that exist in one phase only; all others are resident throughout."""


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


def policy_bytes(spec: ModelSpec, config: Config) -> int:
    """Bytes of one saved adapter, or in full mode of one saved model."""
    sizes = {owner: sum(part) for owner, part in trained_tensors(spec, config).items()}
    return 4 * (sizes.get("adapters", 0) + sizes["norms"]) + ITEMSIZE[config.model.dtype] * sizes.get("weights", 0)


def moment_bytes(elements: int, name: str) -> int:
    """Bytes of the two moments of one trained tensor under ``optim.name``."""
    if name == "adamw" or elements < BITSANDBYTES_SMALLEST:
        return 8 * elements
    return 2 * (elements + 4 * -(-elements // BITSANDBYTES_BLOCK))


def predict(config: Config, spec: ModelSpec, *, device_type: str, max_num_seqs: int) -> dict[str, int]:
    """Bytes by owner.

    Args:
        config: the run's configuration. A folder that is quantized already is taken to hold every projection packed.
        spec: the model's shapes.
        device_type: ``cpu`` or ``cuda``; decides ``dense_cache: auto``.
        max_num_seqs: KV slots.

    Raises:
        ConfigError: ``aqn.sites`` names a norm that the model does not have.
    """
    itemsize = ITEMSIZE[config.model.dtype]
    groups = spec.groups()
    biases = spec.num_layers * sum(group.out_features for group in groups if group.bias)
    stored = _stored_groups(config, spec)
    tensors = trained_tensors(spec, config)
    sizes = [size for part in tensors.values() for size in part]
    norm_copies = 2 if config.objective.kl_coef > 0 else 1
    vocabulary = (spec.vocab_size, spec.hidden_size)
    noise_width = _noise_width(config, spec)
    length = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    return {
        "base_weights": sum(get_format(name).nbytes(shape, rows, itemsize) for name, shape, rows in stored)
        + biases * itemsize,
        "dense_cache": _dense_cache(config, spec, stored, device_type) * itemsize,
        "embeddings": vocabulary[0] * vocabulary[1] * itemsize + _stored_head(config, spec, itemsize),
        "norms": 4 * norm_copies * _norm_parameters(spec),
        "adapters": 4 * sum(tensors.get("adapters", ())),
        "masters": 4 * sum(tensors.get("weights", ())) if itemsize < 4 else 0,
        "gradients": 4 * sum(sizes),
        "optimizer": sum(moment_bytes(size, config.optim.name) for size in sizes),
        "kv_cache": 2 * spec.num_layers * max_num_seqs * length * spec.kv_size * itemsize,
        "noise": 4 * max_num_seqs * noise_width if config.aqn.scope in ("group", "response") else 0,
        "activations": _activations(config, spec, itemsize, noise_width),
    }


def uses_dense_cache(config: Config, device_type: str) -> bool:
    """Whether dequantized copies of what is packed are kept: by default on the CPU only."""
    if config.quant.dense_cache == "off":
        return False
    return config.quant.dense_cache == "on" or device_type == "cpu"


def _stored_groups(config: Config, spec: ModelSpec) -> list[StoredGroup]:
    """Every group of linear layers."""
    layers = range(spec.num_layers)
    names = frozenset(name for layer in layers for group in spec.groups() for name in group.part_names(layer))
    formats = group_formats(spec, config.quant, names)
    return [
        (formats[group.group_name(layer)], (group.out_features, group.in_features), group.sizes)
        for layer in layers
        for group in spec.groups()
    ]


def _dense_cache(
    config: Config,
    spec: ModelSpec,
    stored: Iterable[StoredGroup],
    device_type: str,
) -> int:
    """Weights of which a dequantized copy is kept."""
    if not uses_dense_cache(config, device_type):
        return 0
    linears = sum(rows * columns for name, (rows, columns), _ in stored if name != "bf16")
    head = 0 if config.quant.lm_head == "bf16" else spec.vocab_size * spec.hidden_size
    return linears + head


def _stored_head(config: Config, spec: ModelSpec, itemsize: int) -> int:
    """Bytes of the LM head beside the embedding."""
    if config.quant.lm_head == "bf16" and spec.tie_embeddings:
        return 0
    return get_format(config.quant.lm_head).nbytes((spec.vocab_size, spec.hidden_size), itemsize=itemsize)


def _norm_parameters(spec: ModelSpec) -> int:
    per_layer = 2 * spec.hidden_size + (2 * spec.head_dim if spec.qk_norm else 0)
    return spec.num_layers * per_layer + spec.hidden_size


def _activations(config: Config, spec: ModelSpec, itemsize: int, noise_width: int) -> int:
    """Values kept for backward per token and layer, by counting the tensors autograd saves in ``model/decoder.py``.

    Residual and normed inputs (4 hidden), q and attention output (2 q), k and v (2 kv), gate, up and their product
    (3 inner), and the LoRA shrink outputs (rank each). Noise that differs between tokens is kept in float32, and independent
    draws need a normed input a projection (5 instead of 2). With checkpointing: one hidden vector a layer, and one layer whole.
    """
    tokens, aqn = config.train.token_budget, config.aqn
    wide = 4 * spec.hidden_size + 2 * spec.q_size + 2 * spec.kv_size + 3 * spec.intermediate_size
    per_layer = wide + (config.lora.rank * len(config.lora.targets) if config.train.mode == "lora" else 0)
    if aqn.enabled and aqn.sharing == "independent":
        per_layer += 3 * spec.hidden_size
    size = per_layer * itemsize
    if aqn.scope != "rollout" or aqn.prompt == "clean":
        size += 4 * noise_width // spec.num_layers
    if config.train.checkpointing:
        return tokens * (spec.num_layers * spec.hidden_size * itemsize + size)
    return tokens * spec.num_layers * size


def _noise_width(config: Config, spec: ModelSpec) -> int:
    """Channels of all noisy places together; 0 when noise is off."""
    if not config.aqn.enabled:
        return 0
    names = [name for _, name in places(config.aqn.sites, config.aqn.sharing, spec)]
    return sum(spec.head_dim if name in ("q_norm", "k_norm") else spec.hidden_size for name in names)


def phase_peaks(owners: dict[str, int]) -> dict[str, int]:
    """Predicted bytes of each phase: what is resident plus what the phase brings."""
    transient = {name for names in PHASE_OWNERS.values() for name in names}
    resident = sum(size for name, size in owners.items() if name not in transient)
    return {phase: resident + sum(owners[name] for name in names) for phase, names in PHASE_OWNERS.items()}


def measure_resident(
    model: Decoder, *, masters: Iterable[Tensor] = (), moments: Iterable[Tensor] = ()
) -> dict[str, int]:
    """Bytes of the tensors that exist, under the owners that outlive a phase. A tensor is counted once.

    Args:
        model: the shared decoder.
        masters: float32 copies that the optimizer keeps of narrower weights.
        moments: the optimizer's state; without it the owner is left out.
    """
    linears = list(model.grouped_linears())
    adapters = [p for linear in linears if linear.lora is not None for p in linear.lora.parameters()]
    head = [model.lm_head] if model.packed_head is None else list(model.packed_head.tensors.values())
    norms = [p for name, p in model.named_parameters() if name.endswith("norm")]
    layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    references = [norm for layer in layers for norm in layer.reference_norms.values()]
    owners = {
        "base_weights": sum(linear.weight.nbytes() for linear in linears) + _bytes(linear.bias_O for linear in linears),
        "dense_cache": _bytes([model.dense_head, *(x.dense_OI for x in linears if x.weight.format != "bf16")]),
        "embeddings": _bytes([model.embed_tokens, *head]),
        "norms": _bytes([*norms, *references]),
        "adapters": _bytes(adapters),
        "masters": _bytes(masters),
    }
    held = _bytes(moments)
    return owners | {"optimizer": held} if held else owners


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    distinct = {id(tensor): tensor for tensor in tensors if tensor is not None}
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())


def process_bytes() -> dict[str, int]:
    """Current and peak resident set of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    statm = Path("/proc/self/statm")
    current = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak
    return {"rss": current, "rss_peak": peak}


def device_bytes(device: torch.device) -> dict[str, int]:
    """Allocator figures of a CUDA device in bytes; empty for the CPU."""
    if device.type != "cuda":
        return {}
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "allocated_peak": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "reserved_peak": torch.cuda.max_memory_reserved(device),
    }
