"""What the benchmarks of training share: models and answers of random numbers, operations by count, the memory of a process."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.synthetic import model_spec
from qerl import memory
from qerl.config.load import load_config
from qerl.config.schema import Config
from qerl.kernels import dispatch
from qerl.model.decoder import Decoder
from qerl.model.spec import ModelSpec
from qerl.objective.batch import Sample
from qerl.records import Completion, Prompt
from qerl.train.learn import learn
from qerl.train.optimizer import MasterOptimizer
from qerl.train.timing import StageTimer
from qerl.units import GB

PEAK_FLOPS = 790e12
STAGES = ("logprobs", "backward", "optimizer")
TINY = {
    "model_type": "qwen2",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spec_of(size: str, *, tiny: bool) -> ModelSpec:
    """Shapes of a Qwen2.5, or toy ones."""
    return ModelSpec.from_config(TINY) if tiny else model_spec(size)


def settings(
    format: str, checkpointing: str, *, prompts: int, prompt: int, answer: int, budget: int, more: Sequence[str] = ()
) -> Config:
    """A configuration of so many prompts with eight answers each, with a pass of its own for the log-probs of the sampling policy
    and keys and values given back while it learns."""
    return load_config(
        None,
        [
            f"quant.format={format}", f"train.checkpointing={checkpointing}", f"train.token_budget={max(budget, prompt + answer)}",
            f"rollout.prompts_per_step={prompts}", "rollout.group_size=8", f"rollout.max_prompt_tokens={prompt}",
            f"rollout.max_new_tokens={answer}", "objective.denominator=recomputed", "rollout.keep_cache=off",
            "aqn.enabled=false", *more,
        ],
    )  # fmt: skip


def tokens(generator: torch.Generator, spec: ModelSpec, length: int) -> tuple[int, ...]:
    return tuple(torch.randint(spec.vocab_size, (length,), generator=generator).tolist())


def questions(spec: ModelSpec, count: int, length: int) -> list[Prompt]:
    """Prompts of random tokens."""
    generator = torch.Generator().manual_seed(0)
    return [
        Prompt(id=str(index), question="", answer="", text="", token_ids=tokens(generator, spec, length))
        for index in range(count)
    ]


def random_answers(spec: ModelSpec, prompts: Sequence[Prompt], lengths: Sequence[int]) -> list[Completion]:
    """Eight answers of random tokens to each prompt, of the given lengths."""
    generator = torch.Generator().manual_seed(1)
    return [
        Completion(
            prompt=prompts[key // 8], sample_key=key, token_ids=tokens(generator, spec, length), text="", stop_reason="length",
            behavior_logprobs=(-11.9,) * length, sampler_logprobs=(-11.9,) * length,
        )
        for key, length in enumerate(lengths)
    ]  # fmt: skip


def samples(answers: Sequence[Completion]) -> list[list[Sample]]:
    """Answers by group of eight, with advantages of both signs."""
    items = [Sample(completion=c, advantage=(-1.0) ** key, in_loss=True) for key, c in enumerate(answers)]
    return [items[start : start + 8] for start in range(0, len(items), 8)]


def learned(
    config: Config, model: Decoder, optimizer: MasterOptimizer, answers: Sequence[Completion], timer: StageTimer
) -> StageTimer:
    """One update."""
    learn(config, model, optimizer, samples(answers), noise=None, completed=0, timer=timer)
    return timer


def operations(
    spec: ModelSpec, checkpointing: str, sequences: int, prompt: int, answer: int, *, full: bool = False
) -> dict[str, float]:
    """Floating-point operations of a micro-batch, by stage; ``full``: with gradients of all weights."""
    every, answers = sequences * (prompt + answer), sequences * answer
    linears = spec.num_layers * sum(group.out_features * group.in_features for group in spec.groups())
    head = spec.vocab_size * spec.hidden_size
    # Scores and weighted sum, the causal half: 4 q L^2 / 2 a layer and sequence, once forward and twice backward.
    attention = 2 * spec.num_layers * spec.q_size * sequences * (prompt + answer) ** 2
    again, own = int(checkpointing == "full"), 2 * int(full)
    return {
        "logprobs": 2 * linears * every + 2 * head * answers + attention,
        "backward": (4 + own + 2 * again) * linears * every + (4 + own) * head * answers + (3 + again) * attention,
    }


def rated(seconds: Sequence[float], counted: float | None) -> dict[str, Any]:
    """Median and all of some times, with what they say of the matrix units."""
    middle = statistics.median(seconds)
    row: dict[str, Any] = {"seconds": middle, "repeats": len(seconds), "all": list(seconds)}
    if counted is not None:
        row |= {"tflops": counted / middle / 1e12, "share_of_790": counted / middle / PEAK_FLOPS}
    return row


def compare(
    config: Config, spec: ModelSpec, timers: Sequence[StageTimer], stages: Sequence[str] = STAGES
) -> dict[str, Any]:
    """Predicted and measured peaks by stage, GB; measured are the largest of all timers."""
    ledger = memory.predict(config, spec, device_type="cuda")
    rows: dict[str, Any] = {}
    for stage in stages:
        found = [timer.peaks.run.get(stage, {"allocated": 0, "reserved": 0}) for timer in timers]
        peaks = {kind: max(peak[kind] for peak in found) for kind in ("allocated", "reserved")}
        predicted = ledger.total(stage)
        rows[stage] = {
            "predicted": predicted / GB,
            "allocated": peaks["allocated"] / GB,
            "reserved": peaks["reserved"] / GB,
            "error": predicted / peaks["allocated"] - 1 if peaks["allocated"] else None,
        }
    return rows


def clear(device: torch.device) -> None:
    """Give back what no object holds of a GPU's memory; a CPU's is not measured here."""
    if device.type == "cuda":
        from qerl.kernels.fp4_linear.workspace import workspace

        gc.collect()
        workspace(device).release()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def facts(device: torch.device) -> dict[str, Any]:
    """What figures were taken with."""
    return {"kernels": {op: dispatch.resolve(op, device) for op in dispatch.OPERATIONS}, "rank": 32}
