"""The CUDA C++ kernels and most Triton ones on small shapes under compute-sanitizer.

    python scripts/sanitize.py [--out results/sanitizer.json] [--tools memcheck,racecheck,synccheck] [--seconds 60]

Tools run side by side, each with a process of its own that runs this file as `--cases`: memcheck over all of them, with torch's allocator asking
the driver for every tensor, so that a byte beyond one is seen; racecheck (shared memory) and synccheck (barriers) over the CUDA C++ kernels.

Controls come first. Of one kind, 64 threads (or one) write a word each and arrive at an mbarrier, and another warp, or one lane of it, waits there and reads
them. Of the other, a warp writes, `__syncthreads` follows, then a wait at an mbarrier that the other block of a cluster fills (as in decode), and another warp reads.
If racecheck calls one of them a race, it does not know the order that such barriers make, and what it reports of kernels that use them (decode, middle) says
nothing; it is in the file all the same.
Exit status 1: another error was found, or a tool did not come to its end.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qerl.formats import get_format
from qerl.kernels.cuda import Kernel, Launch, architecture, compile_cuda
from qerl.kernels.fp4_linear import AdapterPart, decode, dense, fp4_linear, middle
from qerl.kernels.fp4_linear.adapter import flatten
from qerl.kernels.fp4_linear.shrink import shrink

TOOLS = ("memcheck", "racecheck", "synccheck")
WITH_MBARRIERS = ("decode", "middle")
CONTROLS = {
    "control_of_one": {"ARRIVALS": 1, "READERS": 1},
    "control_of_64": {"ARRIVALS": 64, "READERS": 1},
    "control_of_a_warp": {"ARRIVALS": 64, "READERS": 32},
    "control_of_sums": {},
}
"""Kernel -> its macros: threads that arrive, and lanes that wait and read."""
CONTROL_SOURCE = r"""
extern "C" __global__ void NAME(const __grid_constant__ unsigned long long out) {
  __shared__ int values[ARRIVALS];
  __shared__ unsigned long long barrier;
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "n"(ARRIVALS) : "memory");
  __syncthreads();
  if (threadIdx.x < ARRIVALS) {
    static_cast<volatile int*>(values)[threadIdx.x] = 1;
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
  } else if (threadIdx.x >= 64 && threadIdx.x < 64 + READERS) {
    unsigned done = 0;
    while (!done)
      asm volatile("{.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
                   : "=r"(done) : "r"(address) : "memory");
    int sum = 0;
    for (int i = 0; i < ARRIVALS; ++i) sum += static_cast<volatile int*>(values)[i];
    if (threadIdx.x == 64) *reinterpret_cast<int*>(out) = sum;
  }
}
"""
SUMS_SOURCE = r"""
extern "C" __global__ void NAME(const __grid_constant__ unsigned long long out) {
  __shared__ int values[32];
  __shared__ __align__(16) int pushed[4];
  __shared__ unsigned long long barrier;
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (threadIdx.x == 32) {
    const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(pushed));
    unsigned rank, there, count;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 16;" ::"r"(address) : "memory");
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(rank ^ 1));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(count) : "r"(address), "r"(rank ^ 1));
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%0], {%1,%1,%1,%1}, [%2];" ::"r"(there), "r"(1), "r"(count)
                 : "memory");
  }
  if (threadIdx.x >= 64) static_cast<volatile int*>(values)[threadIdx.x - 64] = 1;
  __syncthreads();
  unsigned done = 0;
  while (!done)
    asm volatile("{.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(address) : "memory");
  if (threadIdx.x < 32) {
    int sum = static_cast<volatile int*>(values)[threadIdx.x] + static_cast<volatile int*>(pushed)[threadIdx.x & 3];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x == 0) *reinterpret_cast<int*>(out) = sum;
  }
}
"""
FORMATS = ("nvfp4", "mxfp4", "nf4", "nf4_dq")
DEVICE = "cuda"


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def parts_of(segments: tuple[int, ...], d_in: int, rank: int) -> list[AdapterPart]:
    a_RI = normal(rank * len(segments), d_in)
    stops = [sum(segments[: index + 1]) for index in range(len(segments))]
    return [
        AdapterPart(
            start=stop - rows, stop=stop, a_RI=a_RI, b_OR=normal(rows, rank), scale=0.5, rank_start=index * rank
        )
        for index, (rows, stop) in enumerate(zip(segments, stops, strict=True))
    ]


class _Out(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p),)


def control(name: str) -> None:
    """Words through shared memory, from one warp or two to another."""
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    macros = CONTROLS[name]
    source = (CONTROL_SOURCE if macros else SUMS_SOURCE).replace("NAME", name)
    code = compile_cuda(source, name=name, arch=architecture(out.device), defines=macros)
    blocks = 1 if macros else 2
    Kernel(code, name).launch(Launch(grid=blocks, block=96, cluster=blocks), _Out(out.data_ptr()))
    assert out.item() == macros.get("ARRIVALS", 64)


def linear_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The CUDA C++ kernels: decode, middle, dequantize and shrink, in every format."""
    segments, d_in = (300, 61), 328
    bias = normal(sum(segments))
    for name in FORMATS:
        fmt = get_format(name)
        # Blocks of NF4 may not straddle rows.
        inputs = d_in if name in ("nvfp4", "mxfp4") else 320
        weight = fmt.for_device(fmt.quantize(normal(sum(segments), inputs), segments=segments))
        parts = parts_of(segments, inputs, 8)
        for rows in (1, 16):
            yield (
                f"decode {name}, {rows} rows",
                lambda r=rows, w=weight, p=parts, i=inputs: fp4_linear(normal(r, i), w, bias, p),
            )
        for rows in (20, 64, 100, 200) if name == "nvfp4" else (33,):
            for given in ((), parts) if name == "nvfp4" else (parts,):
                placed = flatten(given)
                yield (
                    f"middle {name}, {rows} rows, {len(given)} adapters",
                    lambda r=rows, w=weight, p=placed, i=inputs: middle.product(normal(r, i), w, bias, *p),
                )
        yield f"dequantize {name}", lambda w=weight, i=inputs: dense.dequantize_tiles(w, normal(sum(segments), i))
    head = get_format("fp8").tiled(get_format("fp8").quantize(normal(361, d_in)))
    for rows in (3, 16, 40, 100, 200):
        product = decode.product if rows <= 16 else middle.product
        yield (
            f"{'decode' if rows <= 16 else 'middle'} fp8, {rows} rows",
            lambda r=rows, p=product: p(normal(r, d_in), head, None, (), (), (), dtype=torch.float32),
        )
    yield "dequantize fp8", lambda: dense.dequantize_tiles(head, normal(361, d_in))
    yield (
        "middle, adapters of rank 48",
        lambda: middle.product(
            normal(40, 328),
            get_format("nvfp4").for_device(get_format("nvfp4").quantize(normal(200, 328))),
            None,
            *flatten(parts_of((200,), 328, 48)),
        ),
    )
    yield "shrink", lambda: shrink(normal(70, d_in), normal(24, d_in))


def other_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The Triton kernels."""
    from qerl.kernels import philox
    from qerl.kernels.activation import silu_mul
    from qerl.kernels.cached_attention import CacheRows, cached_attention
    from qerl.kernels.fp4_linear.unpack import unpack
    from qerl.kernels.quantize import quantize
    from qerl.kernels.rms_norm import KeyedNoise, add_rms_norm
    from qerl.kernels.rope import rope
    from qerl.kernels.sampling import draw_token, truncate
    from qerl.kernels.token_logprobs import head_logits, token_logprobs

    tokens, width = 7, 200
    noise = KeyedNoise(
        key_2=torch.tensor(philox.stream_key(1, "noise"), device=DEVICE), width=width, c1=3,
        c2_R=torch.arange(tokens, device=DEVICE), c3_1=torch.tensor([2], device=DEVICE),
        spread=torch.tensor([0.1], device=DEVICE),
    )  # fmt: skip

    def norm_with_gradient() -> None:
        x, residual, weight = (
            t.requires_grad_() for t in (normal(tokens, width), normal(tokens, width), normal(width).float())
        )
        y, stream = add_rms_norm(x, residual, weight, 1e-6, noise)
        (y.float().sum() + stream.float().sum()).backward()

    def activation_with_gradient() -> None:
        silu_mul(normal(tokens, 2 * 129).requires_grad_()).float().sum().backward()

    angle = torch.rand(32, 32, device=DEVICE)
    cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)

    def attention() -> None:
        caches = [torch.zeros(tokens, 32, 1, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
        rows = CacheRows(torch.arange(tokens, device=DEVICE), 32)
        cached_attention(normal(tokens, 6 * 64), (cos[rows.lengths_B], sin[rows.lengths_B]), 4, 1, *caches, rows, 0.125)

    def log_probs(head: Any) -> None:
        hidden = normal(21, 96).requires_grad_()
        token_logprobs(hidden, head, torch.arange(21, device=DEVICE))[0].sum().backward()

    straddling = get_format("nf4").quantize(normal(33, 100))
    heads = {name: get_format(name).for_device(get_format(name).quantize(normal(501, 96))) for name in ("fp8", "nvfp4")}
    logits = normal(5, 3001, dtype=torch.float32)
    yield "normal_rows", lambda: philox.normal_rows(1, "noise", 133, c1=torch.arange(5, device=DEVICE), c2=7, c3=1)
    yield "add_rms_norm and gradient", norm_with_gradient
    yield "silu_mul and gradient", activation_with_gradient
    yield "rope", lambda: rope(normal(32, 6 * 64), None, cos, sin, 4, 1)
    yield "cached_attention", attention
    yield "quantize", lambda: quantize(normal(33, 208), "nvfp4")
    yield "unpack", lambda: unpack(straddling, normal(33, 100))
    yield "draw_token", lambda: draw_token(logits, torch.rand(5, device=DEVICE), 0.7)
    yield "truncate", lambda: truncate(logits, 0.7, top_k=50, top_p=0.9)
    yield "token_logprobs and gradient", lambda: log_probs(normal(501, 96))
    for name, head in heads.items():
        yield f"{name} head", lambda h=head: [head_logits(normal(n, 96), h) for n in (3, 40)]
        yield f"token_logprobs of a {name} head", lambda h=head: log_probs(h)


def run_cases(tool: str) -> None:
    """In the tool's process: one line a case."""
    torch.manual_seed(0)
    controls = ((name, partial(control, name)) for name in CONTROLS)
    for name, case in (*controls, *linear_cases(), *(other_cases() if tool == "memcheck" else ())):
        began = time.monotonic()
        try:
            case()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"case failed: {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            if "CUDA" in str(error) or "cu" in type(error).__name__.lower():
                raise SystemExit(1) from error
            continue
        print(f"case: {name} ({time.monotonic() - began:.1f} s)", flush=True)


def start(tool: str, seconds: float) -> subprocess.Popen[str]:
    cases = [sys.executable, str(Path(__file__).resolve()), "--cases", tool]
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "40", "--target-processes", "application-only"]
    bounded = ["timeout", "-s", "KILL", f"{seconds:.0f}"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.Popen(
        [*bounded, *command, *cases], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def summary(output: str, status: int) -> dict[str, Any]:
    """What a tool said."""
    found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    cases = re.findall(r"^case: (.*) \([\d.]+ s\)$", output, re.M)
    failed = re.findall(r"^case failed: (.*)$", output, re.M)
    errors = int(found[1]) if found else None
    said = [line for line in output.splitlines() if line.startswith("=========")][:60]
    races = Counter(re.findall(r"Race reported between \w+ access at (\w+)", output))
    controls = sum(races[name] for name in CONTROLS)
    unknown = controls + sum(races[name] for name in WITH_MBARRIERS) if controls else 0
    return {
        "finished": found is not None and status == 0,
        "errors": errors,
        "races": dict(races),
        "not_known": unknown,
        "cases": cases,
        "failed": failed,
        "output": [] if errors == 0 else said,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cases:
        run_cases(arguments.cases)
        return
    if not torch.cuda.is_available() or shutil.which("compute-sanitizer") is None:
        raise SystemExit("error: needs a CUDA device and compute-sanitizer, which comes with the CUDA toolkit")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    facts = {
        "command": f"python scripts/sanitize.py --tools {arguments.tools}",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit or None,
    }
    running = {tool: start(tool, arguments.seconds) for tool in arguments.tools.split(",")}
    results = {}
    for tool, process in running.items():
        output, _ = process.communicate()
        results[tool] = summary(output, process.returncode)
        found = results[tool]
        said = f"{found['errors']} errors ({found['not_known']} of barriers that the tool does not know)"
        print(f"{tool}: {said}, {len(found['cases'])} cases, failed: {found['failed']}", flush=True)
        print("\n".join(found["output"]) if found["output"] else "", end="\n")
        if not found["finished"]:
            print(output[-2000:])
    if arguments.out:
        arguments.out.write_text(json.dumps(facts | {"tools": results}, indent=1) + "\n", encoding="utf-8")
    if any(
        not found["finished"] or found["errors"] > found["not_known"] or found["failed"] for found in results.values()
    ):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
