"""The learning pass of one decoder layer on a GPU: forward and backward by format of the base, number of tokens and kernel.

    python benchmarks/layers.py [--size 32B] [--formats nvfp4,bf16] [--shapes 8x256,4x1920,32x2032/none] [--layers 8] [--checkpointing full]
                                [--out FILE] [--seconds 60] [--tiny]

A model of the given size with so many layers, random weights and LoRA rank 32 with trained norms scores a micro-batch and computes its
gradients. Shape 8x256: eight answers of 256 tokens that share their prompt of 128; 4x1920: four answers that do not share it (a group
shares where it is whole); 32x2032/none: with another checkpointing than the rest. Format nvfp4+kept: dequantized copies of the weights are kept (`quant.dense_cache`). Times are by the host's clock between synchronizations, medians of twenty, with all of them. A layer's is the difference between
all layers and two of them, a layer, so the LM head and the loss are no part of it; ``whole model`` adds as many as the size has. Kernels
are those of one more pass, by what they do, for all layers with the head.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.options import BASES, count, names
from benchmarks.stored import write_result
from benchmarks.synthetic import SHAPES, random_model
from benchmarks.timing import require_gpu
from benchmarks.training import clear, facts, questions, random_answers, samples, spec_of, synchronize
from qerl.model.decoder import Decoder
from qerl.model.recompute import Checkpointing
from qerl.objective.batch import pack
from qerl.records import TrainBatch
from qerl.train.learn import policy_logprobs

PROMPT, GROUP, FEW, REPEATS = 128, 8, 2, 20
CLASSES = {
    "dequantize": ("dequantize", "_nf4", "_mxfp4"),
    "attention": ("flash", "fmha"),
    "products": ("nvjet", "gemm", "cutlass", "xmma", "middle", "shrink"),
    "logits": ("absorb", "finish", "logits_gradient"),
    "norms and rotation": ("_forward", "_backward"),
    "activation": ("_silu",),
    "copies": ("copy", "Copy", "Cat", "elementwise"),
}
"""What a kernel does, by a part of its name; the first that fits: FlashAttention's names have cutlass's number types in them."""


def class_of(kernel: str) -> str:
    """What a kernel of that name does."""
    return next((kind for kind, parts in CLASSES.items() if any(part in kernel for part in parts)), "other")


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a micro-batch, and what its backward pass makes again."""

    text: str
    answers: int
    length: int
    checkpointing: Checkpointing | None
    """None: that of the command."""


def parse_shape(text: str) -> Shape:
    """4x1920, or 4x1920/none."""
    size, _, way = text.partition("/")
    answers, _, length = size.partition("x")
    if not (
        answers.isdecimal()
        and length.isdecimal()
        and int(answers)
        and int(length)
        and way in ("", *get_args(Checkpointing))
    ):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; expected answers x tokens, 4x1920 or 4x1920/none")
    return Shape(text, int(answers), int(length), cast("Checkpointing", way) if way else None)


def parse_shapes(text: str) -> list[Shape]:
    """Several, with commas."""
    return [parse_shape(part) for part in text.split(",")]


def micro_batch(size: str, shape: Shape, device: torch.device, *, tiny: bool) -> TrainBatch:
    """Answers of random tokens, packed as a step packs them."""
    answers, length = shape.answers, shape.length
    spec = spec_of(size, tiny=tiny)
    prompts = questions(spec, -(-answers // GROUP), 4 if tiny else PROMPT)
    items = [one for group in samples(random_answers(spec, prompts, [length] * answers)) for one in group]
    key = (lambda key: 0) if answers % GROUP == 0 else None
    (batch,) = pack(items, 1 << 20, device, prefix_key=key)
    return batch


def once(model: Decoder, batch: TrainBatch, checkpointing: Checkpointing) -> tuple[float, float]:
    """Seconds forward and backward."""
    for parameter in model.parameters():
        parameter.grad = None
    synchronize(model.device)
    began = time.perf_counter()
    logprobs_N, _ = policy_logprobs(model, batch, 1.0, noise=None, checkpointing=checkpointing)
    synchronize(model.device)
    turned = time.perf_counter()
    logprobs_N.mean().backward()
    synchronize(model.device)
    return turned - began, time.perf_counter() - turned


def passes(model: Decoder, batch: TrainBatch, checkpointing: Checkpointing) -> dict[str, Any]:
    """Milliseconds of passes over the whole model."""
    once(model, batch, checkpointing)
    repeats = REPEATS if model.device.type == "cuda" else 3
    forward, backward = zip(*(once(model, batch, checkpointing) for _ in range(repeats)), strict=True)
    found = {"forward": [1e3 * one for one in forward], "backward": [1e3 * one for one in backward]}
    return {name: {"ms": statistics.median(times), "all": times} for name, times in found.items()}


def kernel_classes(model: Decoder, batch: TrainBatch, checkpointing: Checkpointing) -> dict[str, float]:
    """Milliseconds of the device in one pass, by what its kernels do."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        once(model, batch, checkpointing)
    found: dict[str, float] = defaultdict(float)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[class_of(event.name)] += event.device_time / 1e3
    return dict(found)


def measure(model: Decoder, batch: TrainBatch, checkpointing: Checkpointing, layers_of_size: int) -> dict[str, Any]:
    """Times of all layers, of one, and of as many as the size has."""
    every, layers = passes(model, batch, checkpointing), model.layers
    row: dict[str, Any] = {"tokens": batch.num_tokens, "layers": len(layers), "all_layers": every}
    if model.device.type == "cuda":
        row["kernel_ms"] = kernel_classes(model, batch, checkpointing)
    model.layers = layers[:FEW]
    few = passes(model, batch, checkpointing)
    model.layers = layers
    row["layer_ms"] = {way: (every[way]["ms"] - few[way]["ms"]) / (len(layers) - FEW) for way in every}
    more = layers_of_size - len(layers)
    row["whole_model_ms"] = {way: every[way]["ms"] + more * row["layer_ms"][way] for way in every}
    return row


def over_bf16(rows: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By row: its times over those of BF16, of a layer and of the whole model."""
    found = {}
    for name, row in rows.items():
        _, _, shape = name.split(" ", 2)
        theirs = rows.get(f"{name.split(' ', 1)[0]} bf16 {shape}")
        if theirs is not None and theirs is not row and "skipped" not in {*row, *theirs}:
            found[name] = {
                f"{way} of {what}": row[f"{what}_ms"][way] / theirs[f"{what}_ms"][way] - 1
                for what in ("layer", "whole_model")
                for way in ("forward", "backward")
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="32B", choices=SHAPES)
    parser.add_argument(
        "--formats",
        type=names((*BASES, *(f"{base}+kept" for base in BASES if base != "bf16"))),
        default="nvfp4,bf16",
        help="formats of the base, with commas",
    )
    parser.add_argument("--shapes", type=parse_shapes, help="answers x tokens, with commas (8x256,4x1920)")
    parser.add_argument("--layers", type=count, default=8, help="layers of the model that is timed, above two")
    parser.add_argument("--checkpointing", default="full", choices=get_args(Checkpointing))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="no further row is begun after so many")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    require_gpu(tiny=arguments.tiny)
    device = torch.device("cpu" if arguments.tiny else "cuda:0")
    began, rows = time.perf_counter(), {}
    spec = spec_of(arguments.size, tiny=arguments.tiny)
    known = facts(device) | {"checkpointing": arguments.checkpointing, "prompt": PROMPT}
    shapes = arguments.shapes or parse_shapes("8x24,4x60" if arguments.tiny else "8x256,4x1920")
    for shown_as in arguments.formats:
        format, _, kept = shown_as.partition("+")
        shown = replace(spec, num_layers=max(FEW + 1, arguments.layers))
        model = random_model(shown, format=format, dense_cache=bool(kept), device=device, dtype=torch.bfloat16)
        for shape in shapes:
            name = f"{arguments.size} {shown_as} {shape.text}"
            if time.perf_counter() - began > arguments.seconds:
                rows[name] = {"skipped": f"not reached in {arguments.seconds:g} s"}
            else:
                clear(device)
                batch = micro_batch(arguments.size, shape, device, tiny=arguments.tiny)
                way = shape.checkpointing or arguments.checkpointing
                rows[name] = measure(model, batch, way, spec.num_layers) | {"checkpointing": way}
            print(f"{name}: {json.dumps(rows[name])}", flush=True)
            if arguments.out is not None:
                write_result(arguments.out, facts=known, rows=rows, over_bf16=over_bf16(rows))
        del model
        clear(device)
    print(json.dumps(over_bf16(rows), indent=1), flush=True)


if __name__ == "__main__":
    main()
