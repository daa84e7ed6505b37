"""One model with engine and optimizer, and the phases of a step that share its memory: what ``step.py`` times."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.synthetic import StubTokenizer, random_model
from benchmarks.training import clear, learned, questions, random_answers, samples, settings, spec_of, synchronize
from qerl import memory
from qerl.objective.batch import pack
from qerl.records import Completion, Prompt, SamplingSpec, TrainBatch
from qerl.rollout.engine import Engine
from qerl.train.optimizer import make_optimizer
from qerl.train.timing import StageTimer

MICRO_BATCH = 8192
PART = 16
"""A short rollout has this part of the tokens: from it, one of twice as many and micro-batches a speed-up is predicted."""
LEAST_OF_A_PART = 64
"""Tokens of a short rollout, at least (a quarter of the rollout at most): sixteen of them are nearly all what a call costs beside its steps."""
REPEATS = 3
"""Timed runs of a part, after one of the same shape that is not: what a shape needs at its first use is no part of its time."""
SWITCH_TOKENS = 8
"""Tokens of the short rollouts between which memory changes hands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model, and what is done with it."""

    kind: str
    """``passes``, ``peers``, ``full``, ``offload``, ``whole`` or ``capped``."""
    size: str
    format: str = "nvfp4"
    copies: bool = False
    """Dequantized copies of the weights are kept (``quant.dense_cache``), which a run of a 0.5B does by itself where a GPU has room."""
    optimizer: str = "adamw"
    """Name of the optimizer (``optim.name``)."""
    checkpointing: str = "full"
    offload: bool = False
    """The layers' inputs that full checkpointing keeps wait in the host's memory (``train.activation_offloading``)."""
    updates: int = 3
    """Timed updates, or whole steps, where there is time for them."""
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
        if self.kind == "full":
            return f"{self.size} {self.format}, all weights, {self.optimizer}"
        if self.kind == "offload":
            return f"{self.size} {self.format}, layer inputs {'on the host' if self.offload else 'on the device'}"
        limited = f" in {self.cap_gb:g} GB" if self.cap_gb else ""
        if self.kind in ("whole", "capped"):
            return f"{self.size} {self.format}{limited}, step of {8 * self.prompts} x {self.new}"
        kept = ", copies kept" if self.copies else ""
        way = "" if self.checkpointing == "full" else f", checkpointing {self.checkpointing}"
        wide = "" if self.shapes[-1] == MICRO_BATCH else f", micro-batches of {self.shapes[-1]}"
        return f"{self.size} {self.format}{kept}{way}{wide}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A whole step that was made."""

    timer: StageTimer
    """Seconds and peaks of its stages."""
    between: float
    """Seconds between rollout and training."""
    stats: dict[str, float]
    """Of its rollout."""


class Run:
    """A model with engine and optimizer, whose phases share memory as in a run that gives keys and values back.

    Args:
        case: model and shape of a step.
        prompt: tokens of a prompt.
        new: tokens that an answer may have, and has where it is learned from.
        sampled: tokens that are sampled of it, where a cap is to be shown; else answers have no more than these.
    """

    def __init__(
        self, case: Case, device: torch.device, prompt: int, *, new: int, tiny: bool, sampled: int | None = None
    ):
        self.case, self.device, self.prompt = case, device, prompt
        self.sampled = new if sampled is None else sampled
        self.new = new if case.cap_gb is not None else self.sampled
        spec = spec_of(case.size, tiny=tiny)
        self.model = random_model(
            spec, format=case.format, dense_cache=case.copies, device=self.device, dtype=torch.bfloat16, full=case.kind == "full"
        )  # fmt: skip
        self.optimizer = make_optimizer(self.model.trainable_parameters(), self.config(MICRO_BATCH).optim)
        self.prompts = questions(spec, case.prompts, prompt)
        # No token ends an answer.
        tokenizer: Any = StubTokenizer((spec.vocab_size + 1,))
        self.engine = Engine(self.model, tokenizer, max_num_seqs=8 * case.prompts, device=self.device, lends=True)
        self.stats: dict[str, float] = {}

    def config(self, budget: int) -> Any:
        # Micro-batches that are compared with others have as many tokens; whole steps share what they can.
        more = ["train.share_prompts=false"] if self.case.kind in ("passes", "full", "offload") else []
        more += [f"quant.dense_cache={'on' if self.case.copies else 'off'}"]
        more += ["train.activation_offloading=true"] if self.case.offload else []
        more += ["train.mode=full", f"optim.name={self.case.optimizer}"] if self.case.kind == "full" else []
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

    def learning(self, packs: Sequence[TrainBatch]) -> dict[str, Any]:
        """Seconds of log-probs and backward pass: of one micro-batch of each size that a step has, and of all of them by that.

        Each is timed after memory was given back, as in a step.
        """
        parts = []
        for answers, times in Counter(batch.num_sequences for batch in packs).items():
            found = [self.passes(answers) for _ in range(1 + REPEATS)][1:]
            parts.append({"answers": answers, "times": times, "seconds": statistics.median(found), "all": found})
        return {"seconds": sum(part["times"] * part["seconds"] for part in parts), "parts": parts}

    def passes(self, answers: int) -> float:
        """Seconds of log-probs and backward pass of so many answers."""
        memory.return_unused(self.device)
        timer = StageTimer(self.device)
        learned(self.config(MICRO_BATCH), self.model, self.optimizer, self.answers(answers), timer)
        return timer.total["logprobs"] + timer.total["backward"]

    def part_of_a_rollout(self) -> dict[str, Any]:
        """Seconds of short rollouts, and ``whole``: what a rollout should take by them.

        The first has its memory again, as the rollout of a step has, and counts once with what a call costs beside its decode steps. The other
        steps are taken to cost what they do in the middle of the rest of the answers: a step's time grows with the tokens before it,
        evenly.
        """
        limit = max(1, self.sampled // PART, min(LEAST_OF_A_PART, self.sampled // 4))
        self.generate(limit)
        self.give_back()
        first = self.generate(limit)
        middle = questions(self.model.spec, len(self.prompts), max(1, self.prompt + self.sampled // 2 - limit))
        again, twice = ([self.generate(count, middle) for _ in range(1 + REPEATS)][1:] for count in (limit, 2 * limit))
        self.give_back()
        more = max(0.0, statistics.median(twice) - statistics.median(again))
        whole = first + (self.sampled / limit - 1) * more
        return {"tokens": limit, "first": first, "again": again, "twice": twice, "whole": whole}

    def switching(self) -> dict[str, float]:
        """Seconds of changing over: of giving the memory of keys and values back for training, and of what a short rollout after an update
        takes beyond one after a rollout. Medians."""
        few, kept, back, again = min(SWITCH_TOKENS, self.sampled), [], [], []
        self.generate(few)
        for _ in range(REPEATS):
            kept.append(self.generate(few))
            back.append(self.give_back())
            self.passes(1)
            again.append(self.generate(few))
        before, given, after = (statistics.median(times) for times in (kept, back, again))
        return {"to_training": given, "to_rollout": after - before, "short_rollout": before}

    def give_back(self) -> float:
        """Seconds that giving back takes."""
        began = time.perf_counter()
        self.engine.release()
        memory.return_unused(self.device)
        synchronize(self.device)
        return time.perf_counter() - began

    def sample(self, limit: int, prompts: Sequence[Prompt] | None = None) -> list[Completion]:
        prompts = self.prompts if prompts is None else prompts
        sampling = SamplingSpec(temperature=1.0, max_new_tokens=self.new, seed=0, rollout=0)
        if prompts is not self.prompts:
            sampling = replace(sampling, max_new_tokens=limit)
        limits = [limit] * (8 * len(prompts))
        completions, self.stats = self.engine.generate(prompts, sampling, group_size=8, limits=limits)
        return list(completions)

    def generate(self, limit: int, prompts: Sequence[Prompt] | None = None) -> float:
        """Seconds of a rollout of so many tokens an answer."""
        synchronize(self.device)
        began = time.perf_counter()
        self.sample(limit, prompts)
        synchronize(self.device)
        return time.perf_counter() - began

    def warm_up(self) -> None:
        """Compile what there is to compile; the first update makes the moments."""
        self.sample(2)
        self.engine.release()
        clear(self.device)
        answers = random_answers(self.model.spec, self.prompts[:1], [min(64, self.new)] * 8)
        learned(self.config(MICRO_BATCH), self.model, self.optimizer, answers, StageTimer(self.device))

    def step(self) -> Step:
        """Rollout and update."""
        timer = StageTimer(self.device)
        with timer.stage("rollout"):
            answers = self.sample(self.sampled)
        between = self.give_back()
        if self.sampled < self.new:
            answers = self.answers(len(answers))
        learned(self.config(MICRO_BATCH), self.model, self.optimizer, answers, timer)
        return Step(timer=timer, between=between, stats=self.stats)
