"""What a prefill pass of few tokens costs: by the clock, the host and the device, and which functions of the host take it.

    python benchmarks/prefill.py [--sizes 0.5B,7B] [--shapes 5x80,1x80,37x80] [--dense-cache auto] [--out FILE] [--seconds 45] [--tiny]
    python benchmarks/prefill.py --model FOLDER [--out FILE] [key=value …]

Shape 5x80: five questions of about 80 tokens (60 to 140 % of it, so that lengths differ), seven answers each, as rows that end are filled again with. Random weights in the
shapes of Qwen2.5, NVFP4 with LoRA of rank 32 (copies of weights where a run keeps them), or a real model as a run has it. A pass is everything that the
engine does to bring such rows in, from page lists to the rows' records. Medians, second and eighth deciles of 20 (of 10 behind others), after two passes that
compile:

* ``clock_ms``: from an idle device to an idle device; ``host_ms`` of it: until the host has told everything;
* ``behind``: the same where the device is busy for some 60 ms more when the pass begins, as it is with decode steps in a refill. ``host_ms`` is then the
  time of a host that waits for nothing; where it comes near ``busy_ms``, the host waits. ``device_ms``: what the pass takes of the device's time.

``device`` is of one more pass under torch's profiler: time of kernels, their number, copies, and calls of CUDA by name; null where the profiler gives
nothing. ``host``: the 25 functions with the most time of their own, and in all, by cProfile (which makes calls of Python cost more) over ten passes:
microseconds and calls a pass. On the CPU (``--tiny``: toy shapes) there is no device's part.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import math
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.lengths import NO_EOS
from benchmarks.options import names
from benchmarks.rollout import keeps_copies, tiny
from benchmarks.stored import ROOT, write_result
from benchmarks.synthetic import SHAPES, StubTokenizer, model_spec, random_model
from benchmarks.timing import deciles, require_gpu
from benchmarks.training import synchronize, tokens
from qerl import memory
from qerl.config.load import load_config
from qerl.model.decoder import Decoder
from qerl.records import Prompt, SamplingSpec
from qerl.rollout.engine import Engine
from qerl.rollout.pages import PageBook
from qerl.rollout.prefill import Prefill
from qerl.rollout.scheduler import Scheduler, Start
from qerl.rollout.sequence import Sequence
from qerl.rollout.transcript import Transcript
from qerl.rollout.workspace import Workspace

ANSWERS, REPEATS, BEHIND, PROFILED, SHOWN = 7, 20, 10, 10, 25
LENGTHS = (0.6, 1.4, 0.8, 1.2, 1.0)
"""Of questions one after another, in parts of the length that is named."""
BUSY_CYCLES = 100_000_000
"""Of the device before a pass that is timed behind something: some 60 ms."""
SHAPES_OF_A_RUN = "5x80,1x80,37x80,5x16,1x16,37x16,5x256,1x256,37x256"


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """5x80,1x16: questions and tokens."""
    found = []
    for part in text.split(","):
        questions, _, length = part.partition("x")
        if not (questions.isdecimal() and length.isdecimal() and int(questions) and int(length)):
            raise argparse.ArgumentTypeError(f"{part!r} is no shape; expected questions x tokens, 5x80")
        found.append((int(questions), int(length)))
    return found


class Refill:
    """Rows of a workspace that are filled, again and again.

    Args:
        model: read by the passes.
        questions: different prompts.
        length: tokens of one, about.
    """

    def __init__(self, model: Decoder, questions: int, length: int):
        generator = torch.Generator().manual_seed(0)
        sizes = [max(1, round(length * LENGTHS[index % len(LENGTHS)])) for index in range(questions)]
        # The last token of a prompt is fed by the first decode step.
        self._prompts = [
            Prompt(id=str(i), question="", answer="", text="", token_ids=tokens(generator, model.spec, size + 1))
            for i, size in enumerate(sizes)
        ]
        tokenizer: Any = StubTokenizer(NO_EOS)
        rows = questions * ANSWERS
        engine = Engine(model, tokenizer, max_num_seqs=rows, paged=True, graphs=False)
        self._limit, self.rows, self.tokens = engine.prefill_tokens, rows, sum(sizes)
        self.workspace: Workspace = engine._workspace_for(rows, max(sizes) + 1, 64)
        self.workspace.begin(SamplingSpec(max_new_tokens=64), None, True)

    def ready(self) -> tuple[Prefill, list[list[Start]]]:
        """A call's prefill with its passes, nothing of which has run."""
        layout, prompts = self.workspace.layout, self._prompts
        sequences = [
            Sequence(
                index=index,
                prompt_index=index // ANSWERS,
                prompt_length=len(prompts[index // ANSWERS].token_ids),
                sample_key=index,
            )
            for index in range(self.rows)
        ]
        book = PageBook(pages=layout.pages, page_tokens=layout.page_tokens, rows=layout.rows)
        scheduler = Scheduler(sequences, rows=self.rows, prefill_tokens=self._limit, book=book)
        prefill = Prefill(self.workspace, prompts, Transcript(self.rows), None, True, book, self._limit)
        return prefill, scheduler.admit()


@torch.no_grad()
def run(ready: tuple[Prefill, list[list[Start]]]) -> None:
    """Everything that brings the rows in."""
    prefill, passes = ready
    for starts in passes:
        for _ in prefill.run(starts):
            pass


def timed(refill: Refill, device: torch.device) -> dict[str, Any]:
    """Milliseconds from an idle device to an idle device."""
    whole, host = [], []
    for _ in range(REPEATS + 2):
        ready = refill.ready()
        synchronize(device)
        began = time.perf_counter()
        run(ready)
        told = time.perf_counter()
        synchronize(device)
        whole.append(1e3 * (time.perf_counter() - began))
        host.append(1e3 * (told - began))
    return {"clock_ms": deciles(whole[2:]), "host_ms": deciles(host[2:])}


def behind(refill: Refill, device: torch.device) -> dict[str, Any] | None:
    """Milliseconds where the device is busy when the pass begins; None without one."""
    if device.type != "cuda":
        return None
    busy, host, own = [], [], []
    for _ in range(BEHIND + 2):
        ready = refill.ready()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        synchronize(device)
        marks[0].record()
        torch.cuda._sleep(BUSY_CYCLES)
        marks[1].record()
        began = time.perf_counter()
        run(ready)
        host.append(1e3 * (time.perf_counter() - began))
        marks[2].record()
        synchronize(device)
        busy.append(marks[0].elapsed_time(marks[1]))
        own.append(marks[1].elapsed_time(marks[2]))
    return {"busy_ms": deciles(busy[2:]), "host_ms": deciles(host[2:]), "device_ms": deciles(own[2:])}


def of_device(refill: Refill, device: torch.device) -> dict[str, Any] | None:
    """What the device did in one pass, by torch's profiler."""
    if device.type != "cuda":
        return None
    ready = refill.ready()
    synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        run(ready)
        synchronize(device)
    return summed(recorded.events())


def summed(events: Any) -> dict[str, Any] | None:
    """Kernels, copies and calls of CUDA among what the profiler recorded; None where there are none."""
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    copies: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            if event.name.startswith(("Memcpy", "Memset")):
                copies[event.name] += 1
            else:
                times[event.name] += event.device_time
                counts[event.name] += 1
        elif event.name.startswith("cu"):
            calls[event.name] += 1
    if not counts:
        return None
    return {
        "kernel_ms": sum(times.values()) / 1e3,
        "kernels": counts.total(),
        "copies": dict(copies),
        "calls": dict(calls),
        "waits": sum(number for name, number in calls.items() if "Synchronize" in name) if calls else None,
        "most_us": {name[:80]: [round(us, 1), counts[name]] for name, us in times.most_common(SHOWN)},
    }


def of_host(refill: Refill) -> dict[str, Any]:
    """Functions of Python with the most time, of their own and in all: microseconds and calls a pass."""
    each = [refill.ready() for _ in range(PROFILED)]
    profile = cProfile.Profile()
    profile.enable()
    for ready in each:
        run(ready)
    profile.disable()
    stats: Any = pstats.Stats(profile)
    found = [
        (place_of(*place), calls / PROFILED, 1e6 * own / PROFILED, 1e6 * whole / PROFILED)
        for place, (_, calls, own, whole, _) in stats.stats.items()
    ]

    def most(column: int) -> list[list[Any]]:
        ordered = sorted(found, key=lambda row: -float(row[column]))[:SHOWN]
        return [[row[0], round(float(row[column]), 1), round(row[1], 1)] for row in ordered]

    return {
        "us": round(1e6 * stats.total_tt / PROFILED, 1),
        "calls": round(stats.total_calls / PROFILED),
        "own_us_and_calls": most(2),
        "whole_us_and_calls": most(3),
    }


def place_of(file: str, line: int, function: str) -> str:
    """A function by its file, which is named without the folders of this machine."""
    path = Path(file)
    if not path.is_absolute():
        return f"{function}" if file == "~" else f"{file}:{function}"
    if path.is_relative_to(ROOT):
        return f"{path.relative_to(ROOT)}:{line}:{function}"
    parts = path.parts
    after = parts.index("site-packages") + 1 if "site-packages" in parts else len(parts) - 1
    return f"{'/'.join(parts[after:])}:{line}:{function}"


def measure(model: Decoder, questions: int, length: int) -> dict[str, Any]:
    """One shape."""
    device = model.device
    refill = Refill(model, questions, length)
    _, passes = refill.ready()
    return {
        "questions": questions,
        "rows": refill.rows,
        "tokens": refill.tokens,
        "passes": len(passes),
        **timed(refill, device),
        "behind": behind(refill, device),
        "device": of_device(refill, device),
        "host": of_host(refill),
    }


def random_of(size: str, dense_cache: str, device: torch.device, *, toy: bool) -> Decoder:
    """Random weights in the shapes of a size."""
    spec = tiny(model_spec(size)) if toy else model_spec(size)
    kept = keeps_copies(spec, "nvfp4", dense_cache, device)
    return random_model(spec, dense_cache=kept, device=device)


def real_of(folder: str, settings: list[str]) -> Decoder:
    """A model as a run has it."""
    from qerl.train.session import open_session

    return open_session(load_config(None, [f"model.path={folder}", *settings])).engine.model


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=names(SHAPES), default="0.5B,7B", help="of random weights, with commas")
    parser.add_argument("--model", help="a real model's folder, instead of random weights")
    parser.add_argument("--shapes", type=parse_shapes, help=f"questions x tokens, with commas ({SHAPES_OF_A_RUN})")
    parser.add_argument("--dense-cache", choices=("auto", "on", "off"), default="auto", help="quant.dense_cache")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no shape is begun after so many")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of --model")
    arguments = parser.parse_args()
    if arguments.settings and not arguments.model:
        parser.error(f"{arguments.settings[0]} is a setting of --model, which is not given")
    require_gpu(tiny=arguments.tiny or bool(arguments.model))
    device = torch.device("cpu" if arguments.tiny else "cuda")
    shapes = arguments.shapes or parse_shapes("5x16,1x16" if arguments.tiny else SHAPES_OF_A_RUN)
    sources: dict[str, Callable[[], Decoder]] = {
        size: lambda size=size: random_of(size, arguments.dense_cache, device, toy=arguments.tiny)
        for size in arguments.sizes
    }
    if arguments.model:
        sources = {Path(arguments.model).name: lambda: real_of(arguments.model, arguments.settings)}
    rows: dict[str, Any] = {}
    for index, (source, make) in enumerate(sources.items()):
        # Each model has its share of the time, and what the ones before it left.
        until = arguments.seconds * (index + 1) / len(sources)
        model = make()
        copies = memory.measure_resident(model)["dense_cache"] > 0
        for questions, length in shapes:
            name = f"{source} {questions}x{length}"
            if time.perf_counter() - began > until:
                rows[name] = {"skipped": f"not reached in {until:g} s"}
            else:
                rows[name] = {"copies": copies, **measure(model, questions, length)}
            shown = {key: value for key, value in rows[name].items() if key not in ("host", "device")}
            print(f"[{time.perf_counter() - began:5.1f} s] {name}: {json.dumps(shown)}", flush=True)
            if arguments.out is not None:
                write_result(arguments.out, repeats=REPEATS, answers=ANSWERS, rows=rows)
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
