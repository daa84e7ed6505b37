"""The training step on a GPU: log-prob pass, backward pass, update; memory against its prediction; whole GRPO steps, also under a cap.

    python benchmarks/step.py [--out results/step_h200.json] [--only passes,peers,full,offload,whole,capped] [--add FILE ...]
                              [--whole-steps 5] [--capped-steps 3] [--seconds 1200] [--tiny]
    python benchmarks/step.py --only '' --add FILE ... --out results/step_h200.json

Models have Qwen2.5 shapes and random weights (speed does not depend on the values), LoRA rank 32 on all seven projections with
trained norms. ``passes``: an update from eight answers of 2048 tokens, of which 1920 are in the loss, in micro-batches of 4k and of
8k tokens (no prompt shared), of a 0.5B also with copies of the weights kept, as a run of one does by itself; times are of one micro-batch of 8192, or of as many tokens as the row names. ``peers``: the same micro-batch by peft and transformers, on BF16 and on
bitsandbytes' NF4. ``step`` is an update from all answers. ``full``: the passes where every weight learns, with AdamW's moments in float32 and
in 8 bits, and its memory beside the plan. ``offload``: the passes of a 7B with the inputs of its layers kept in the host's memory, and on the device. ``whole``: rollout (all answers as long as they may be), log-probs, backward and update, ``--whole-steps`` times; and the
speed-up of NVFP4 over BF16, by the clock and from parts, of medians. ``capped``: such steps (``--capped-steps``) in one process under a cap of memory, with BF16 under
the same cap: torch's allocator and the engine's lent memory together have no more (`qerl.kernels.cuda.bounded`, as with `train.memory_budget`). ``--most-new 7B=512`` shortens the answers of whole steps; under a cap there is still room for all of their tokens and
the update is made from answers as long as they may be, only fewer tokens are sampled.

Every row names its command, commit, torch and device. ``--add`` keeps the rows (and notes) of earlier outputs, the last of one name, and a row that is measured
now takes the place of one that was added; the second form only puts outputs together, and needs no GPU. A speed-up is of two rows of one commit.

Times are by the host's clock between synchronizations; ``repeats`` says of how many updates or steps a figure is the median; those before, which compile and capture,
are in none. Of all of them are the times in ``all``, and memory is that of the largest. Where the time is too short for all that were asked for, fewer are made (``cut`` of a row says how many). Operations are counted as 4 P T + 4 P_head T_answer + attention (a frozen
base has no weight gradient), 6 P T with full recomputation (of which a layer's last product is not made again), 2 P T for a log-prob pass. A case that finds too little time left is
skipped and says so; one that runs out of memory is "not runnable". ``--tiny`` runs all of it on the CPU with toy shapes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.options import count, names, tokens_by_size
from benchmarks.peers import peft_passes
from benchmarks.phases import MICRO_BATCH, Case, Run
from benchmarks.stored import made_by, write_result
from benchmarks.timing import require_gpu
from benchmarks.training import (
    STAGES,
    clear,
    compare,
    learned,
    operations,
    random_answers,
    rated,
    spec_of,
)
from qerl.errors import MissingDependencyError
from qerl.kernels.cuda import bounded
from qerl.memory.bound import is_out_of_memory
from qerl.report.speedup import speed_up
from qerl.train.timing import StageTimer
from qerl.units import GB

PROMPT, ANSWER = 128, 1920
T = TypeVar("T")

CASES = (
    Case(kind="passes", size="7B", needs=0),
    Case(kind="passes", size="7B", format="bf16"),
    Case(kind="passes", size="0.5B", needs=5),
    Case(kind="passes", size="0.5B", copies=True, needs=5),
    Case(kind="passes", size="0.5B", format="bf16", needs=5),
    Case(kind="passes", size="0.5B", checkpointing="none", shapes=(65536,), prompts=4, needs=5),
    Case(kind="passes", size="0.5B", copies=True, checkpointing="none", shapes=(65536,), prompts=4, needs=5),
    Case(kind="passes", size="0.5B", format="bf16", checkpointing="none", shapes=(65536,), prompts=4, needs=5),
    Case(kind="passes", size="7B", checkpointing="none", shapes=(8192,)),
    Case(kind="passes", size="7B", checkpointing="selective", shapes=(8192,)),
    Case(kind="passes", size="14B"),
    Case(kind="passes", size="32B", shapes=(8192,), needs=16),
    Case(kind="passes", size="32B", format="bf16", shapes=(8192,), needs=20),
    Case(kind="passes", size="0.5B", format="nf4"),
    Case(kind="passes", size="7B", format="nf4", needs=12),
    Case(kind="passes", size="32B", format="nf4", shapes=(8192,), needs=40),
    Case(kind="full", size="0.5B", format="bf16", shapes=(8192,), needs=6),
    Case(kind="full", size="0.5B", format="bf16", optimizer="adamw_8bit", shapes=(8192,), needs=6),
    Case(kind="full", size="1.5B", format="bf16", shapes=(8192,), needs=8),
    Case(kind="full", size="1.5B", format="bf16", optimizer="adamw_8bit", shapes=(8192,), needs=8),
    Case(kind="offload", size="7B", updates=5, shapes=(8192,)),
    Case(kind="offload", size="7B", offload=True, updates=5, shapes=(8192,)),
    Case(kind="whole", size="7B", prompts=8, new=1024, needs=35),
    Case(kind="whole", size="7B", format="bf16", prompts=8, new=1024, needs=35),
    Case(kind="whole", size="32B", new=512, needs=25),
    Case(kind="whole", size="32B", format="bf16", new=512, needs=35),
    Case(kind="capped", size="32B", cap_gb=48.0, needs=30),
    Case(kind="capped", size="14B", cap_gb=24.0, needs=18),
    Case(kind="capped", size="7B", cap_gb=14.0, needs=12),
    Case(kind="capped", size="32B", format="bf16", cap_gb=48.0, needs=3),
    Case(kind="capped", size="14B", format="bf16", cap_gb=24.0, needs=3),
    Case(kind="capped", size="7B", format="bf16", cap_gb=14.0, needs=3),
    Case(kind="peers", size="7B", format="nf4", needs=12),
    Case(kind="peers", size="0.5B", format="nf4", needs=5),
    Case(kind="peers", size="32B", format="bf16", needs=35),
    Case(kind="peers", size="32B", format="nf4", needs=45),
    Case(kind="peers", size="7B", format="bf16", needs=10),
    Case(kind="peers", size="0.5B", format="bf16", needs=5),
)

KEYS = attrgetter("kind"), attrgetter("size"), attrgetter("format")
"""What cases are chosen by."""


class Bench:
    """Runs cases and keeps their rows.

    Args:
        device: where.
        seconds: time for everything.
        tiny: toy shapes.
        most_new: by size, most tokens that are sampled of an answer of a whole step.

    Attributes:
        reserved: seconds that cases after this one need at the least.
    """

    def __init__(self, device: torch.device, seconds: float, *, tiny: bool, most_new: Mapping[str, int]):
        self.device, self.tiny, self.most_new = device, tiny, most_new
        self.end = time.perf_counter() + seconds
        self.rows: dict[str, Any] = {}
        self.notes: list[str] = []
        self.reserved = 0.0
        self.prompt, self.answer = (4, 12) if tiny else (PROMPT, ANSWER)

    def run(self, case: Case) -> None:
        left = self.end - time.perf_counter()
        if left < case.needs:
            self.keep(case.name, {"skipped": f"{left:.0f} s left, {case.needs:g} needed"})
            return
        began = time.perf_counter()
        clear(self.device)
        try:
            with bounded(None if case.cap_gb is None else int(case.cap_gb * GB), self.device):
                row = {"whole": self._whole, "capped": self._whole, "peers": self._peers}.get(case.kind, self._passes)(
                    case
                )
        except (ImportError, MissingDependencyError) as error:
            row = {"skipped": str(error)}
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            row = {"not runnable": str(error).split(". ")[0]}
        finally:
            clear(self.device)
        self.keep(case.name, row | {"seconds_in_all": time.perf_counter() - began})

    def keep(self, name: str, row: dict[str, Any]) -> None:
        """A new row takes the place of an older one, unless it has nothing to say."""
        print(f"{name}: {json.dumps(row)}", flush=True)
        if "skipped" not in row or "skipped" in self.rows.get(name, row):
            self.rows[name] = made_by() | row

    def add(self, path: Path) -> None:
        """The rows of an earlier output, each with what it was made by."""
        content = json.loads(path.read_text())
        self.notes += [note for note in [content.get("note")] if note and note not in self.notes]
        environment = content.get("environment", {})
        gpus, facts = environment.get("gpus"), content.get("facts", {})
        known = {
            "command": content.get("command"),
            "commit": environment.get("commit", facts.get("commit")),
            "torch": environment.get("versions", {}).get("torch", facts.get("torch")),
            "device": gpus[0]["name"] if gpus else facts.get("device"),
        }
        for name, row in content["rows"].items():
            if "skipped" not in row or "skipped" in self.rows.get(name, row):
                self.rows[name] = known | row

    def _passes(self, case: Case) -> dict[str, Any]:
        spec = spec_of(case.size, tiny=self.tiny)
        run = Run(case, self.device, self.prompt, new=self.answer, tiny=self.tiny)
        run.warm_up()
        answers = random_answers(spec, run.prompts, [self.answer] * (8 * case.prompts))
        row: dict[str, Any] = {"memory": {}}

        def update() -> StageTimer:
            return learned(config, run.model, run.optimizer, answers, StageTimer(self.device))

        for budget in case.shapes:
            config = run.config(budget)
            timed = self._repeated(case.updates if budget == case.shapes[-1] else 1, update, row)
            row["memory"][budget] = compare(config, spec, timed)
        each = case.shapes[-1] // (PROMPT + ANSWER)
        counted = operations(spec, case.checkpointing, each, self.prompt, self.answer, full=case.kind == "full")
        for stage in STAGES:
            share = 1 if stage == "optimizer" else each / len(answers)
            row[stage] = rated([timer.total[stage] * share for timer in timed], counted.get(stage))
        # Of all answers: as many passes as they fill, and the update.
        steps = rated([sum(timer.total[stage] for stage in STAGES) for timer in timed], None)
        return row | {"step": steps | {"answers": len(answers)}}

    def _repeated(self, count: int, once: Callable[[], T], row: dict[str, Any]) -> list[T]:
        """What so many calls give, or as many as there is time for: one at least. A row with fewer says so."""
        found, longest = [], 0.0
        while len(found) < count:
            began = time.perf_counter()
            if found and began + longest > self.end - self.reserved:
                row["cut"] = f"{len(found)} of {count} were made: there was no time for more"
                break
            found.append(once())
            longest = max(longest, time.perf_counter() - began)
        return found

    def _peers(self, case: Case) -> dict[str, Any]:
        spec, sequences = spec_of(case.size, tiny=self.tiny), MICRO_BATCH // (PROMPT + ANSWER)
        shape = {"sequences": sequences, "prompt": self.prompt, "answer": self.answer}
        return peft_passes(spec, self.device, nf4=case.format == "nf4", **shape)

    def _whole(self, case: Case) -> dict[str, Any]:
        new = 2 * self.answer if self.tiny else case.new
        short = new if self.tiny else self.most_new.get(case.size, case.new)
        run = Run(case, self.device, self.prompt, new=new, sampled=short, tiny=self.tiny)
        run.warm_up()
        packs = run.packs(MICRO_BATCH)
        row: dict[str, Any] = {}
        if case.cap_gb is None:
            row["part_of_a_rollout"] = run.part_of_a_rollout()
            row["learning"] = run.learning(packs)
        steps = self._repeated(case.updates, run.step, row)
        timers = [step.timer for step in steps]
        every = {name: [timer.total[name] for timer in timers] for name in ("rollout", *STAGES)}
        every["to_training"] = [step.between for step in steps]
        every["step"] = [sum(parts) for parts in zip(*every.values(), strict=True)]
        row["repeats"] = len(steps)
        row["seconds"] = {name: statistics.median(seconds) for name, seconds in every.items()}
        row["all"] = every
        row["captures"] = {key: [step.stats[f"graph_{key}"] for step in steps] for key in ("captures", "seconds")}
        if case.cap_gb is None:
            row["switch"] = run.switching()
        row["tokens"] = {
            "sampled": run.sampled,
            "room": run.new,
            "micro_batches": [batch.num_tokens for batch in packs],
        }
        # The plan is for passes that are full; answers of one length leave some room in each.
        largest = max(batch.num_tokens for batch in packs)
        row["memory"] = {largest: compare(run.config(largest), run.model.spec, timers, ("rollout", *STAGES))}
        return row

    def speed_ups(self) -> dict[str, Any]:
        """NVFP4 over BF16: by the clock, and from generation's share f of the BF16 step, parts of a rollout (s) and micro-batches (eta).
        Beside s and eta of the parts stand those of the whole steps, and what eta of the stages gives with s of the parts: errors of the
        two may cancel."""
        found: dict[str, Any] = {}
        for name, ours in self.rows.items():
            theirs = self.rows.get(name.replace("nvfp4", "bf16"), {})
            if " GB" in name or "nvfp4" not in name or not ("learning" in ours and "learning" in theirs):
                continue
            if ours["commit"] != theirs["commit"]:
                continue
            step = theirs["seconds"]["step"]
            f = theirs["seconds"]["rollout"] / step
            s = theirs["part_of_a_rollout"]["whole"] / ours["part_of_a_rollout"]["whole"]
            fast, slow = (sum(row["seconds"][stage] for stage in ("logprobs", "backward")) for row in (ours, theirs))
            eta = (ours["learning"]["seconds"] / theirs["learning"]["seconds"] - 1) * slow / step
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    kinds, sizes, formats = (tuple(dict.fromkeys(key(case) for case in CASES)) for key in KEYS)
    parser.add_argument("--only", type=names(kinds, none=True), default=list(kinds), help="kinds of cases, with commas")
    parser.add_argument("--sizes", type=names(sizes), default=list(sizes), help="sizes, with commas")
    parser.add_argument(
        "--formats", type=names(formats), default=list(formats), help="formats of the base, with commas"
    )
    parser.add_argument(
        "--most-new",
        type=tokens_by_size(sizes),
        nargs="*",
        default=[],
        metavar="SIZE=N",
        help="most tokens sampled of an answer",
    )
    parser.add_argument("--whole-steps", type=count, default=5, metavar="N", help="timed steps of a case of whole ones")
    parser.add_argument("--capped-steps", type=count, default=3, metavar="N", help="the same of a case under a cap")
    parser.add_argument(
        "--add", type=Path, nargs="*", default=[], help="earlier outputs whose rows are kept beside the new ones"
    )
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    require_gpu(tiny=arguments.tiny or not arguments.only)
    # With its number, as tensors name it: what is cached by device is then found again.
    device = torch.device("cpu" if arguments.tiny or not arguments.only else "cuda:0")
    most_new = dict(arguments.most_new)
    bench = Bench(device, arguments.seconds, tiny=arguments.tiny, most_new=most_new)
    for path in arguments.add:
        bench.add(path)
    known = {"rank": 32, "tokens_of_an_answer": PROMPT + ANSWER, "answer_tokens_in_the_loss": ANSWER, "gb": GB}

    def write() -> None:
        if arguments.out is not None:
            note = {"note": " ".join(bench.notes)} if bench.notes else {}
            more = {"speed_up_of_nvfp4_over_bf16": bench.speed_ups()}
            write_result(arguments.out, **note, facts=known, rows=bench.rows, **more)

    if arguments.add:
        write()
    cases = [
        case
        for case in CASES
        if case.kind in arguments.only and case.size in arguments.sizes and case.format in arguments.formats
    ]
    for index, case in enumerate(cases):
        if case.kind == "whole":
            case = replace(case, new=min(case.new, most_new.get(case.size, case.new)), updates=arguments.whole_steps)
        if case.kind == "capped":
            case = replace(case, updates=arguments.capped_steps)
        bench.reserved = sum(other.needs for other in cases[index + 1 :])
        bench.run(case)
        write()
    print(json.dumps(bench.speed_ups(), indent=1), flush=True)


if __name__ == "__main__":
    main()
