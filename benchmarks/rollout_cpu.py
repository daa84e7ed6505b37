"""A decode step on the CPU against its bare matrix products, and against ``transformers`` generate, in one run.

    QERL_MODELS=MODELS python benchmarks/rollout_cpu.py SmolLM2-135M-Instruct --out results/rollout_cpu.json [--batches 1,8,32]

All are timed in turn, round after round, so that what else the machine does falls on all of them. The bare products are those of all
linear layers and the LM head with inputs of the batch's size, as dense float32 (``quant.format=bf16``, so no unpacking is in either side),
no adapters, by ``torch.mm``; ``engine_products`` are the same as the engine makes them (``qerl.kernels.product``), a harder bar where they are
faster. A step of the engine has everything: norms, rotation, attention over prompts of 16 tokens and 32 new ones, sampling, log-probs;
its time, and that of ``transformers``, is a call with 33 new tokens less one with 1, over 32. ``--clock cpu`` takes the processor time of the
process instead of the wall's, for a machine that others use too (with one thread).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.lengths import NO_EOS, make_prompts
from benchmarks.stored import write_result
from benchmarks.synthetic import StubTokenizer
from qerl.config.schema import QuantConfig
from qerl.kernels.product import product
from qerl.model.checkpoint import load_model, resolve_model_path
from qerl.model.decoder import Decoder
from qerl.records import SamplingSpec
from qerl.rollout.engine import Engine

PROMPT, NEW, ROUNDS = 16, 32, 5
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Clock = Callable[[], float]


def elapsed(run: Callable[[], Any], clock: Clock) -> float:
    """Milliseconds."""
    began = clock()
    run()
    return 1e3 * (clock() - began)


def bare_products(model: Decoder, batch: int, clock: Clock) -> Callable[[], float]:
    """Times one pass of all matrix products of a step by ``torch.mm``, in ms."""
    pairs = [(x_BI, weight_OI.T) for x_BI, weight_OI in operands(model, batch)]

    def products() -> None:
        for _ in range(NEW):
            for x_BI, weight_IO in pairs:
                torch.mm(x_BI, weight_IO)

    return lambda: elapsed(products, clock) / NEW


def engine_products(model: Decoder, batch: int, clock: Clock) -> Callable[[], float]:
    """Times the same as the engine makes them."""
    pairs = operands(model, batch)

    def products() -> None:
        for _ in range(NEW):
            for x_BI, weight_OI in pairs:
                product(x_BI, weight_OI)

    return lambda: elapsed(products, clock) / NEW


def operands(model: Decoder, batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(x [B, I], weight [O, I]) of all linear layers and the head."""
    weights = [linear.dense_OI for linear in model.grouped_linears()]
    head = model.head_weight
    assert isinstance(head, torch.Tensor)
    return [(torch.randn(batch, weight.shape[1]), weight) for weight in (*weights, head) if weight is not None]


def engine_step(model: Decoder, batch: int, clock: Clock) -> Callable[[], float]:
    """Times a step of the engine, in ms."""
    engine = Engine(model, StubTokenizer(NO_EOS), max_num_seqs=batch)  # type: ignore[arg-type]
    prompts = make_prompts(batch, PROMPT, model.spec.vocab_size)

    def call(tokens: int) -> float:
        return elapsed(lambda: engine.generate(prompts, SamplingSpec(max_new_tokens=tokens)), clock)

    return lambda: (call(NEW + 1) - call(1)) / NEW


def transformers_step(folder: Path, batch: int, clock: Clock) -> Callable[[], float]:
    """Times a token of each sequence with ``transformers`` generate, sampled, in ms."""
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt.token_ids for prompt in make_prompts(batch, PROMPT, peer.config.vocab_size)])

    def call(tokens: int) -> float:
        settings: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": tokens, "min_new_tokens": tokens}
        return elapsed(
            lambda: peer.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings), clock
        )

    return lambda: (call(NEW + 1) - call(1)) / NEW


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a NAME under $QERL_MODELS")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    arguments = parser.parse_args()
    clock = CLOCKS[arguments.clock]
    folder = resolve_model_path(arguments.model)
    model = load_model(folder, quant=QuantConfig(format="bf16"), lora=None, dtype=torch.float32)
    rows = []
    for batch in map(int, arguments.batches.split(",")):
        timers = {
            "engine": engine_step(model, batch, clock),
            "bare_products": bare_products(model, batch, clock),
            "engine_products": engine_products(model, batch, clock),
            "transformers": transformers_step(folder, batch, clock),
        }
        times: dict[str, list[float]] = {name: [] for name in timers}
        for index in range(ROUNDS + 1):
            for name, timer in timers.items():
                ms = timer()
                if index:
                    times[name].append(ms)
        row: dict[str, Any] = {"batch": batch, "ms": times}
        row["median_ms"] = {name: statistics.median(values) for name, values in times.items()}
        row["engine_over_products"] = row["median_ms"]["engine"] / row["median_ms"]["bare_products"]
        row["engine_over_its_products"] = row["median_ms"]["engine"] / row["median_ms"]["engine_products"]
        row["transformers_over_engine"] = row["median_ms"]["transformers"] / row["median_ms"]["engine"]
        rows.append(row)
        print({name: value for name, value in row.items() if name != "ms"}, flush=True)
    write_result(arguments.out, rows=rows)


if __name__ == "__main__":
    main()
