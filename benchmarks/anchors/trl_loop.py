"""Seconds of a step of TRL's GRPO loop with vLLM in the same process, on the task of ``configs/gsm8k_05b_nvfp4_aqn.yaml``.

    python benchmarks/anchors/trl_loop.py MODEL [--data gsm8k] [--steps 12] [--micro-batch 32] [--out FILE] [--generate vllm|transformers]

Questions, prompt template and the judge of answers are qerl's; all else is TRL's: unquantized base, LoRA of rank 32 on all seven projections,
32 prompts x 8 answers of at most 512 tokens, one update a rollout, DAPO loss without KL, clips .2 and .28, learning rate 2e-5, no
checkpointing of activations, temperature 1. A step is timed between the ends of two updates, so the first one, which compiles and captures, is left out.
``--tiny`` runs a few answers of a few tokens on the CPU, with transformers' generate.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from anchor_parts import require, write

from qerl.config.load import load_config
from qerl.config.schema import PROJECTIONS
from qerl.data.tasks import load_rows
from qerl.records import Completion, Prompt
from qerl.reward.compose import Rewarder

PACKAGES = {"trl": "1.16.0", "peft": "0.21.0"}
RECIPE = ROOT / "configs" / "gsm8k_05b_nvfp4_aqn.yaml"
RANK, GROUP = 32, 8
MISMATCH = "sampling/sampling_logp_difference/mean"


def settings(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Arguments of a ``GRPOConfig``."""
    answers = GROUP * arguments.prompts
    return {
        "output_dir": str(folder), "max_steps": arguments.steps, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "per_device_train_batch_size": arguments.micro_batch, "gradient_accumulation_steps": answers // arguments.micro_batch,
        "num_generations": GROUP, "max_completion_length": arguments.new, "temperature": 1.0, "num_iterations": 1,
        "loss_type": "dapo", "beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.28, "scale_rewards": "group",
        "learning_rate": 2e-5, "lr_scheduler_type": "constant", "gradient_checkpointing": False,
        "bf16": not arguments.tiny, "use_cpu": arguments.tiny, "seed": 0,
        "use_vllm": arguments.generate == "vllm", "vllm_mode": "colocate", "vllm_gpu_memory_utilization": arguments.memory,
    }  # fmt: skip


def questions(data: str, template: str, count: int | None) -> list[dict[str, Any]]:
    """Rows as TRL takes them: the chat, and the answer that the judge reads."""
    rows = load_rows(data, default_split="train").rows
    return [
        {
            "prompt": [{"role": "user", "content": template.replace("{question}", row["question"])}],
            "answer": str(row["answer"]),
        }
        for row in rows[:count]
    ]


class Judge:
    """qerl's accuracy as a reward function of TRL."""

    __name__ = "accuracy"

    def __init__(self, new: int):
        self._rewarder = Rewarder(load_config(RECIPE, []).reward, new)

    def __call__(
        self, completions: list[Any], answer: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float | None]:
        """1 for a right answer, 0 for a wrong one; None for one that cannot be judged."""
        made = [
            Completion(
                prompt=Prompt(id=str(i), question="", answer=answer[i], text="", token_ids=()),
                sample_key=i,
                token_ids=tuple(ids),
                text=completions[i][0]["content"],
                behavior_logprobs=(0.0,) * len(ids),
                sampler_logprobs=(0.0,) * len(ids),
                stop_reason="stop",
            )
            for i, ids in enumerate(completion_ids)
        ]
        return [score.reward for score in self._rewarder.score(made)]

    def close(self) -> None:
        self._rewarder.close()


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train, and say what it took."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    template = load_config(RECIPE, []).data.prompt_template
    rows = questions(arguments.data, template, None)
    lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM")
    judge = Judge(arguments.new)
    trainer = GRPOTrainer(
        model=str(arguments.model), reward_funcs=judge, args=GRPOConfig(**settings(arguments, folder)),
        train_dataset=Dataset.from_list(rows), peft_config=lora, callbacks=[Clock()],
    )  # fmt: skip
    try:
        trainer.train()
    finally:
        judge.close()
    steps = [later - earlier for earlier, later in itertools.pairwise(ends)]
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        "seconds_per_step": statistics.median(steps),
        "seconds_min_max": [min(steps), max(steps)],
        "steps": steps,
        "answer_tokens": statistics.mean(entry["completions/mean_length"] for entry in logs),
        "reward": [entry["reward"] for entry in logs],
        "logp_difference": [entry[MISMATCH] for entry in logs if MISMATCH in entry],
        "allocated_gb": torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None,
    }


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", default="gsm8k", help="as data.train of qerl")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--micro-batch", type=int, default=32, help="answers of a backward pass")
    parser.add_argument("--memory", type=float, default=0.3, help="share of the device's memory that vLLM may take")
    parser.add_argument("--generate", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args(given)
    arguments.prompts, arguments.new = 32, 512
    if arguments.tiny:
        arguments.prompts, arguments.new, arguments.micro_batch, arguments.generate = 1, 4, 8, "transformers"
    if arguments.steps < 2:
        parser.error("--steps is at least 2: the first one is not counted")
    if arguments.micro_batch < 1 or GROUP * arguments.prompts % arguments.micro_batch:
        parser.error(f"--micro-batch divides the {GROUP * arguments.prompts} answers of a step")
    return arguments


def main(given: list[str] | None = None) -> None:
    arguments = parse(given)
    packages = PACKAGES | ({"vllm": "0.26.0"} if arguments.generate == "vllm" else {})
    require(packages, cuda=not arguments.tiny)
    with tempfile.TemporaryDirectory() as name:
        found = run(arguments, Path(name))
        asked = settings(arguments, Path("DIR"))
    print(f"{found['seconds_per_step']:.2f} s a step, median of {len(found['steps'])}")
    if arguments.out is not None:
        write(arguments.out, packages, settings=asked, **found)


if __name__ == "__main__":
    main()
