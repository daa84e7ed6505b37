"""Tiny random Hugging Face folders with a tokenizer, and the pieces that engine tests put together from them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from qerl.config.schema import LoraConfig, QuantConfig
from qerl.kernels import philox
from qerl.model.attention import PackedSequences
from qerl.model.checkpoint import load_model
from qerl.records import Prompt

VOCABULARY = 80
EOS_IDS = (2, 5, 11, 23, 31, 47, 71)
"""Many, so that random answers end early: batches become ragged."""

MAX_POSITIONS = 64

PAGE = 4
"""Tokens of a page under the fixture `small_pages`."""
PAGE_BYTES = 2 * 2 * PAGE * 24 * 4
"""Of the tiny model: layers, k and v, tokens, 2 heads of 12, float32."""


def write_checkpoint(folder: Path, architecture: str, seed: int = 0) -> Path:
    """Save a random model with distinct logits (wide weights, norm scales off 1), and its tokenizer."""
    config = AutoConfig.for_model(
        architecture,
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=architecture == "qwen2",
        bos_token_id=None,
        eos_token_id=list(EOS_IDS),
        initializer_range=0.15,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(EOS_IDS)}))
    words = {"<pad>": 0, "<unk>": 1, "<end>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    raw = RawTokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}",
    ).save_pretrained(folder)
    return folder


def load_tiny(folder: Path, *, dtype=torch.float32, quantized=False, adapters=True, dense_cache="auto", **settings):
    """The decoder, its adapters (where wanted) moved away from zero so that they matter."""
    quant = QuantConfig(format="nvfp4" if quantized else "bf16", dense_cache=dense_cache)
    lora = LoraConfig(rank=4, alpha=8.0) if adapters else None
    model = load_model(folder, quant=quant, lora=lora, dtype=dtype, **settings)
    if adapters:
        shift_adapters(model, 0.1)
    return model


def shift_adapters(model, size: float) -> None:
    """Add keyed normal numbers of standard deviation ``size`` to every B, in place, as an optimizer step does."""
    for name, parameter in model.trainable_parameters().items():
        if "lora_b" in name:
            change = philox.normal(0, f"test/{name}", parameter.numel()).view_as(parameter)
            parameter.data.add_(size * change.to(parameter.device))


def make_prompts(lengths, seed: int = 0) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for index, length in enumerate(lengths):
        ids = torch.randint(6, VOCABULARY, (length,), generator=generator).tolist()
        prompts.append(Prompt(id=f"p{index}", question="?", answer="0", text="?", token_ids=tuple(ids)))
    return prompts


@torch.no_grad()
def full_logits(model, token_ids, **arguments) -> torch.Tensor:
    """float32 logits [T, V] of one whole sequence in one training-style pass."""
    packed = PackedSequences(torch.tensor([0, len(token_ids)]))
    return model.logits(model(torch.tensor(token_ids), packed, **arguments))


def teacher_forced(model, completion, temperature, **arguments) -> torch.Tensor:
    """float64 log softmax(logits / T) of a completion's tokens, from one whole pass."""
    prompt = list(completion.prompt.token_ids)
    logits = full_logits(model, [*prompt, *completion.token_ids], **arguments)[len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.double() / temperature, dim=-1)
    return logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
