"""From a Hugging Face folder to a decoder. With ``adapter_files`` and ``model_files``, the only code that knows foreign tensor
names.

Weights are read, stacked and quantized one group at a time, so a model that is to be held in 4 bits is never dense as a
whole. Every name and shape is compared with the headers before the first byte of data is read.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.config.schema import LoraConfig, QuantConfig
from qerl.errors import ConfigError
from qerl.formats import PackedWeight, WeightFormat, dequantize, get_format
from qerl.formats.e2m1_blocks import E2m1Format
from qerl.kernels.quantize import quantize
from qerl.model.adapter_files import adapter_lora_config, load_adapter, save_adapter
from qerl.model.decoder import Decoder, DecoderLayer
from qerl.model.hashes import adapter_hash, base_hash, norm_hash
from qerl.model.linear import GroupedLinear, with_copy
from qerl.model.locate import resolve_model_path
from qerl.model.lora import LoraGroup
from qerl.model.model_files import EMBEDDING, FINAL_NORM, HEAD, load_weights, save_model
from qerl.model.spec import GroupShape, ModelSpec
from qerl.model.storage import group_formats
from qerl.model.tensor_folder import TensorFolder

__all__ = [
    "adapter_hash",
    "adapter_lora_config",
    "base_hash",
    "held_tensors",
    "load_adapter",
    "load_model",
    "load_weights",
    "norm_hash",
    "resolve_model_path",
    "save_adapter",
    "save_model",
]

PACKED_SUFFIX = "weight_packed"
ACTIVATION_SCALE_SUFFIX = "input_global_scale"


def load_model(
    path: str | Path,
    *,
    quant: QuantConfig,
    lora: LoraConfig | None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    keep_reference_norms: bool = False,
    full: bool = False,
    float32_stream: bool = False,
    float16_attention: bool = False,
) -> Decoder:
    """Load a checkpoint folder as a decoder with a frozen base and fresh adapters, or one whose every weight learns.

    Args:
        path: a folder (see ``resolve_model_path`` for names).
        quant: formats of the linear layers and the head. A folder that is quantized already keeps its own, for what it
            holds packed.
        lora: adapters and whether the layer norms learn; None for neither.
        dtype: compute type (float32 or bfloat16). Norm scales and adapters are float32 in either case.
        device: where everything goes.
        seed: root of the adapter initialization.
        keep_reference_norms: keep a copy of the layer norms for the reference policy.
        full: every weight learns; needs unquantized weights and takes no adapters.
        float32_stream: the residual stream and what is added to it are not rounded to a narrower compute type, and biases of q, k
            and v are added in float32 too (but where they learn, or heads are normed).
        float16_attention: q, k and v, keys and values in a cache and what attention multiplies are in float16 instead of bfloat16, which must be the
            compute type; projections of q, k and v, and their biases as above, are not rounded before.

    Raises:
        CheckpointError: the folder cannot be read or its model is not supported.
        ConfigError: formats or targets that do not fit the model, or packed weights that are to learn.
        FormatError: a tensor holds NaN or infinity.
    """
    assert not (full and lora), "a model learns itself or through adapters"
    assert not float16_attention or dtype == torch.bfloat16, dtype
    folder, device = Path(path), torch.device(device)
    spec = ModelSpec.from_folder(folder)
    if lora is not None:
        check_targets(spec, lora)
    source = TensorFolder(folder)
    formats = group_formats(spec, quant, _packed_parts(source))
    packed = sorted({name for name in formats.values() if name != "bf16"})
    if full and packed:
        raise ConfigError(
            "packed weights cannot be trained",
            got=f"{folder} with {', '.join(packed)} weights, and train.mode=full",
            expected="a folder of plain weights with quant.format=bf16",
            remedy="Use train.mode=lora, which trains adapters on packed weights.",
        )
    source.check(_expected_tensors(spec, formats), _ignored_tensors(spec))
    for note in spec.notes:
        warnings.warn(f"{folder}: {note}", stacklevel=2)
    loader = _Loader(
        *(spec, source, quant, lora, formats),
        dtype=dtype,
        device=device,
        seed=seed,
        full=full,
        float32_stream=float32_stream,
        float16_attention=float16_attention,
    )
    head, dense_head = loader.head(), None
    if isinstance(head, PackedWeight):
        head, dense_head = loader.with_copy(head)
    return Decoder(
        spec,
        embed_tokens=loader.dense(EMBEDDING),
        layers=[loader.layer(index) for index in range(spec.num_layers)],
        final_norm=loader.norm(FINAL_NORM),
        lm_head=head,
        dense_head=dense_head,
        keep_reference_norms=keep_reference_norms,
        full=full,
    )


def held_tensors(
    path: str | Path, quant: QuantConfig, *, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Every weight of a folder as a model loaded under ``quant`` holds it, dequantized, under its checkpoint name.

    Matrices and biases come in float32, one group at a time, norm scales too: nothing is rounded, and what is in memory
    is one group. A tied head is left out.

    Raises:
        CheckpointError, ConfigError, FormatError: as ``load_model``.
    """
    folder, device = Path(path), torch.device(device)
    spec, source = ModelSpec.from_folder(folder), TensorFolder(folder)
    formats = group_formats(spec, quant, _packed_parts(source))
    source.check(_expected_tensors(spec, formats), _ignored_tensors(spec))
    loader = _Loader(spec, source, quant, None, formats, dtype=torch.float32, device=device, seed=0, full=False)
    yield EMBEDDING, loader.dense(EMBEDDING)
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}"
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["self_attn.q_norm", "self_attn.k_norm"] if spec.qk_norm else []
        for name in norms:
            yield f"{prefix}.{name}.weight", loader.norm(f"{prefix}.{name}.weight")
        for shape in spec.groups():
            names = shape.part_names(index)
            weight_OI = dequantize(loader.packed_weight(shape, names, formats[shape.group_name(index)]), torch.float32)
            for name, part_OI in zip(names, weight_OI.split(shape.sizes), strict=True):
                yield f"model.{name}.weight", part_OI
                if shape.bias:
                    yield f"model.{name}.bias", loader.dense(f"model.{name}.bias")
    yield FINAL_NORM, loader.norm(FINAL_NORM)
    head = loader.head()
    if head is not None and not (isinstance(head, PackedWeight) and spec.tie_embeddings):
        yield HEAD, dequantize(head, torch.float32) if isinstance(head, PackedWeight) else head


class _Loader:
    """Builds the modules of one model from its tensors."""

    def __init__(
        self,
        spec: ModelSpec,
        source: TensorFolder,
        quant: QuantConfig,
        lora: LoraConfig | None,
        formats: dict[str, str],
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        full: bool,
        float32_stream: bool = False,
        float16_attention: bool = False,
    ):
        self.spec = spec
        self.source = source
        self.quant = quant
        self.lora = lora
        self.formats = formats
        self.dtype = dtype
        self.device = device
        self.seed = seed
        self.full = full
        self.float32_stream = float32_stream
        self.float16_attention = float16_attention
        self.keep_dense = quant.dense_cache == "on" or (quant.dense_cache == "auto" and device.type == "cpu")

    def dense(self, name: str) -> Tensor:
        # What learns owns its memory: a tensor as read may be a view of the file.
        return self.source.read(name, self.device).to(self.dtype, copy=self.full)

    def head(self) -> Tensor | PackedWeight | None:
        """The LM head in the format of ``quant.lm_head``; None for an embedding that serves as it is."""
        tied, chosen = self.spec.tie_embeddings, self.quant.lm_head
        if chosen == "bf16":
            return None if tied else self.dense(HEAD)
        weight = self.source.read(EMBEDDING if tied else HEAD, self.device)
        fmt = get_format(chosen)
        method = self.quant.method if self.quant.method in fmt.methods else "rtn"
        packed = quantize(weight, chosen, method=method, rounding=self.quant.rounding, name="lm_head")
        return fmt.for_device(packed)

    def norm(self, name: str) -> Tensor:
        return self.source.read(name, self.device).to(torch.float32, copy=True)

    def layer(self, index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}"
        parts: dict[str, Any] = {shape.attribute: self.group(index, shape) for shape in self.spec.groups()}
        if self.spec.qk_norm:
            parts |= {key: self.norm(f"{prefix}.self_attn.{key}.weight") for key in ("q_norm", "k_norm")}
        return DecoderLayer(
            index,
            self.spec,
            dtype=self.dtype,
            stream_dtype=torch.promote_types(self.dtype, torch.float32) if self.float32_stream else self.dtype,
            attention_dtype=torch.float16 if self.float16_attention else self.dtype,
            attn_norm=self.norm(f"{prefix}.input_layernorm.weight"),
            mlp_norm=self.norm(f"{prefix}.post_attention_layernorm.weight"),
            train_norms=self.full or (self.lora is not None and self.lora.train_norms),
            train_head_norms=self.full,
            **parts,
        )

    def group(self, index: int, shape: GroupShape) -> GroupedLinear:
        names = shape.part_names(index)
        natural = self.packed_weight(shape, names, self.formats[shape.group_name(index)])
        weight, dense_OI = self.with_copy(get_format(natural.format).for_device(natural))
        bias_O = torch.cat([self.dense(f"model.{name}.bias") for name in names]) if shape.bias else None
        return GroupedLinear(
            shape.group_name(index),
            shape.parts,
            shape.sizes,
            weight,
            bias_O=bias_O,
            lora=self.adapters(shape, names),
            dense_OI=dense_OI,
            trained=self.full,
            bias_apart=shape.attribute == "qkv" and shape.bias and self.biases_apart,
        )

    @property
    def biases_apart(self) -> bool:
        """Whether biases of q, k and v are added where heads are made."""
        wide = self.float16_attention or (self.float32_stream and self.dtype == torch.bfloat16)
        return wide and not self.full and not self.spec.qk_norm

    def packed_weight(self, shape: GroupShape, names: tuple[str, ...], format_name: str) -> PackedWeight:
        """The stacked rows of a group: packed as the folder has them, or quantized here."""
        fmt = get_format(format_name)
        if format_name == self.spec.stored_format:
            assert isinstance(fmt, E2m1Format)
            return fmt.join([self.stored_weight(fmt, name, shape.in_features) for name in names])
        dense_OI = torch.cat([self.source.read(f"model.{name}.weight", self.device) for name in names])
        if format_name == "bf16":
            dense_OI = dense_OI.to(self.dtype)
        return quantize(
            dense_OI,
            format_name,
            method=self.quant.method,
            rounding=self.quant.rounding,
            segments=shape.sizes,
            name=" + ".join(names),
        )

    def stored_weight(self, fmt: E2m1Format, name: str, in_features: int) -> PackedWeight:
        parts = {
            key: self.source.read(f"model.{name}.{suffix}", self.device) for key, suffix in fmt.layout.suffixes.items()
        }
        return fmt.from_parts(parts, d_in=in_features, name=name)

    def with_copy(self, weight: PackedWeight) -> tuple[PackedWeight, Tensor | None]:
        """(the weight, its dequantized copy), as the settings have it."""
        read = not self.full and self.quant.dense_cache != "off"
        return with_copy(weight, self.dtype, keep_dense=self.keep_dense, kernel_reads_plain=read)

    def adapters(self, shape: GroupShape, names: tuple[str, ...]) -> LoraGroup | None:
        if self.lora is None:
            return None
        stops = [sum(shape.sizes[: i + 1]) for i in range(len(names))]
        chosen = [
            (name, (stop - size, stop))
            for name, part, size, stop in zip(names, shape.parts, shape.sizes, stops, strict=True)
            if part in self.lora.targets
        ]
        if not chosen:
            return None
        return LoraGroup(
            [name for name, _ in chosen],
            [rows for _, rows in chosen],
            shape.in_features,
            rank=self.lora.rank,
            alpha=self.lora.alpha,
            seed=self.seed,
            device=self.device,
        )


def check_targets(spec: ModelSpec, lora: LoraConfig) -> None:
    """Refuse adapters on projections that the model does not have.

    Raises:
        ConfigError: a target matches nothing, or there is none.
    """
    known = [part for shape in spec.groups() for part in shape.parts]
    unknown = [target for target in lora.targets if target not in known]
    if unknown or not lora.targets:
        raise ConfigError(
            "lora.targets matches nothing in the model",
            got=", ".join(unknown) or "an empty list",
            expected=f"names among {', '.join(known)}",
        )


def _packed_parts(source: TensorFolder) -> frozenset[str]:
    """Projections that the folder holds packed, by the names that users know."""
    ending = f".{PACKED_SUFFIX}"
    return frozenset(name.removeprefix("model.").removesuffix(ending) for name in source if name.endswith(ending))


def _expected_tensors(spec: ModelSpec, formats: dict[str, str]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the folder must hold."""
    hidden = spec.hidden_size
    expected: dict[str, tuple[int, ...]] = {
        EMBEDDING: (spec.vocab_size, hidden),
        FINAL_NORM: (hidden,),
    }
    if not spec.tie_embeddings:
        expected[HEAD] = (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        expected[f"{prefix}.input_layernorm.weight"] = (hidden,)
        expected[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if spec.qk_norm:
            expected[f"{prefix}.self_attn.q_norm.weight"] = (spec.head_dim,)
            expected[f"{prefix}.self_attn.k_norm.weight"] = (spec.head_dim,)
        for shape in spec.groups():
            packed = get_format(formats[shape.group_name(layer)])
            stored_packed = packed.name == spec.stored_format
            for name, rows in zip(shape.part_names(layer), shape.sizes, strict=True):
                expected |= _expected_linear(f"model.{name}", rows, shape, packed if stored_packed else None)
    return expected


def _expected_linear(
    name: str, rows: int, shape: GroupShape, packed: WeightFormat | None
) -> dict[str, tuple[int, ...]]:
    bias: dict[str, tuple[int, ...]] = {f"{name}.bias": (rows,)} if shape.bias else {}
    if packed is None:
        return {f"{name}.weight": (rows, shape.in_features), **bias}
    assert isinstance(packed, E2m1Format)
    shapes = packed.stored_shapes(rows, shape.in_features)
    return {**{f"{name}.{suffix}": shapes[key] for key, suffix in packed.layout.suffixes.items()}, **bias}


def _ignored_tensors(spec: ModelSpec) -> frozenset[str]:
    """Tensors that some writers add and this decoder does not need: rotation tables, the head of a tied model, and the
    scales of quantized activations (which ``ModelSpec.notes`` tells of)."""
    ignored = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(spec.num_layers)}
    if spec.tie_embeddings:
        ignored.add(HEAD)
    if spec.packed_layout is not None:
        parts = (
            name for layer in range(spec.num_layers) for group in spec.groups() for name in group.part_names(layer)
        )
        ignored |= {f"model.{name}.{ACTIVATION_SCALE_SUFFIX}" for name in parts}
    return frozenset(ignored)
