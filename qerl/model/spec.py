"""What a checkpoint's ``config.json`` says about the model, and whether this decoder can run it. Free of torch.

Everything unsupported is refused here, by name, before any weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.errors import CheckpointError, nearest
from qerl.model.rope import RopeSpec, positive_number, read_rope

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""``model_type`` -> the causal language model class that transformers names in ``architectures``."""

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")

PACKED_LAYOUTS = {"nvfp4-pack-quantized": ("nvfp4", 16), "mxfp4-pack-quantized": ("mxfp4", 32)}
"""Layouts of compressed-tensors that are read -> our name of the format, weights that share a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """One group of projections of a layer that read the same input and are held as one stacked weight."""

    attribute: str
    """Attribute of a decoder layer."""
    block: str
    """``self_attn`` or ``mlp``."""
    name: str
    """Name of the group in its block, e.g. ``qkv_proj``."""
    parts: tuple[str, ...]
    """Member projections in row order."""
    sizes: tuple[int, ...]
    """Output rows of each member."""
    in_features: int
    bias: bool

    @property
    def out_features(self) -> int:
        """Rows of the stacked weight."""
        return sum(self.sizes)

    def group_name(self, layer: int) -> str:
        """E.g. ``layers.0.self_attn.qkv_proj``."""
        return f"layers.{layer}.{self.block}.{self.name}"

    def part_names(self, layer: int) -> tuple[str, ...]:
        """E.g. ``layers.0.self_attn.q_proj`` and its fellows: the names that users and patterns know."""
        return tuple(f"layers.{layer}.{self.block}.{part}" for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shapes and switches of a decoder-only transformer (RMSNorm, rotary attention, gated SiLU MLP)."""

    architecture: str
    """``model_type`` of the checkpoint."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeSpec
    max_positions: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k before the rotation."""
    tie_embeddings: bool = False
    """The LM head is the embedding matrix."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    packed_layout: str | None = None
    """Layout of weights that the folder holds quantized already, one of ``PACKED_LAYOUTS``; None for plain weights."""
    notes: tuple[str, ...] = ()
    """What the folder describes and this decoder does not do, in words for the user."""

    @property
    def stored_format(self) -> str | None:
        """Format of the weights that the folder holds packed; None for plain weights."""
        return None if self.packed_layout is None else PACKED_LAYOUTS[self.packed_layout][0]

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    def groups(self) -> tuple[GroupShape, ...]:
        """The four groups of linear layers of every decoder layer, in the order in which they run."""
        q, kv, hidden, inner = self.q_size, self.kv_size, self.hidden_size, self.intermediate_size
        rows = (
            ("qkv", "self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj"), (q, kv, kv), hidden, self.qkv_bias),
            ("o", "self_attn", "o_proj", ("o_proj",), (hidden,), q, self.o_bias),
            ("gate_up", "mlp", "gate_up_proj", ("gate_proj", "up_proj"), (inner, inner), hidden, self.mlp_bias),
            ("down", "mlp", "down_proj", ("down_proj",), (hidden,), inner, self.mlp_bias),
        )
        return tuple(
            GroupShape(attribute=a, block=b, name=n, parts=p, sizes=s, in_features=i, bias=bias)
            for a, b, n, p, s, i, bias in rows
        )

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelSpec:
        """Read ``config.json`` of a checkpoint folder.

        Raises:
            CheckpointError: the folder or file is missing or unreadable, or the model is not supported.
        """
        return cls.from_config(read_json_object(Path(path), "config.json"), source=str(Path(path) / "config.json"))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, source: str = "config.json") -> ModelSpec:
        """Build a spec from the contents of a ``config.json``.

        Raises:
            CheckpointError: a key is missing or malformed, or the model is of a kind that is not supported.
        """
        architecture = _architecture(config, source)
        _refuse_variants(config, source)
        fields = _Fields(config, source)
        num_heads = fields.positive("num_attention_heads")
        hidden_size = fields.positive("hidden_size")
        num_layers = fields.positive("num_hidden_layers")
        max_positions = fields.positive("max_position_embeddings")
        num_kv_heads = fields.positive("num_key_value_heads", num_heads if architecture == "llama" else None)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"{source}: attention heads do not divide into key/value heads",
                got=f"num_attention_heads={num_heads}, num_key_value_heads={num_kv_heads}",
                expected="a multiple",
            )
        _refuse_sliding_window(config, architecture, num_layers, max_positions, source)
        packed_layout, notes = read_quantization(config.get("quantization_config"), source)
        attention_bias = architecture in ("llama", "qwen3") and bool(config.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=fields.positive("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.positive("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(fields, architecture, hidden_size, num_heads),
            rms_eps=fields.number("rms_norm_eps", 1e-6),
            rope=read_rope(config, max_positions, source),
            max_positions=max_positions,
            qkv_bias=architecture == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=architecture == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=architecture == "qwen3",
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            eos_token_ids=token_ids(config.get("eos_token_id"), source),
            bos_token_id=config.get("bos_token_id"),
            packed_layout=packed_layout,
            notes=notes,
        )


class _Fields:
    """Typed reading of config values with errors that name the file and the key."""

    def __init__(self, config: Mapping[str, Any], source: str):
        self._config = config
        self._source = source

    def positive(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self._source}: {key} is unusable", got=value, expected="a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        return positive_number(self._config.get(key, default), key, self._source)


def read_json_object(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in ``folder/name``.

    Raises:
        CheckpointError: there is no such folder or file, or it does not hold a JSON object.
    """
    if not folder.is_dir():
        raise CheckpointError(
            "the model folder does not exist" if not folder.exists() else "the model path is not a folder",
            got=folder,
            expected="a Hugging Face checkpoint folder (config.json, *.safetensors, tokenizer files)",
        )
    path = folder / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{name} is missing from {folder}", remedy="Copy the whole checkpoint folder.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened", got=error.strerror) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not valid JSON", got=str(error), remedy="Copy the file again from its source."
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is unusable", got=type(value).__name__, expected="a JSON object")
    return value


def token_ids(value: Any, source: str = "config.json") -> tuple[int, ...]:
    """An EOS entry of a config, which may be absent, one id or several.

    Raises:
        CheckpointError: it is something else.
    """
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else (value,)
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise CheckpointError(
            f"{source}: eos_token_id is unusable",
            got=repr(value),
            expected="a token id, or a list of them",
            remedy="Copy the file as the model's authors published it.",
        )
    return tuple(ids)


def _architecture(config: Mapping[str, Any], source: str) -> str:
    model_type = config.get("model_type")
    known = ", ".join(ARCHITECTURES)
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        close = nearest(str(model_type), ARCHITECTURES)
        raise CheckpointError(
            f"{source}: model_type is not supported",
            got=model_type,
            expected=f"one of {known}",
            remedy=f"The closest supported architecture is {close}." if close else None,
        )
    classes = config.get("architectures") or []
    if classes and ARCHITECTURES[model_type].lower() not in [str(name).lower() for name in classes]:
        raise CheckpointError(
            f"{source}: the checkpoint is not a causal language model", got=classes, expected=ARCHITECTURES[model_type]
        )
    return model_type


def _refuse_variants(config: Mapping[str, Any], source: str) -> None:
    for key in EXPERT_KEYS:
        if config.get(key):
            raise CheckpointError(
                f"{source}: mixture-of-experts models are not supported",
                got=f"{key}={config[key]}",
                expected="a dense model",
            )
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"{source}: hidden_act is not supported", got=config["hidden_act"], expected="silu")
    if config.get("lm_head_bias"):
        raise CheckpointError(f"{source}: an LM head with a bias is not supported", got="lm_head_bias=true")


def _refuse_sliding_window(
    config: Mapping[str, Any], architecture: str, num_layers: int, max_positions: int, source: str
) -> None:
    """Refuse a window that a sequence of allowed length could outgrow; a window that never binds is plain attention."""
    # transformers takes 4096 for a mistral file that does not mention the window.
    window = config.get("sliding_window", 4096 if architecture == "mistral" else None)
    if architecture == "llama" or window is None or window >= max_positions:
        return
    if architecture in ("qwen2", "qwen3"):
        if not config.get("use_sliding_window", False):
            return
        kinds = config.get("layer_types") or [
            "sliding_attention" if layer >= config.get("max_window_layers", 28) else "full_attention"
            for layer in range(num_layers)
        ]
        if all(kind == "full_attention" for kind in kinds):
            return
    raise CheckpointError(
        f"{source}: sliding-window attention is not supported",
        got=f"sliding_window={window} with max_position_embeddings={max_positions}",
        expected="full attention",
        remedy=f"If no sequence will exceed {window} tokens, set max_position_embeddings to {window} in a copy of the "
        "folder: the window then never applies.",
    )


def _head_dim(fields: _Fields, architecture: str, hidden_size: int, num_heads: int) -> int:
    # transformers gives qwen3 a head_dim of 128 when the file names none; the others divide.
    head_dim = fields.positive("head_dim", 128 if architecture == "qwen3" else hidden_size // num_heads)
    if head_dim % 2:
        raise CheckpointError(
            "the head dimension is odd, so it cannot be rotated in pairs", got=head_dim, expected="even"
        )
    return head_dim


def read_quantization(quantization: Mapping[str, Any] | None, source: str) -> tuple[str | None, tuple[str, ...]]:
    """(layout, notes) of a ``quantization_config``: which weights of compressed-tensors can be read, and what is left out.

    Raises:
        CheckpointError: another method or layout, weights that are not what the layout says, a quantized KV cache, or
            rotations that the decoder would have to apply.
    """
    if not quantization:
        return None, ()
    remedy = "Use the plain checkpoint: weights are quantized at load."
    if not isinstance(quantization, Mapping):
        raise CheckpointError(
            f"{source}: quantization_config is unusable",
            got=repr(quantization),
            expected="a JSON object",
            remedy=remedy,
        )
    method, layout = quantization.get("quant_method"), quantization.get("format")
    if method != "compressed-tensors" or layout not in PACKED_LAYOUTS:
        raise CheckpointError(
            f"{source}: this kind of quantized checkpoint is not read",
            got=f"quant_method={method}, format={layout}",
            expected="quant_method=compressed-tensors, format=" + " or ".join(PACKED_LAYOUTS),
            remedy=remedy,
        )
    for key in ("kv_cache_scheme", "transform_config"):
        if quantization.get(key):
            what = "a quantized KV cache is" if key == "kv_cache_scheme" else "rotations of weights or activations are"
            raise CheckpointError(f"{source}: {what} not supported", got=f"quantization_config.{key}", remedy=remedy)
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{source}: quantization_config names no config_groups", expected="at least one group")
    for name, group in groups.items():
        if group.get("format") not in (None, layout):
            raise CheckpointError(
                f"{source}: config_groups.{name} has a layout of its own",
                got=group["format"],
                expected=layout,
                remedy=remedy,
            )
        _check_weights(group.get("weights") or {}, layout, f"{source}: config_groups.{name}.weights", remedy)
    if any(group.get("input_activations") or group.get("output_activations") for group in groups.values()):
        note = (
            "the checkpoint also describes quantized activations: its weights are used, its activation scales are not"
        )
        return layout, (note,)
    return layout, ()


def _check_weights(weights: Mapping[str, Any], layout: str, source: str, remedy: str) -> None:
    expected = {"num_bits": 4, "type": "float", "group_size": PACKED_LAYOUTS[layout][1], "symmetric": True}
    got = {key: weights.get(key, True if key == "symmetric" else None) for key in expected}
    if got != expected:
        raise CheckpointError(
            f"{source} are not what the layout {layout} holds",
            got=", ".join(f"{key}={value!r}" for key, value in got.items()),
            expected=", ".join(f"{key}={value!r}" for key, value in expected.items()),
            remedy=remedy,
        )
