"""Speed of generation, with random weights in the shapes of Qwen2.5, or with a real model on GSM8K.

    python benchmarks/rollout.py [--size 7B] [--formats nvfp4,bf16] [--noise off,response] [--sequences 1,8,32,64,128,256]
                                 [--realistic] [--rows 256] [--kv-gb auto,3]
                                 [--out results/rollout_7b.json]
    python benchmarks/rollout.py --model FOLDER [--data gsm8k] [--out results/rollout_05b.json] [key=value …]

A line is printed for every cell of the table; ``--out`` keeps them in a file, written after each.

The protocol of the anchors: prompts of 16 tokens, 192 new tokens, no stop, sampled at temperature 1 with log-probs, adapters of
rank 32 on all seven projections with B not zero. A step is timed as the engine runs it, looks of the host included: the time of the
decode rounds of a call over their steps, median of several calls (``ms_per_step``), and over all calls the median, second and eighth decile of single
rounds, which are the steps between two looks (``rounds``: 23 a call of 192 tokens; ``rounds_ms`` has each of them, in their order). A captured step alone is timed after the calls, 20 times (``captured_us_deciles``); unless ``--bare``, kernel times come from
a profile of one whose launches do not overlap (`apart`), since kernels that overlap count their waiting. The floor of a step is the sum over linear layers, head, adapters and cache of the larger of bytes / 4.28 TB/s and
operations / 790 TFLOP/s. Dequantized copies of weights are kept where ``qerl train`` and ``qerl rollout`` keep them on this device, unless ``--dense-cache`` says otherwise; ``copies`` of a cell
tells whether there are any, and the floor is that of packed weights all the same. ``--realistic``: 64 prompts x 8 answers, 256 tokens in, lengths from a long-tailed distribution up to 2048, on 512 rows;
on fewer (``--rows``) they are filled again as answers end, with less room for keys and values (``--kv-gb``) answers are put back and computed again, and prompts longer than ``--chunk`` are computed in parts.
``--tiny`` runs all of it on the CPU with toy shapes, and without profile.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.captured import profile
from benchmarks.lengths import NO_EOS, make_prompts, real, realistic
from benchmarks.options import BASES, HEADS, SCOPES, count, count_from_0, counts, given, names, refuse_unused, rooms
from benchmarks.stored import write_result
from benchmarks.synthetic import SHAPES, StubTokenizer, model_spec, random_model
from benchmarks.timing import deciles, require_gpu
from qerl import memory
from qerl.config.load import load_config
from qerl.model.aqn import NoiseState
from qerl.model.decoder import Decoder
from qerl.model.spec import ModelSpec
from qerl.records import SamplingSpec
from qerl.rollout.engine import Engine
from qerl.units import GB

BANDWIDTH, COMPUTE = 4.28e12, 790e12
"""Of one H200: bytes a second of a copy, operations a second of a bfloat16 product, both measured."""

ANCHORS = {
    "source": "an earlier run on the same kind of machine: vLLM 0.26.0, ms a step at 1, 8, 32, 64, 128, 256 sequences",
    "7B bf16 + LoRA": [6.61, 6.41, 6.53, 6.98, 9.39, 12.43],
    "7B nvfp4 + LoRA": [5.16, 4.94, 5.47, 7.21, 12.33, 17.87],
    "7B nvfp4": [3.48, 3.55, 4.08, 5.69, 9.07, 14.06],
    "32B nvfp4 + LoRA": [15.0, 14.3, 17.3, 24.3, 41.6, 68.8],
}


def tiny(spec: ModelSpec) -> ModelSpec:
    """The same architecture in toy shapes."""
    return dataclasses.replace(
        spec,
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=256,
    )


def floor_ms(model: Decoder, sequences: int, context: float) -> float:
    """Least time of a step, ms."""
    spec = model.spec
    seconds = 0.0
    for linear in model.grouped_linears():
        rows, columns = linear.weight.shape
        seconds += max(linear.weight.nbytes() / BANDWIDTH, 2 * rows * columns * sequences / COMPUTE)
        if linear.lora is not None:
            numbers = sum(a.numel() + b.numel() for a, b in linear.lora.matrices().values())
            seconds += max(2 * numbers / BANDWIDTH, 2 * numbers * sequences / COMPUTE)
    head = spec.vocab_size * spec.hidden_size
    head_bytes = 2 * head if model.packed_head is None else model.packed_head.nbytes()
    seconds += max(head_bytes / BANDWIDTH, 2 * head * sequences / COMPUTE)
    seconds += 4 * spec.num_layers * spec.kv_size * context * sequences / BANDWIDTH
    return 1e3 * seconds


class Looks:
    """Takes down when the host looked, and how many tokens there were: what ``generate`` reports to."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def __call__(self, done: int, of: int, tokens: int) -> None:
        self._seen.append((time.perf_counter(), tokens))

    def rounds(self, sequences: int) -> list[float]:
        """Milliseconds a step of each round between two looks in which all sequences advanced alike."""
        found = []
        for (before, fewer), (after, more) in itertools.pairwise(self._seen):
            steps, rest = divmod(more - fewer, sequences)
            if steps and not rest:
                found.append(1e3 * (after - before) / steps)
        return found


def spread(times: list[float]) -> dict[str, float] | None:
    """Median, second and eighth decile, ms, and of how many; None for fewer than two."""
    if len(times) < 2:
        return None
    return dict(zip(("ms", "ms_p20", "ms_p80"), deciles(times), strict=True)) | {"count": len(times)}


def steps(
    model: Decoder, noise: Any, sequences: int, *, calls: int, bare: bool, prompt: int, new: int, together: bool
) -> dict[str, Any]:
    """One cell of the table."""
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    tokenizer: Any = StubTokenizer(NO_EOS)
    paged = cuda or together
    engine = Engine(
        model, tokenizer, max_num_seqs=sequences, expected_tokens=prompt + new, paged=paged, read_together=together
    )
    group = math.gcd(sequences, 8)
    prompts = make_prompts(sequences // group, prompt, model.spec.vocab_size)
    times, whole, first, rounds = [], [], {}, []
    for call in range(calls + 1):
        sampling = SamplingSpec(max_new_tokens=new if call else 17, seed=call)
        looks = Looks()
        _, stats = engine.generate(prompts, sampling, group_size=group, noise=noise, on_progress=looks)
        if call:
            rounds += looks.rounds(sequences)
            times.append(1e3 * stats["decode_seconds"] / stats["decode_steps"])
            whole.append([stats["seconds"], stats["prefill_seconds"]])
        else:
            first = stats
    workspace = engine._workspace
    ms, floor = statistics.median(times), floor_ms(model, sequences, prompt + new / 2)
    result = {
        "sequences": sequences,
        "prompt_tokens": prompt,
        "new_tokens": new,
        "together": together,
        "ms_per_step": ms,
        "ms_min_max": [min(times), max(times)],
        "calls": calls,
        "rounds": spread(rounds),
        "rounds_ms": [float(f"{ms:.4g}") for ms in rounds],
        "tokens_per_second": 1e3 * sequences / ms,
        "seconds_whole_and_prefill": whole,
        "floor_ms": floor,
        "of_floor": floor / ms,
        "peak_gb": torch.cuda.max_memory_allocated() / GB if cuda else None,
        "first_call_graph_seconds": first["graph_seconds"],
        "first_call_seconds": first["seconds"],
        **(
            {}
            if workspace is None or (bare and together)
            else profile(workspace, sequences, prompt + new // 2, bare=bare)
        ),
    }
    engine.release()
    return result


def show(cell: dict[str, Any], started: float) -> None:
    """One line."""
    if "ms_per_step" not in cell:
        print(f"[{time.perf_counter() - started:5.1f} s] {cell}", flush=True)
        return
    print(
        f"[{time.perf_counter() - started:5.1f} s] {cell['size']} {cell['format']:6} head {cell['head']} {cell['noise']:8} "
        f"{cell['sequences']:4} sequences {cell['ms_per_step']:7.3f} ms {'together ' * cell['together']}{'copies kept ' * cell['copies']}({100 * cell['of_floor']:3.0f} % of the floor) "
        f"{cell['tokens_per_second']:8.0f} tokens/s  captured {cell.get('captured_us_deciles', '')} us  "
        f"{ {key: value for key, value in cell.get('apart', {}).items() if key != 'slowest_us'} }",
        flush=True,
    )


def keeps_copies(spec: ModelSpec, format: str, setting: str, device: torch.device) -> bool:
    """Whether copies of weights are kept by that setting of ``quant.dense_cache``, as a session decides it."""
    doubly = format == "nf4_dq"
    asked = [f"quant.format={'nf4' if doubly else format}", f"quant.double_quant={doubly}"]
    config = load_config(None, [*asked, f"quant.dense_cache={setting}"])
    budget = memory.budget_of(config, device)
    room = None if budget is None else budget.size
    return memory.uses_dense_cache(memory.settle_copies(config, spec, room, device_type=device.type), device.type)


def models_of(arguments: argparse.Namespace) -> Iterator[tuple[str, str, list[str]]]:
    """(format of the base, of the head, noise that is timed with them)."""
    for index, (base, head) in enumerate(arguments.formats):
        yield base, head, [scope for scope in arguments.noise if index == 0 or scope == "off"]


def parse_formats(text: str) -> list[tuple[str, str]]:
    """(format of the base, of the head) each, of nvfp4,bf16,nvfp4/nvfp4."""
    found = []
    for name in text.split(","):
        base, _, head = name.partition("/")
        head = head or "bf16"
        if base not in BASES or head not in HEADS:
            raise argparse.ArgumentTypeError(
                f"{name!r} is no format of a base, or of one and its head: nvfp4, nvfp4/fp8"
            )
        found.append((base, head))
    return found


def cells_of(arguments: argparse.Namespace, scope: str) -> Iterator[tuple[int, bool]]:
    """(sequences, whether rows of a prompt read its pages together)."""
    counts = arguments.sequences if scope == "off" else arguments.noise_at or arguments.sequences
    for sequences in counts:
        for together in arguments.together:
            yield sequences, together == "on"


ACTS_ON = {
    **dict.fromkeys(("size", "formats", "noise", "sequences", "rank", "calls", "seconds"), "table,realistic"),
    **dict.fromkeys(("prompt", "dense_cache"), "table,realistic"),
    **dict.fromkeys(("noise_at", "new", "together", "bare"), "table"),
    **dict.fromkeys(("rows", "kv_gb", "chunk"), "realistic"),
    **dict.fromkeys(("data", "prompts", "answer"), "model"),
}
"""Option -> cells that it acts on: those of ``--sequences`` (the table), ``--realistic`` and ``--model``."""


def refuse_what_would_be_ignored(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, named: Sequence[str]
) -> None:
    """End with a message where an option, of those that are given, has nothing to act on."""
    if arguments.model and arguments.realistic:
        parser.error("--realistic imposes lengths on random weights; answers of --model end by themselves")
    if arguments.settings and not arguments.model:
        parser.error(f"{arguments.settings[0]} is a setting of --model, which is not given")
    if "noise_at" in named and not arguments.model and arguments.noise == ["off"]:
        parser.error("--noise-at is of scopes in --noise, which names none")
    missing = {}
    if arguments.model:
        random = "of random weights, and --model is given: what it runs is the sampling of a training step"
        missing = {"table": random, "realistic": random}
    else:
        missing["model"] = "of --model, which is not given"
        scopes = [scope for _, _, scopes in models_of(arguments) for scope in scopes]
        if not any(True for scope in scopes for _ in cells_of(arguments, scope)):
            missing["table"] = "of --sequences, which names none"
        if not arguments.realistic:
            missing["realistic"] = "of --realistic, which is not given"
            if "table" in missing:
                parser.error("--sequences names none, and --realistic and --model are not given: nothing is measured")
    refuse_unused(parser, named, ACTS_ON, missing)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--size", default="7B", choices=SHAPES)
    parser.add_argument(
        "--formats",
        type=parse_formats,
        default="nvfp4",
        help="of the base, and of the LM head where not bf16: nvfp4,bf16,nvfp4/nvfp4",
    )
    parser.add_argument(
        "--noise",
        type=names(("off", *SCOPES)),
        default="off",
        help="off and scopes; scopes with the first of the formats only",
    )
    parser.add_argument(
        "--noise-at", type=counts, default="", help="sequences at which scopes are timed; all when not given"
    )
    parser.add_argument("--sequences", type=counts, default="1,8,32,64,128,256")
    parser.add_argument("--rank", type=count_from_0, default=32)
    parser.add_argument("--calls", type=count, default=3)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no cell after so many seconds")
    parser.add_argument(
        "--prompt", type=count, help="tokens of a prompt, which up to 8 sequences share: 16, and 256 with --realistic"
    )
    parser.add_argument("--new", type=count, default=192, help="new tokens of a sequence")
    parser.add_argument(
        "--together",
        type=names(("off", "on")),
        default="off",
        help="off, on or off,on: rows of one prompt read its pages together",
    )
    parser.add_argument("--realistic", action="store_true")
    parser.add_argument("--rows", type=count, default=512, help="most answers of --realistic that run at once")
    parser.add_argument(
        "--kv-gb",
        type=rooms,
        default="auto",
        help="room for keys and values of --realistic, one cell each: auto, GB or auto,3",
    )
    parser.add_argument("--chunk", type=count, default=8192, help="most prompt tokens of one pass of --realistic")
    parser.add_argument(
        "--dense-cache", choices=("auto", "on", "off"), default="auto", help="copies of weights (quant.dense_cache)"
    )
    parser.add_argument("--bare", action="store_true", help="without a profile of the kernels of the captured step")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--model", help="a real model's folder, instead of random weights")
    parser.add_argument("--data", default="gsm8k")
    parser.add_argument("--prompts", type=count, default=64, help="questions of --data")
    parser.add_argument("--answer", type=count, default=512, help="most tokens of an answer to them")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of --model")
    arguments = parser.parse_args(words)
    refuse_what_would_be_ignored(parser, arguments, given(parser, words))
    return arguments


def main() -> None:
    started = time.perf_counter()
    arguments = parse()
    require_gpu(tiny=arguments.tiny or bool(arguments.model))
    cells: list[dict[str, Any]] = []
    missing: list[str] = []

    def write() -> None:
        if arguments.out:
            note = {"note": f"not reached in {arguments.seconds:g} s: {'; '.join(missing)}"} if missing else {}
            write_result(arguments.out, **note, anchors=ANCHORS, cells=cells)

    def add(cell: dict[str, Any]) -> None:
        cells.append(cell)
        show(cell, started)
        write()

    def reached(cell: str) -> bool:
        if time.perf_counter() - started < arguments.seconds:
            return True
        missing.append(cell)
        print(f"not reached: {cell}", flush=True)
        write()
        return False

    if arguments.model:
        add(real(arguments.model, arguments.data, arguments.prompts, arguments.answer, arguments.settings))
        return
    device = torch.device("cpu" if arguments.tiny else "cuda")
    for format, head_format, scopes in models_of(arguments):
        spec = tiny(model_spec(arguments.size)) if arguments.tiny else model_spec(arguments.size)
        model = random_model(
            spec,
            format=format,
            rank=arguments.rank,
            dense_cache=keeps_copies(spec, format, arguments.dense_cache, device),
            head=head_format,
            device=device,
        )
        for scope in scopes:
            noise = None
            if scope != "off":
                noise = NoiseState(
                    seed=1, rollout=2, stage=1, sigma=0.01, group_size=8, scope=scope, sites=("attn_norm", "mlp_norm")
                ).materialize(model)
            head = {
                "size": arguments.size,
                "format": format,
                "head": head_format,
                "noise": scope,
                "rank": arguments.rank,
                "copies": memory.measure_resident(model)["dense_cache"] > 0,
            }
            for sequences, together in cells_of(arguments, scope):
                if reached(f"{format}/{head_format}, noise {scope}, {sequences}{' together' * together}"):
                    protocol = {"prompt": arguments.prompt or 16, "new": arguments.new, "together": together}
                    add(
                        {
                            **head,
                            **steps(model, noise, sequences, calls=arguments.calls, bare=arguments.bare, **protocol),
                        }
                    )
            for kv_gb in arguments.kv_gb if arguments.realistic else ():
                if reached(f"{format}/{head_format}, noise {scope}, realistic, room {kv_gb or 'auto'}"):
                    asked = {"rows": arguments.rows, "prompt": arguments.prompt, "chunk": arguments.chunk}
                    add({**head, "realistic": realistic(model, noise, arguments.calls, kv_gb=kv_gb, **asked)})
        del model
        gc.collect()
        if not arguments.tiny:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
