"""Time of the small operations on a GPU, beside the time that memory or the matrix units need for them.

    python benchmarks/ops.py [--out results/kernels_ops.json] [--only norms,quantization]

Shapes are Qwen2.5-7B's (hidden 3584, MLP 18944, 28 and 4 heads of 128, vocabulary 152064). Everything but rows named eager is timed inside captured
graphs, so that no time of the host counts: medians over replays, with the second and eighth decile. Inputs of the training rows
are larger than the cache; those of a decode step are warm, as they are in a step. Floors come from a copy and a square matrix
product in the same run. Of quantization and dequantization (`packing.py`) a floor is one pass, and the file has the bytes of all passes too.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.packing import packing
from benchmarks.stored import write_result
from benchmarks.timing import captured, device_times, require_gpu
from qerl.kernels import philox
from qerl.kernels.activation import silu_mul
from qerl.kernels.activation import triton as activation_triton
from qerl.kernels.attention import packed_attention
from qerl.kernels.rms_norm import KeyedNoise, TableNoise, add_rms_norm
from qerl.kernels.rms_norm import triton as rms_norm_triton
from qerl.kernels.rope import HeadNorms, rope
from qerl.kernels.rope import triton as rope_triton
from qerl.kernels.token_logprobs import token_choices, token_logprobs
from qerl.kernels.token_logprobs import triton as logprobs

HIDDEN, MLP, HEADS, KV_HEADS, SIZE, VOCABULARY = 3584, 18944, 28, 4, 128, 152064
TOKENS, SAMPLES, DECODE, NORMS = 8192, 64, 64, 56
TILE_ROWS = logprobs.TILE_ROWS


class Table:
    """Prints rows as they come and keeps them."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.copy_rate = self.matrix_rate = 0.0

    def add(self, name: str, times: list[float], *, moved: float = 0.0, flops: float = 0.0) -> None:
        floor = max(moved / self.copy_rate, flops / self.matrix_rate) * 1e6 if moved or flops else 0.0
        self.rows[name] = {"us": times[0], "us_p20": times[1], "us_p80": times[2], "floor_us": floor}
        share = f"{floor / times[0]:6.1%} of {floor:9.1f}" if floor else ""
        print(f"{name:58} {times[0]:9.1f} us  {share}", flush=True)

    def measure_rates(self) -> None:
        """Of calls long enough that the host does not count. (Inside graphs a copy ran at 2.8 instead of 4.2 TB/s.)"""
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
        target = torch.empty_like(source)
        self.copy_rate = 2 * source.numel() / (device_times(lambda: target.copy_(source))[0] * 1e-6)
        a, b = normal(8192, 8192), normal(8192, 8192)
        self.matrix_rate = 2 * 8192**3 / (device_times(lambda: a @ b)[0] * 1e-6)
        print(
            f"copy {self.copy_rate / 1e12:.2f} TB/s, matrix product {self.matrix_rate / 1e12:.0f} TFLOP/s", flush=True
        )


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def noises(tokens: int) -> dict[str, Any]:
    z = 0.01 * torch.randn(SAMPLES, HIDDEN, device="cuda")
    counter = {
        "key_2": torch.tensor(philox.stream_key(0, "noise"), device="cuda"),
        "width": HIDDEN,
        "c1": 17,
        "c3_1": torch.tensor([3], device="cuda"),
        "spread": torch.tensor([0.01], device="cuda"),
    }
    by_sample = torch.arange(tokens, device="cuda") * SAMPLES // tokens
    positions = torch.arange(tokens, device="cuda")
    keys = torch.arange(SAMPLES, device="cuda")
    return {
        "off": None,
        "one draw (scope rollout)": z[0],
        "table by sample": TableNoise(z_RD=z, rows_T=by_sample, noisy_T=positions % 8 > 0),
        "keys by sample (scope response)": KeyedNoise(
            **counter, c2_R=keys, rows_T=by_sample if tokens > SAMPLES else None
        ),
        "keys by token (scope token)": KeyedNoise(**counter, c1_R=positions << 12, c2_R=by_sample),
    }


def norms(table: Table) -> None:
    """Two sets of inputs in turn: each is larger than the cache together with the outputs."""
    weight = torch.ones(HIDDEN, device="cuda")
    sets = [[normal(TOKENS, HIDDEN) for _ in range(4)] for _ in range(2)]
    one = TOKENS * HIDDEN * 2
    for name, noise in noises(TOKENS).items():
        runs = [lambda s=given, n=noise: add_rms_norm(s[0], s[1], weight, 1e-6, n) for given in sets]
        table.add(f"add_rms_norm, noise {name}", captured(*runs), moved=4 * one)
    for name, noise in noises(TOKENS).items():
        inverse = rms_norm_triton.forward(sets[0][0], weight, 1e-6, noise, sets[0][0].dtype)[1]
        for trained in (False, True):
            runs = [
                lambda s=given, n=noise, t=trained, i=inverse: rms_norm_triton.backward(
                    s[0], s[1], weight, i, n, s[2], needs_weight=t
                )
                for given in sets
            ]
            label = f"its backward, w {'trained' if trained else 'frozen'}, noise {name}"
            table.add(label, captured(*runs), moved=4 * one)
    wide = [[normal(TOKENS, HIDDEN).float() for _ in range(2)] for _ in range(2)]
    runs = [lambda s=given: add_rms_norm(*s, weight, 1e-6, dtype=torch.bfloat16) for given in wide]
    table.add("add_rms_norm, a float32 stream and what is added to it", captured(*runs), moved=7 * one)
    few = [normal(DECODE, HIDDEN) for _ in range(2)]
    for name, noise in noises(DECODE).items():
        times = captured(lambda n=noise: add_rms_norm(*few, weight, 1e-6, n))
        table.add(f"decode of {DECODE}: add_rms_norm, noise {name}", times)
    keyed = noises(DECODE)["keys by sample (scope response)"]
    table.add(f"normal_rows [{SAMPLES}, {HIDDEN}]", captured(keyed.draws))
    for samples in (SAMPLES, 8):
        names = torch.arange(NORMS, device="cuda").repeat_interleave(samples)
        of_pass = replace(keyed, c1=0, c1_R=names, c2_R=keyed.c2_R[:samples].repeat(NORMS))
        times = captured(of_pass.draws, calls=2)
        table.add(f"draws of a pass of {samples} samples for {NORMS} norms, a norm", [time / NORMS for time in times])


def activation_and_rotation(table: Table) -> None:
    gate_up, grad = normal(TOKENS, 2 * MLP), normal(TOKENS, MLP)
    one = grad.numel() * 2
    table.add("silu_mul", captured(lambda: silu_mul(gate_up)), moved=3 * one)
    table.add("silu_mul backward", captured(lambda: activation_triton.backward(grad, gate_up)), moved=5 * one)
    few = normal(DECODE, 2 * MLP)
    table.add(f"decode of {DECODE}: silu_mul", captured(lambda: silu_mul(few)))
    angle = torch.rand(TOKENS, SIZE // 2, device="cuda")
    cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)
    qkv = normal(TOKENS, (HEADS + 2 * KV_HEADS) * SIZE)
    moved = 2 * qkv.numel() * 2 + cos.numel() * 4
    shape = (HEADS, KV_HEADS)
    table.add("rope", captured(lambda: rope(qkv, None, cos, sin, *shape)), moved=moved)
    weight = torch.ones(SIZE, device="cuda")
    heads = HeadNorms(q_weight_d=weight, k_weight_d=weight, eps=1e-6)
    table.add("rope with norms", captured(lambda: rope(qkv, None, cos, sin, *shape, norms=heads)), moved=moved)
    grads = rope(qkv, None, cos, sin, *shape)
    backward = captured(lambda: rope_triton.gradient(grads, None, None, cos, sin, None))
    table.add("rope backward", backward, moved=moved)
    backward = captured(lambda: rope_triton.gradient(grads, qkv, None, cos, sin, heads))
    table.add("rope with norms, backward", backward, moved=moved + qkv.numel() * 2)


def log_probs(table: Table, tokens: int = 4096) -> None:
    hidden, head = normal(tokens, HIDDEN), normal(VOCABULARY, HIDDEN) * HIDDEN**-0.5
    targets = torch.randint(0, VOCABULARY, (tokens,), device="cuda")
    leaf = hidden.clone().requires_grad_()
    product = 2.0 * tokens * VOCABULARY * HIDDEN
    for block, rows in ((1024, 8192), (2048, 4096), (4096, 4096)):
        part = 2.0 * block * rows * HIDDEN
        out, other = (torch.empty(block, rows, device="cuda", dtype=d) for d in (torch.float32, torch.bfloat16))
        few, some = hidden[:block], head[:rows]
        times = captured(lambda f=few, s=some, o=out: logprobs._product(f, s.T, o), calls=20)
        table.add(f"tile {block} x {rows}: logits", times, flops=part)
        times = captured(lambda f=few, s=some, o=other: torch.mm(f, s.T, out=o), calls=20)
        table.add(f"tile {block} x {rows}: logits as bfloat16", times, flops=part)
        total = torch.zeros(block, HIDDEN, device="cuda")
        times = captured(lambda o=other, s=some, t=total: logprobs._product(o, s, t, add=True), calls=20)
        table.add(f"tile {block} x {rows}: sum of p W", times, flops=part)
        logprobs.TILE_ROWS = rows
        times = captured(lambda b=block: token_logprobs(hidden, head, targets, chunk=b), calls=1)
        table.add(f"token_logprobs {tokens}, tile {block} x {rows}", times, flops=product)
        times = captured(lambda b=block: token_logprobs(leaf, head, targets, chunk=b), calls=1)
        table.add(f"token_logprobs {tokens} and gradient, tile {block} x {rows}", times, flops=2 * product)
    logprobs.TILE_ROWS = TILE_ROWS
    uniforms = torch.rand(tokens, device="cuda").clamp_(2.0**-24, 1 - 2.0**-24)
    for name, numbers in (("arg-max", None), ("arg-max and draw", uniforms)):
        times = captured(lambda u=numbers: token_choices(hidden, head, targets, u), calls=1)
        table.add(f"token_choices {tokens}, {name}", times, flops=product)
    times = captured(lambda: token_logprobs(hidden, head, targets, kernel="reference"), calls=1)
    table.add(f"token_logprobs {tokens}, reference", times, flops=product)


def attention(table: Table) -> None:
    """Equal lengths, where the reference pads nothing, and unequal ones of the same sum."""
    inputs = [normal(TOKENS, n, SIZE) for n in (HEADS, KV_HEADS, KV_HEADS)]
    leaves = [values.clone().requires_grad_() for values in inputs]
    grad = normal(TOKENS, HEADS, SIZE)

    def with_gradient(bounds: torch.Tensor, lengths: list[int]) -> None:
        output = packed_attention(*leaves, bounds, SIZE**-0.5, lengths=lengths)
        torch.autograd.grad(output, leaves, grad)

    for name, lengths in (("8 x 1024", [1024] * 8), ("7 x 512 and 4608", [512] * 7 + [4608])):
        bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0)
        product = 2.0 * sum(n * n for n in lengths) * HEADS * SIZE
        for kernel in ("flash", "reference"):
            times = captured(
                lambda k=kernel, b=bounds, n=lengths: packed_attention(*inputs, b, SIZE**-0.5, lengths=n, kernel=k)
            )
            table.add(f"packed_attention {name}, {kernel}", times, flops=product)
        times = captured(lambda b=bounds, n=lengths: with_gradient(b, n))
        table.add(f"packed_attention {name} and its gradient, flash", times, flops=3.5 * product)


PARTS = {
    "norms": norms,
    "quantization": packing,
    "log_probs": log_probs,
    "activation_and_rotation": activation_and_rotation,
    "attention": attention,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    arguments = parser.parse_args()
    require_gpu(tiny=False)
    torch.manual_seed(0)
    table = Table()
    table.measure_rates()
    for name in arguments.only.split(","):
        PARTS[name](table)
        if arguments.out:
            rates = {"copy_bytes_per_second": table.copy_rate, "matrix_flops_per_second": table.matrix_rate}
            write_result(arguments.out, **rates, rows=table.rows)


if __name__ == "__main__":
    main()
