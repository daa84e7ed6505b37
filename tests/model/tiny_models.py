"""Tiny random checkpoints, written by transformers, that tests of the decoder are held against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from qerl.config.schema import LoraConfig, QuantConfig
from qerl.model.attention import PackedSequences
from qerl.model.checkpoint import load_model
from qerl.model.decoder import Decoder

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied-theta": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    "llama-plain": ("llama", {}),
    "llama-one-kv-head-tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "llama-all-biases-wide-heads": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 32}),
    "qwen3-bias-tied": ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "mistral-plain": ("mistral", {"sliding_window": None}),
    "mistral-window-never-binds": ("mistral", {"sliding_window": 128, "head_dim": 32}),
}
"""Name -> (architecture, settings that differ from ``SMALL``)."""

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def write_tiny(
    folder: Path,
    variant: str = "qwen2-tied",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "1GB",
    **settings: Any,
) -> Any:
    """Write a random checkpoint and return the transformers model. Norms and biases are random too."""
    architecture, changes = VARIANTS[variant]
    config_class, model_class = CLASSES[architecture]
    model = model_class(config_class(**{**SMALL, **changes, **settings}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.12 * noise)
    model = model.to(dtype).eval()
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def random_tokens(lengths: tuple[int, ...], vocab_size: int = 96, seed: int = 0) -> list[Tensor]:
    """One int64 vector a sequence."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


def pack(sequences: list[Tensor]) -> tuple[Tensor, PackedSequences]:
    """Tokens end to end, and their context."""
    lengths = torch.tensor([0, *(sequence.numel() for sequence in sequences)])
    return torch.cat(sequences), PackedSequences(lengths.cumsum(0))


def load_tiny(folder: Path, *, lora: LoraConfig | None = None, **settings: Any) -> Decoder:
    """Load in float32 without quantization, unless told otherwise."""
    settings = {"quant": QuantConfig(format="bf16"), "dtype": torch.float32, **settings}
    return load_model(folder, lora=lora, **settings)


@torch.no_grad()
def decoder_logits(model: Decoder, sequences: list[Tensor], **call: Any) -> Tensor:
    """float32 logits of all tokens, packed."""
    tokens_T, context = pack(sequences)
    return model.logits(model(tokens_T, context, **call))


@torch.no_grad()
def transformers_logits(model: Any, sequences: list[Tensor]) -> Tensor:
    """The same from a transformers (or peft) model, one sequence at a time."""
    return torch.cat([model(input_ids=sequence[None]).logits[0].float() for sequence in sequences])


@torch.no_grad()
def randomize_adapters(model: Decoder, seed: int = 7, size: float = 0.1) -> None:
    """Give every trainable parameter a value that matters (B starts at zero)."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.trainable_parameters().values():
        parameter.add_(size * torch.randn(parameter.shape, generator=generator).to(parameter.device))
