"""Milliseconds of a decode step of vLLM with LoRA, by the protocol of ``benchmarks/rollout.py``.

    python benchmarks/anchors/vllm_decode.py MODEL [--rank 32] [--sequences 1,8,32,64,128,256] [--calls 3] [--out FILE]

MODEL is a checkpoint folder that vLLM loads: unquantized, or of 4 bits as ``qerl quantize MODEL --out DIR`` writes it. An adapter of random
numbers (B not zero) on all seven projections is made for it; ``--rank 0`` measures without one.

Prompts of 16 random tokens, no token ends an answer, temperature 1, with the log-prob of each sampled token, prefix cache off, the
engine's own defaults otherwise (CUDA graphs, torch.compile). A step is timed from outside: seconds of calls with 192 new tokens less those of
calls with 32, over 160 steps, medians of ``--calls`` each after one that is not counted. So prefill and what a call costs by itself fall out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from anchor_parts import require, write

PACKAGES = {"vllm": "0.26.0"}
MODULES = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """What is asked of an engine."""

    prompt: int = 16
    new: int = 192
    few: int = 32
    """New tokens of the calls whose time is taken off."""
    temperature: float = 1.0
    calls: int = 3


Generate = Callable[[list[list[int]], int], None]
"""Answers prompts (token ids) with exactly so many new tokens each."""


def step_ms(
    generate: Generate,
    sequences: int,
    protocol: Protocol,
    vocabulary: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Milliseconds of a step in which ``sequences`` sequences advance by a token; least and most by pairs of calls."""
    generator = torch.Generator().manual_seed(0)
    seconds: dict[int, list[float]] = {protocol.few: [], protocol.new: []}
    for call in range(1 + protocol.calls):
        for new in seconds:
            # Other prompts each time, so that nothing that is kept of earlier ones can help.
            prompts = torch.randint(vocabulary, (sequences, protocol.prompt), generator=generator).tolist()
            began = clock()
            generate(prompts, new)
            if call:
                seconds[new].append(clock() - began)
    steps = protocol.new - protocol.few
    pairs = [1e3 * (more - few) / steps for few, more in zip(*seconds.values(), strict=True)]
    ms = 1e3 * (statistics.median(seconds[protocol.new]) - statistics.median(seconds[protocol.few])) / steps
    return {"sequences": sequences, "ms_per_step": ms, "ms_min_max": [min(pairs), max(pairs)]}


def write_adapter(folder: Path, config: dict[str, Any], rank: int) -> None:
    """A LoRA of random numbers in PEFT's format for the decoder that ``config.json`` describes.

    Its A has the size that keeps activations as large as they are, and its B is small and not zero.
    """
    from safetensors.torch import save_file

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv_heads = size * config["num_attention_heads"], size * config["num_key_value_heads"]
    shapes = {
        "q_proj": (heads, hidden),
        "k_proj": (kv_heads, hidden),
        "v_proj": (kv_heads, hidden),
        "o_proj": (hidden, heads),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    generator, tensors = torch.Generator().manual_seed(1), {}
    for layer in range(config["num_hidden_layers"]):
        for block, names in MODULES.items():
            for name in names:
                (rows, columns), at = shapes[name], f"base_model.model.model.layers.{layer}.{block}.{name}"
                a = torch.randn(rank, columns, generator=generator) * columns**-0.5
                tensors[f"{at}.lora_A.weight"] = a.bfloat16()
                tensors[f"{at}.lora_B.weight"] = (0.01 * torch.randn(rows, rank, generator=generator)).bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = [name for names in MODULES.values() for name in names]
    facts = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps({**facts, "bias": "none", "base_model_name_or_path": ""}))


def vllm_engine(model: Path, adapter: Path | None, rank: int, most: int, protocol: Protocol, share: float) -> Generate:
    """vLLM on the current device."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    lora = {} if adapter is None else {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    engine = LLM(
        model=str(model), dtype="bfloat16", max_num_seqs=most, max_model_len=2 * (protocol.prompt + protocol.new),
        enable_prefix_caching=False, gpu_memory_utilization=share, seed=0, **lora,
    )  # fmt: skip
    request = None if adapter is None else LoRARequest("anchor", 1, str(adapter))

    def generate(prompts: list[list[int]], new: int) -> None:
        sampling = SamplingParams(
            temperature=protocol.temperature, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False
        )
        found = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, lora_request=request, use_tqdm=False
        )
        lengths = {len(answer.outputs[0].token_ids) for answer in found}
        assert lengths == {new}, f"answers of {sorted(lengths)} tokens, not of {new}"

    return generate


def counts(text: str) -> list[int]:
    """Numbers of sequences, with commas."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least one sequence")
    return found


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--sequences", type=counts, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--calls", type=int, default=Protocol().calls)
    parser.add_argument("--memory", type=float, default=0.85, help="share of the device's memory that vLLM may take")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(given)
    if not (arguments.model / "config.json").is_file():
        parser.error(f"{arguments.model} is no checkpoint folder: it holds no config.json")
    if arguments.calls < 1 or arguments.rank < 0:
        parser.error("--calls is at least 1, --rank at least 0")
    return arguments


def main(given: list[str] | None = None) -> None:
    arguments = parse(given)
    require(PACKAGES, cuda=True)
    protocol = Protocol(calls=arguments.calls)
    config = json.loads((arguments.model / "config.json").read_text(encoding="utf-8"))
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        adapter = Path(name) / "adapter" if arguments.rank else None
        if adapter is not None:
            write_adapter(adapter, config, arguments.rank)
        most = max(arguments.sequences)
        generate = vllm_engine(arguments.model, adapter, arguments.rank, most, protocol, arguments.memory)
        for sequences in arguments.sequences:
            cells.append(step_ms(generate, sequences, protocol, config["vocab_size"]))
            print(f"{sequences:4d} sequences {cells[-1]['ms_per_step']:8.2f} ms", flush=True)
            if arguments.out is not None:
                write(arguments.out, PACKAGES, protocol=asdict(protocol), rank=arguments.rank, cells=cells)


if __name__ == "__main__":
    main()
