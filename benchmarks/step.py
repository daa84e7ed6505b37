"""The training step on a GPU: log-prob pass, backward pass, update; memory against its prediction; whole GRPO steps, also under a cap.

    python benchmarks/step.py [--out results/step_h200.json] [--only passes,peers,whole,capped] [--add FILE ...] [--seconds 400] [--tiny]

Models have Qwen2.5 shapes and random weights (speed does not depend on the values), LoRA rank 32 on all seven projections with
trained norms. ``passes``: an update from eight answers of 2048 tokens, of which 1920 are in the loss, in micro-batches of 4k and of
8k tokens (no prompt shared); times are of one micro-batch of 8192, or of as many tokens as the row names. ``peers``: the same micro-batch by peft and transformers, on BF16 and on
bitsandbytes' NF4. ``whole``: rollout (all answers as long as they may be), log-probs, backward and update of one step; and the
speed-up of NVFP4 over BF16, by the clock and from parts. ``capped``: the same in one process under a cap of memory, with BF16 under
the same cap. ``--most-new 7B=512`` shortens the answers of whole steps; under a cap there is still room for all of their tokens and
the update is made from answers as long as they may be, only fewer tokens are sampled.

Times are by the host's clock between synchronizations. Operations are counted as 4 P T + 4 P_head T_answer + attention (a frozen
base has no weight gradient), 6 P T with full recomputation, 2 P T for a log-prob pass. A case that finds too little time left is
skipped and says so; one that runs out of memory is "not runnable". ``--tiny`` runs all of it on the CPU with toy shapes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peers import peft_passes
from synthetic import StubTokenizer, random_model
from timing import require_gpu
from training import (
    GB,
    STAGES,
    cap,
    clear,
    compare,
    facts,
    learned,
    operations,
    questions,
    random_answers,
    rated,
    samples,
    settings,
    spec_of,
    synchronize,
)

from qerl import memory
from qerl.objective.batch import pack
from qerl.records import Completion, SamplingSpec, TrainBatch
from qerl.report.speedup import speed_up
from qerl.rollout.engine import Engine
from qerl.train.optimizer import make_optimizer
from qerl.train.timing import StageTimer

PROMPT, ANSWER, MICRO_BATCH = 128, 1920, 8192
PART = 8
"""A short rollout has this part of the tokens: from it, one of twice as many and a micro-batch a speed-up is predicted."""
REPEATS = 3
"""Timed runs of a part, after one of the same shape that is not: what a shape needs at its first use is no part of its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model, and what is done with it."""

    kind: str
    """``passes``, ``peers``, ``whole`` or ``capped``."""
    size: str
    format: str = "nvfp4"
    checkpointing: str = "full"
    updates: int = 1
    """Timed updates, or whole steps."""
    shapes: tuple[int, ...] = (4096, MICRO_BATCH)
    """Tokens of the micro-batches whose memory is compared; the last is timed."""
    prompts: int = 1
    """Of an update; eight answers each."""
    new: int = 2048
    """Tokens of each of its answers."""
    cap_gb: float | None = None
    """Memory that the process may take."""
    needs: float = 8.0
    """Seconds below which it is not begun."""

    @property
    def name(self) -> str:
        if self.kind == "peers":
            return f"{self.size} {self.format} by peft and transformers"
        limited = f" in {self.cap_gb:g} GB" if self.cap_gb else ""
        if self.kind in ("whole", "capped"):
            return f"{self.size} {self.format}{limited}, step of {8 * self.prompts} x {self.new}"
        way = "" if self.checkpointing == "full" else f", checkpointing {self.checkpointing}"
        wide = "" if self.shapes[-1] == MICRO_BATCH else f", micro-batches of {self.shapes[-1]}"
        return f"{self.size} {self.format}{way}{wide}"


CASES = (
    Case(kind="passes", size="7B", updates=3, needs=0),
    Case(kind="passes", size="7B", format="bf16", updates=3),
    Case(kind="passes", size="0.5B", updates=3, needs=5),
    Case(kind="passes", size="0.5B", format="bf16", updates=3, needs=5),
    Case(kind="passes", size="0.5B", checkpointing="none", shapes=(65536,), prompts=4, updates=3, needs=5),
    Case(kind="passes", size="7B", checkpointing="none", shapes=(8192,)),
    Case(kind="passes", size="7B", checkpointing="selective", shapes=(8192,)),
    Case(kind="passes", size="14B"),
    Case(kind="passes", size="32B", needs=25),
    Case(kind="passes", size="32B", format="bf16", needs=25),
    Case(kind="passes", size="0.5B", format="nf4"),
    Case(kind="passes", size="7B", format="nf4", needs=12),
    Case(kind="passes", size="32B", format="nf4", shapes=(8192,), needs=40),
    Case(kind="whole", size="7B", prompts=8, new=1024, needs=20),
    Case(kind="whole", size="7B", format="bf16", prompts=8, new=1024, needs=18),
    Case(kind="whole", size="32B", needs=22),
    Case(kind="whole", size="32B", format="bf16", needs=28),
    Case(kind="capped", size="32B", cap_gb=48.0, needs=20),
    Case(kind="capped", size="14B", cap_gb=24.0, needs=12),
    Case(kind="capped", size="7B", cap_gb=14.0, needs=10),
    Case(kind="capped", size="32B", format="bf16", cap_gb=48.0, needs=3),
    Case(kind="capped", size="14B", format="bf16", cap_gb=24.0, needs=3),
    Case(kind="capped", size="7B", format="bf16", cap_gb=14.0, needs=3),
    Case(kind="peers", size="7B", format="nf4", needs=12),
    Case(kind="peers", size="0.5B", format="nf4", needs=5),
    Case(kind="peers", size="7B", format="bf16", needs=10),
    Case(kind="peers", size="0.5B", format="bf16", needs=5),
)


class Bench:
    """Runs cases and keeps their rows.

    Args:
        device: where.
        seconds: time for everything.
        tiny: toy shapes.
        most_new: by size, most tokens that are sampled of an answer of a whole step.
    """

    def __init__(self, device: torch.device, seconds: float, *, tiny: bool, most_new: Mapping[str, int]):
        self.device, self.tiny, self.most_new = device, tiny, most_new
        self.end = time.perf_counter() + seconds
        self.rows: dict[str, Any] = {}
        self.prompt, self.answer = (4, 12) if tiny else (PROMPT, ANSWER)

    def run(self, case: Case) -> None:
        left = self.end - time.perf_counter()
        if left < case.needs:
            self.rows[case.name] = {"skipped": f"{left:.0f} s left, {case.needs:g} needed"}
            print(f"{case.name}: skipped", flush=True)
            return
        began = time.perf_counter()
        cap(self.device, case.cap_gb)
        clear(self.device)
        try:
            measure = {"passes": self._passes, "peers": self._peers}.get(case.kind, self._whole)
            self.rows[case.name] = measure(case)
        except torch.OutOfMemoryError as error:
            self.rows[case.name] = {"not runnable": str(error).split(". ")[0]}
        except ImportError as error:
            self.rows[case.name] = {"skipped": str(error)}
        finally:
            clear(self.device)
            cap(self.device, None)
        self.rows[case.name]["seconds_in_all"] = time.perf_counter() - began
        print(f"{case.name}: {json.dumps(self.rows[case.name])}", flush=True)

    def _passes(self, case: Case) -> dict[str, Any]:
        spec = spec_of(case.size, tiny=self.tiny)
        run = Run(case, self, new=self.answer)
        run.warm_up()
        answers = random_answers(spec, run.prompts, [self.answer] * (8 * case.prompts))
        row: dict[str, Any] = {"memory": {}}
        for budget in case.shapes:
            config = run.config(budget)
            timer = learned(config, run.model, run.optimizer, answers, StageTimer(self.device))
            row["memory"][budget] = compare(config, spec, timer)
        timed = [timer, *(self._again(run, config, answers) for _ in range(case.updates - 1))]
        each = case.shapes[-1] // (PROMPT + ANSWER)
        counted = operations(spec, case.checkpointing, each, self.prompt, self.answer)
        for stage in STAGES:
            share = 1 if stage == "optimizer" else each / len(answers)
            row[stage] = rated([timer.total[stage] * share for timer in timed], counted.get(stage))
        return row

    def _again(self, run: Run, config: Any, answers: list[Completion]) -> StageTimer:
        return learned(config, run.model, run.optimizer, answers, StageTimer(self.device))

    def _peers(self, case: Case) -> dict[str, Any]:
        spec, sequences = spec_of(case.size, tiny=self.tiny), MICRO_BATCH // (PROMPT + ANSWER)
        shape = {"sequences": sequences, "prompt": self.prompt, "answer": self.answer}
        return peft_passes(spec, self.device, nf4=case.format == "nf4", **shape)

    def _whole(self, case: Case) -> dict[str, Any]:
        short = self.most_new.get(case.size, case.new)
        run = Run(
            case, self, new=2 * self.answer if self.tiny else case.new, sampled=2 * self.answer if self.tiny else short
        )
        run.warm_up()
        packs = run.packs(MICRO_BATCH)
        row: dict[str, Any] = {}
        if case.cap_gb is None:
            row["part_of_a_rollout"] = run.part_of_a_rollout()
            row["micro_batch"] = rated(run.passes(packs[0].num_sequences), None)
        timer, between = run.step()
        stages = {name: timer.total[name] for name in ("rollout", *STAGES)}
        row["seconds"] = {**stages, "to_training": between, "step": sum(stages.values()) + between}
        row["captures"] = {key: run.stats[f"graph_{key}"] for key in ("captures", "seconds")}
        row["tokens"] = {
            "sampled": run.sampled,
            "room": run.new,
            "micro_batches": [batch.num_tokens for batch in packs],
        }
        row["memory"] = {}
        for budget in (MICRO_BATCH, MICRO_BATCH // 2 + self.prompt) if case.cap_gb is not None else (MICRO_BATCH,):
            measured: tuple[str, ...] = ("rollout", *STAGES)
            if budget != MICRO_BATCH:
                timer, measured = StageTimer(self.device), STAGES
                learned(run.config(budget), run.model, run.optimizer, run.answers(8), timer)
            # The plan is for passes that are full; answers of one length leave some room in each.
            largest = max(batch.num_tokens for batch in run.packs(budget))
            row["memory"][largest] = compare(run.config(largest), run.model.spec, timer, measured)
        return row

    def speed_ups(self) -> dict[str, Any]:
        """NVFP4 over BF16: by the clock, and from generation's share f of the BF16 step, parts of a rollout (s) and a micro-batch (eta).
        Beside s and eta of the parts stand those of the whole steps, and what eta of the stages gives with s of the parts: errors of the
        two may cancel."""
        found: dict[str, Any] = {}
        for name, ours in self.rows.items():
            theirs = self.rows.get(name.replace("nvfp4", "bf16"), {})
            if " GB" in name or "nvfp4" not in name or not ("micro_batch" in ours and "micro_batch" in theirs):
                continue
            step = theirs["seconds"]["step"]
            f = theirs["seconds"]["rollout"] / step
            s = theirs["part_of_a_rollout"]["whole"] / ours["part_of_a_rollout"]["whole"]
            fast, slow = (sum(row["seconds"][stage] for stage in ("logprobs", "backward")) for row in (ours, theirs))
            eta = (ours["micro_batch"]["seconds"] / theirs["micro_batch"]["seconds"] - 1) * slow / step
            eta_of_stages = (fast - slow) / step
            measured = step / ours["seconds"]["step"]
            predicted, with_stages = speed_up(f, s, eta), speed_up(f, s, eta_of_stages)
            found[name] = {
                "measured": measured,
                "predicted": predicted,
                "error": predicted / measured - 1,
                "f": f,
                "s": s,
                "s_of_the_whole_rollout": theirs["seconds"]["rollout"] / ours["seconds"]["rollout"],
                "eta": eta,
                "eta_of_the_stages": eta_of_stages,
                "error_with_eta_of_the_stages": with_stages / measured - 1,
            }
        return found


class Run:
    """A model with engine and optimizer, whose phases share memory as in a run that gives keys and values back.

    Args:
        new: tokens that an answer may have, and has where it is learned from.
        sampled: tokens that are sampled of it, where a cap is to be shown; else answers have no more than these.
    """

    def __init__(self, case: Case, bench: Bench, *, new: int, sampled: int | None = None):
        self.case, self.device, self.prompt = case, bench.device, bench.prompt
        self.sampled = new if sampled is None else sampled
        self.new = new if case.cap_gb is not None else self.sampled
        spec = spec_of(case.size, tiny=bench.tiny)
        self.model = random_model(spec, format=case.format, device=self.device, dtype=torch.bfloat16)
        self.optimizer = make_optimizer(self.model.trainable_parameters(), self.config(MICRO_BATCH).optim)
        self.prompts = questions(spec, case.prompts, bench.prompt)
        # No token ends an answer.
        tokenizer: Any = StubTokenizer((spec.vocab_size + 1,))
        self.engine = Engine(self.model, tokenizer, max_num_seqs=8 * case.prompts, device=self.device, lends=True)
        self.stats: dict[str, float] = {}

    def config(self, budget: int) -> Any:
        # Micro-batches that are compared with others have as many tokens; whole steps share what they can.
        more = ["train.share_prompts=false"] if self.case.kind == "passes" else []
        return settings(
            self.case.format, self.case.checkpointing, prompts=self.case.prompts, prompt=self.prompt, answer=self.new,
            budget=budget, more=more,
        )  # fmt: skip

    def answers(self, count: int) -> list[Completion]:
        return random_answers(self.model.spec, self.prompts, [self.new] * count)

    def packs(self, budget: int) -> list[TrainBatch]:
        """The micro-batches of a step."""
        items = [sample for group in samples(self.answers(8 * len(self.prompts))) for sample in group]
        config = self.config(budget)
        key = (lambda key: 0) if config.shares_prompts(self.device.type) else None
        return list(pack(items, config.pass_tokens, self.device, prefix_key=key))

    def passes(self, count: int) -> list[float]:
        """Seconds of log-probs and backward pass of so many answers, each after memory was given back, as in a step."""
        found = []
        for _ in range(1 + REPEATS):
            memory.return_unused(self.device)
            timer = StageTimer(self.device)
            learned(self.config(MICRO_BATCH), self.model, self.optimizer, self.answers(count), timer)
            found.append(timer.total["logprobs"] + timer.total["backward"])
        return found[1:]

    def part_of_a_rollout(self) -> dict[str, Any]:
        """Seconds of a short rollout and of one twice as long; ``whole``: what a rollout should take by them.

        The first call captures its steps, as every rollout does whose memory was given back, and counts once; what a call costs beside
        its decode steps counts once, too.
        """
        limit = max(1, self.sampled // PART)
        first = self.generate(limit)
        again = [self.generate(limit) for _ in range(REPEATS)]
        twice = [self.generate(2 * limit) for _ in range(1 + REPEATS)][1:]
        self.engine.release()
        more = max(0.0, statistics.median(twice) - statistics.median(again))
        whole = first + (self.sampled / limit - 1) * more
        return {"tokens": limit, "first": first, "again": again, "twice": twice, "whole": whole}

    def sample(self, limit: int) -> list[Completion]:
        sampling = SamplingSpec(temperature=1.0, max_new_tokens=self.new, seed=0, rollout=0)
        count = 8 * len(self.prompts)
        completions, self.stats = self.engine.generate(self.prompts, sampling, group_size=8, limits=[limit] * count)
        return list(completions)

    def generate(self, limit: int) -> float:
        """Seconds of a rollout of so many tokens an answer."""
        synchronize(self.device)
        began = time.perf_counter()
        self.sample(limit)
        synchronize(self.device)
        return time.perf_counter() - began

    def warm_up(self) -> None:
        """Compile what there is to compile; the first update makes the moments."""
        self.sample(2)
        self.engine.release()
        clear(self.device)
        answers = random_answers(self.model.spec, self.prompts[:1], [min(64, self.new)] * 8)
        learned(self.config(MICRO_BATCH), self.model, self.optimizer, answers, StageTimer(self.device))

    def step(self) -> tuple[StageTimer, float]:
        """Rollout and update; the stages' times, and the seconds between rollout and training."""
        timer = StageTimer(self.device)
        with timer.stage("rollout"):
            answers = self.sample(self.sampled)
        began = time.perf_counter()
        self.engine.release()
        memory.return_unused(self.device)
        synchronize(self.device)
        between = time.perf_counter() - began
        if self.sampled < self.new:
            answers = self.answers(len(answers))
        learned(self.config(MICRO_BATCH), self.model, self.optimizer, answers, timer)
        return timer, between


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="passes,peers,whole,capped", help="kinds of cases, with commas")
    parser.add_argument("--sizes", default="0.5B,7B,14B,32B", help="sizes, with commas")
    parser.add_argument("--formats", default="nvfp4,bf16,nf4", help="formats of the base, with commas")
    parser.add_argument("--most-new", nargs="*", default=[], metavar="SIZE=N", help="most tokens sampled of an answer")
    parser.add_argument(
        "--add", type=Path, nargs="*", default=[], help="earlier outputs whose rows are kept beside the new ones"
    )
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    require_gpu(tiny=arguments.tiny)
    # With its number, as tensors name it: what is cached by device is then found again.
    device = torch.device("cpu" if arguments.tiny else "cuda:0")
    most_new = {size: int(most) for size, _, most in (pair.partition("=") for pair in arguments.most_new)}
    bench = Bench(device, arguments.seconds, tiny=arguments.tiny, most_new=most_new)
    for path in arguments.add:
        bench.rows |= json.loads(path.read_text())["rows"]
    known = facts(device) | {"tokens_of_an_answer": PROMPT + ANSWER, "answer_tokens_in_the_loss": ANSWER, "gb": GB}
    print(json.dumps(known), flush=True)
    for case in CASES:
        if case.kind == "whole":
            case = replace(case, new=min(case.new, most_new.get(case.size, case.new)))
        chosen = (case.kind, arguments.only), (case.size, arguments.sizes), (case.format, arguments.formats)
        if all(value in given.split(",") for value, given in chosen):
            bench.run(case)
        if arguments.out is not None:
            content = {"facts": known, "rows": bench.rows, "speed_up_of_nvfp4_over_bf16": bench.speed_ups()}
            arguments.out.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(bench.speed_ups(), indent=1), flush=True)


if __name__ == "__main__":
    main()
