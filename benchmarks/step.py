"""The training step on a GPU: log-prob pass, backward pass, update; memory against its prediction; GRPO steps under a cap.

    python benchmarks/step.py [--out results/step_h200.json] [--seconds 70] [--tiny]

Models have Qwen2.5 shapes and random weights (speed does not depend on the values), LoRA rank 32 on all seven projections with trained
norms, answers of 2048 tokens of which 1920 are in the loss. Times are by the host's clock between synchronizations. Operations are counted as
4 P T + 4 P_head T_answer + attention (a frozen base has no weight gradient), 6 P T with full recomputation, 2 P T for a log-prob pass.
A case that finds too little time left is skipped and says so; one that runs out of memory is "not runnable". ``--tiny`` runs all of
it on the CPU with toy shapes.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from synthetic import StubTokenizer, model_spec, random_model

from qerl import memory
from qerl.config.load import load_config
from qerl.config.schema import PROJECTIONS, Config
from qerl.kernels import dispatch
from qerl.model.decoder import Decoder
from qerl.model.spec import ModelSpec
from qerl.objective.batch import Sample
from qerl.records import Completion, Prompt, SamplingSpec
from qerl.rollout.engine import Engine
from qerl.train.learn import learn
from qerl.train.optimizer import MasterOptimizer, make_optimizer
from qerl.train.timing import StageTimer

PEAK_FLOPS = 790e12
PROMPT, ANSWER = 128, 1920
LENGTH = PROMPT + ANSWER
STAGES = ("logprobs", "backward", "optimizer")
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model, and what is done with it."""

    size: str
    format: str = "nvfp4"
    checkpointing: str = "full"
    repeats: int = 1
    """Timed micro-batches of 8192 tokens; the last of ``shapes`` is the first of them."""
    cap_gb: float | None = None
    """Memory that the process may take; then a whole GRPO step is made."""
    shapes: tuple[int, ...] = (4096, 8192)
    """Tokens of the micro-batches whose memory is compared."""
    peft: bool = False
    """The same passes by peft and transformers, on a BF16 base with SDPA."""
    needs: float = 8.0
    """Seconds below which it is not begun."""

    @property
    def name(self) -> str:
        cap = f" in {self.cap_gb:g} GB" if self.cap_gb else ""
        return f"{self.size} {self.format}{cap}{' by peft and transformers' if self.peft else ''}"


CASES = (
    Case(size="7B", repeats=3, needs=0),
    Case(size="32B", cap_gb=48.0, needs=16),
    Case(size="14B", cap_gb=24.0, needs=8),
    Case(size="7B", format="bf16", repeats=3),
    Case(size="0.5B", repeats=3),
    Case(size="7B", cap_gb=14.0),
    Case(size="7B", format="bf16", peft=True, needs=12),
    Case(size="14B", format="bf16", cap_gb=24.0, needs=3),
    Case(size="32B", format="bf16", cap_gb=48.0, needs=3),
    Case(size="7B", checkpointing="none", shapes=(8192,), needs=6),
    Case(size="7B", checkpointing="selective", shapes=(8192,), needs=6),
)


class SyncTimer(StageTimer):
    """Waits for the device at the borders of stages."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        synchronize(self.peaks.device)
        with super().stage(name):
            yield
            synchronize(self.peaks.device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def settings(case: Case, tokens: int) -> Config:
    """The configuration that the case amounts to: one prompt, eight answers."""
    return load_config(
        None,
        [
            f"quant.format={case.format}", f"train.checkpointing={case.checkpointing}", f"train.token_budget={max(tokens, LENGTH)}",
            "rollout.prompts_per_step=1", "rollout.group_size=8", f"rollout.max_prompt_tokens={PROMPT}",
            f"rollout.max_new_tokens={ANSWER}", "objective.denominator=recomputed", "rollout.keep_cache=off",
            "aqn.enabled=false",
        ],
    )  # fmt: skip


def samples(spec: ModelSpec, count: int, prompt: int, answer: int) -> list[list[Sample]]:
    """A group of answers of random tokens with advantages of both signs."""
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(spec.vocab_size, (length,), generator=generator).tolist())

    question = Prompt(id="0", question="", answer="", text="", token_ids=tokens(prompt))
    recorded = (-11.9,) * answer
    return [
        [
            Sample(
                completion=Completion(
                    prompt=question, sample_key=key, token_ids=tokens(answer), text="", stop_reason="length",
                    behavior_logprobs=recorded, sampler_logprobs=recorded,
                ),
                advantage=(-1.0) ** key,
                in_loss=True,
            )
            for key in range(count)
        ]
    ]  # fmt: skip


def operations(spec: ModelSpec, checkpointing: str, sequences: int, prompt: int, answer: int) -> dict[str, float]:
    """Floating-point operations of a micro-batch, by stage."""
    tokens, answers = sequences * (prompt + answer), sequences * answer
    linears = spec.num_layers * sum(group.out_features * group.in_features for group in spec.groups())
    head = spec.vocab_size * spec.hidden_size
    # Scores and weighted sum, the causal half: 4 q L^2 / 2 a layer and sequence, once forward and twice backward.
    attention = 2 * spec.num_layers * spec.q_size * sequences * (prompt + answer) ** 2
    again = 1 if checkpointing == "full" else 0
    return {
        "logprobs": 2 * linears * tokens + 2 * head * answers + attention,
        "backward": (4 + 2 * again) * linears * tokens + 4 * head * answers + (3 + again) * attention,
    }


class Bench:
    """Runs cases and keeps their rows.

    Args:
        device: where.
        seconds: time for everything.
        tiny: toy shapes.
    """

    def __init__(self, device: torch.device, seconds: float, *, tiny: bool):
        self.device, self.tiny = device, tiny
        self.end = time.perf_counter() + seconds
        self.rows: dict[str, Any] = {}
        self.prompt, self.answer = (4, 12) if tiny else (PROMPT, ANSWER)

    def run(self, case: Case, out: Path | None) -> None:
        left = self.end - time.perf_counter()
        key = case.name if case.checkpointing == "full" else f"{case.name}, checkpointing {case.checkpointing}"
        if left < case.needs:
            self.rows[key] = {"skipped": f"{left:.0f} s left, {case.needs:g} needed"}
            print(f"{key}: skipped", flush=True)
            return
        began = time.perf_counter()
        self._cap(case.cap_gb)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            self.rows[key] = self._measure_peft(case) if case.peft else self._measure(case)
        except torch.OutOfMemoryError as error:
            self.rows[key] = {"not runnable": str(error).split(". ")[0]}
        finally:
            self._clear()
            self._cap(None)
        self.rows[key]["seconds_in_all"] = time.perf_counter() - began
        print(f"{key}: {json.dumps(self.rows[key])}", flush=True)
        if out is not None:
            out.write_text(json.dumps({"facts": facts(self.device), "rows": self.rows}, indent=1) + "\n")

    def _cap(self, gigabytes: float | None) -> None:
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(1.0 if gigabytes is None else gigabytes * GB / total)

    def _clear(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            from qerl.kernels.fp4_linear.workspace import workspace

            workspace(self.device).release()
            torch.cuda.empty_cache()

    def _measure(self, case: Case) -> dict[str, Any]:
        spec = self._spec(case.size)
        model = random_model(spec, format=case.format, device=self.device, dtype=torch.bfloat16)
        optimizer = make_optimizer(model.trainable_parameters(), settings(case, 8192).optim)
        # The first update makes the moments, and compiles what there is to compile.
        self._learn(case, model, optimizer, 1, 64 if not self.tiny else 12)
        row: dict[str, Any] = {}
        if case.cap_gb is not None:
            row["rollout"] = self._generate(case, model)
        row["memory"] = {}
        for tokens in case.shapes:
            timer = self._learn(case, model, optimizer, self._sequences(tokens))
            row["memory"][tokens] = self._compare(case, spec, tokens, timer)
        timed = [timer, *(self._learn(case, model, optimizer, self._sequences(8192)) for _ in range(case.repeats - 1))]
        counted = operations(spec, case.checkpointing, self._sequences(8192), self.prompt, self.answer)
        for stage in STAGES:
            seconds = [timer.total[stage] for timer in timed]
            row[stage] = {"seconds": statistics.median(seconds), "all": seconds}
            if stage in counted:
                row[stage]["tflops"] = counted[stage] / statistics.median(seconds) / 1e12
                row[stage]["share_of_790"] = counted[stage] / statistics.median(seconds) / PEAK_FLOPS
        if case.cap_gb is not None:
            row["rollout_after_training"] = self._generate(case, model)
        return row

    def _measure_peft(self, case: Case) -> dict[str, Any]:
        """Forward and backward pass of as many tokens, gradient checkpointing on, loss on the answers."""
        import peft
        import transformers

        spec, count = self._spec(case.size), self._sequences(8192)
        config = transformers.Qwen2Config(
            vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size,
            num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads, num_key_value_heads=spec.num_kv_heads,
            max_position_embeddings=spec.max_positions, tie_word_embeddings=spec.tie_embeddings,
        )  # fmt: skip
        with self.device:
            base = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            )
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.enable_input_require_grads()
        model = peft.get_peft_model(base, peft.LoraConfig(r=32, lora_alpha=32, target_modules=list(PROJECTIONS)))
        model.train()
        ids = torch.randint(spec.vocab_size, (count, self.prompt + self.answer), device=self.device)
        labels = ids.clone()
        labels[:, : self.prompt] = -100
        seconds = []
        for _ in range(3):
            synchronize(self.device)
            began = time.perf_counter()
            model(input_ids=ids, labels=labels).loss.backward()
            synchronize(self.device)
            seconds.append(time.perf_counter() - began)
        counted = operations(spec, "full", count, self.prompt, self.answer)["backward"]
        best = statistics.median(seconds[1:])
        peak = torch.cuda.max_memory_allocated(self.device) / GB if self.device.type == "cuda" else 0.0
        backward = {
            "seconds": best,
            "all": seconds,
            "tflops": counted / best / 1e12,
            "share_of_790": counted / best / PEAK_FLOPS,
        }
        return {"backward": backward, "allocated_gb": peak}

    def _spec(self, size: str) -> ModelSpec:
        if not self.tiny:
            return model_spec(size)
        return ModelSpec.from_config(
            {
                "model_type": "qwen2", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
            }
        )  # fmt: skip

    def _sequences(self, tokens: int) -> int:
        return tokens // LENGTH

    def _learn(
        self, case: Case, model: Decoder, optimizer: MasterOptimizer, sequences: int, answer: int | None = None
    ) -> SyncTimer:
        """One update from so many answers in one micro-batch."""
        config = settings(case, sequences * LENGTH)
        timer = SyncTimer(self.device)
        groups = samples(model.spec, sequences, self.prompt, answer or self.answer)
        learn(config, model, optimizer, groups, noise=None, completed=0, timer=timer)
        return timer

    def _generate(self, case: Case, model: Decoder) -> dict[str, Any]:
        """Eight answers with memory for 1920 tokens each; one token in 64 ends an answer, so that it takes seconds."""
        vocabulary = model.spec.vocab_size
        config = settings(case, 8192)
        tokenizer = StubTokenizer(tuple(range(0, vocabulary, 64)))
        engine = Engine(model, tokenizer, max_num_seqs=8, device=self.device)  # type: ignore[arg-type]
        question = samples(model.spec, 1, self.prompt, 1)[0][0].completion.prompt
        sampling = SamplingSpec(temperature=1.0, max_new_tokens=self.answer, seed=0, rollout=0)
        peaks = memory.PhasePeaks(self.device)
        peaks.begin()
        completions, stats = engine.generate([question], sampling, group_size=8)
        synchronize(self.device)
        peaks.end("rollout")
        engine.release()
        memory.return_unused(self.device)
        predicted = memory.predict(config, model.spec, device_type="cuda").total("rollout")
        measured = peaks.run.get("rollout", {})
        return {
            "answer_tokens": sum(len(c.token_ids) for c in completions),
            "seconds": stats["seconds"],
            "kv_gb": stats["kv_bytes"] / GB,
            "predicted_gb": predicted / GB,
            "allocated_gb": measured.get("allocated", 0) / GB,
            "reserved_gb": measured.get("reserved", 0) / GB,
        }

    def _compare(self, case: Case, spec: ModelSpec, tokens: int, timer: SyncTimer) -> dict[str, Any]:
        """Predicted and measured peaks by stage, GB."""
        ledger = memory.predict(settings(case, tokens), spec, device_type="cuda")
        rows: dict[str, Any] = {}
        for stage in STAGES:
            peaks = timer.peaks.run.get(stage, {"allocated": 0, "reserved": 0})
            predicted = ledger.total(stage)
            rows[stage] = {
                "predicted": predicted / GB,
                "allocated": peaks["allocated"] / GB,
                "reserved": peaks["reserved"] / GB,
                "error": predicted / peaks["allocated"] - 1 if peaks["allocated"] else None,
            }
        return rows


def facts(device: torch.device) -> dict[str, Any]:
    """What the figures were taken on."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "commit": commit or None,
        "kernels": {op: dispatch.resolve(op, device) for op in dispatch.OPERATIONS},
        "rank": 32,
        "tokens_of_an_answer": LENGTH,
        "answer_tokens_in_the_loss": ANSWER,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    # With its number, as tensors name it: what is cached by device is then found again.
    device = torch.device("cpu" if arguments.tiny else "cuda:0")
    bench = Bench(device, arguments.seconds, tiny=arguments.tiny)
    print(json.dumps(facts(device)), flush=True)
    for case in CASES:
        bench.run(case, arguments.out)


if __name__ == "__main__":
    main()
