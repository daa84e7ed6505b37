"""The training step of other libraries: peft and transformers, on a bfloat16 base or on one that bitsandbytes packs as NF4."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.training import operations, rated, synchronize
from qerl.config.schema import PROJECTIONS
from qerl.model.spec import ModelSpec
from qerl.units import GB

ANSWERS = 8
"""Of an update, as in ``step.py``."""


def peft_passes(
    spec: ModelSpec, device: torch.device, *, nf4: bool, sequences: int, prompt: int, answer: int, repeats: int = 3
) -> dict[str, Any]:
    """Forward pass without gradients, forward and backward pass with gradient checkpointing, SDPA and the loss on the answers, and update;
    rank 32 on all seven projections. ``step``: an update from eight answers, which is a pass of each kind a micro-batch, and an update."""
    import peft
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads, num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_positions, tie_word_embeddings=spec.tie_embeddings,
    )  # fmt: skip
    with device:
        base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if nf4:
        pack_linears(base, device)
    base.gradient_checkpointing_enable({"use_reentrant": False})
    base.enable_input_require_grads()
    model = peft.get_peft_model(base, peft.LoraConfig(r=32, lora_alpha=32, target_modules=list(PROJECTIONS)))
    model.train()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    ids = torch.randint(spec.vocab_size, (sequences, prompt + answer), device=device)
    labels = ids.clone()
    labels[:, :prompt] = -100
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-5, fused=device.type == "cuda")

    def score() -> None:
        with torch.no_grad():
            model(input_ids=ids, labels=labels)

    stages: dict[str, Callable[[], Any]] = {
        "logprobs": score,
        "backward": lambda: model(input_ids=ids, labels=labels).loss.backward(),
        "optimizer": optimizer.step,
    }
    seconds: dict[str, list[float]] = {name: [] for name in stages}
    for index in range(1 + repeats):
        optimizer.zero_grad()
        for name, stage in stages.items():
            synchronize(device)
            began = time.perf_counter()
            stage()
            synchronize(device)
            if index:
                seconds[name].append(time.perf_counter() - began)
    counted = operations(spec, "full", sequences, prompt, answer)
    row: dict[str, Any] = {name: rated(times, counted.get(name)) for name, times in seconds.items()}
    passes = ANSWERS / sequences
    steps = [passes * (score + learn) + update for score, learn, update in zip(*seconds.values(), strict=True)]
    row["step"] = rated(steps, None) | {"answers": ANSWERS}
    peak = torch.cuda.max_memory_allocated(device) / GB if device.type == "cuda" else 0.0
    return row | {"allocated_gb": peak}


def pack_linears(base: Any, device: torch.device) -> None:
    """Every linear layer of the decoder as bitsandbytes' NF4 with packed scales, the way peft expects it."""
    import bitsandbytes

    for layer in base.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, linear in list(block.named_children()):
                if not isinstance(linear, torch.nn.Linear):
                    continue
                packed = bitsandbytes.nn.Linear4bit(
                    linear.in_features, linear.out_features, linear.bias is not None, compute_dtype=torch.bfloat16,
                    quant_type="nf4", device="meta",
                )  # fmt: skip
                packed.weight = bitsandbytes.nn.Params4bit(
                    linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
                )
                packed.bias = linear.bias
                setattr(block, name, packed.to(device))
    base.is_loaded_in_4bit = True
