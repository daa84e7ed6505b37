"""The kernels of the package on small shapes: what `scripts/sanitize.py` runs under its tools.

A case names the kernels that it launches, and fails if it does not launch them. `tests/kernels/test_sanitize.py` compares the names with
the package's kernels and with what the dispatch launches on sm_90, and runs the Triton cases in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from qerl.formats import PackedWeight, get_format
from qerl.kernels.cuda import Kernel
from qerl.kernels.fp4_linear import AdapterPart, decode, dense, fp4_linear, keep, kept, middle, regimes
from qerl.kernels.fp4_linear.adapter import flatten
from qerl.kernels.fp4_linear.shrink import shrink

FORMATS = ("nvfp4", "mxfp4", "nf4", "nf4_dq")
NO_CASE = {"probe": "holds no instruction: it is asked for its resources, never launched"}
"""Kernel -> why no case launches it."""


@dataclass(frozen=True, slots=True)
class Case:
    """One call, or a few."""

    name: str
    run: Callable[[], Any]
    kernels: tuple[str, ...]
    """What it launches: `module.function` of a Triton kernel, below `qerl.kernels`; the function of a CUDA C++ one."""


@contextmanager
def launches() -> Iterator[set[str]]:
    """The kernels that are launched inside, by the names of `Case.kernels`."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    found: set[str] = set()
    whole = {kind: kind.run for kind in (JITFunction, InterpretedFunction)} | {Kernel: Kernel.launch}

    def noted(kind: Any) -> Callable[..., Any]:
        def run(self: Any, *arguments: Any, **options: Any) -> Any:
            found.add(self._name if kind is Kernel else f"{short(self.fn.__module__)}.{self.fn.__name__}")
            return whole[kind](self, *arguments, **options)

        return run

    try:
        for kind in whole:
            setattr(kind, "launch" if kind is Kernel else "run", noted(kind))
        yield found
    finally:
        for kind, before in whole.items():
            setattr(kind, "launch" if kind is Kernel else "run", before)


def short(module: str) -> str:
    """A module's name below `qerl.kernels`."""
    return module.removeprefix("qerl.kernels.")


class Inputs:
    """Random inputs on a device."""

    def __init__(self, device: str):
        self.device = device

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def range(self, stop: int) -> torch.Tensor:
        return torch.arange(stop, device=self.device)

    def parts(self, segments: tuple[int, ...], d_in: int, rank: int) -> list[AdapterPart]:
        a_RI = self.normal(rank * len(segments), d_in)
        stops = [sum(segments[: index + 1]) for index in range(len(segments))]
        return [
            AdapterPart(
                start=stop - rows, stop=stop, a_RI=a_RI, b_OR=self.normal(rows, rank), scale=0.5, rank_start=i * rank
            )
            for i, (rows, stop) in enumerate(zip(segments, stops, strict=True))
        ]


def linear_cases(formats: tuple[str, ...]) -> Iterator[Case]:
    """The CUDA C++ kernels: decode, middle and dequantize in the given formats; shrink, and rank 48, with NVFP4."""
    given = Inputs("cuda")
    segments, d_in = (300, 61), 328
    bias = given.normal(sum(segments))

    def weight_of(name: str, rows: tuple[int, ...], inputs: int) -> PackedWeight:
        fmt = get_format(name)
        return fmt.for_device(fmt.quantize(given.normal(sum(rows), inputs), segments=rows))

    for name in formats:
        # Blocks of NF4 may not straddle rows.
        inputs = d_in if name in ("nvfp4", "mxfp4") else 320
        weight, parts = weight_of(name, segments, inputs), given.parts(segments, inputs, 8)
        for rows in (1, regimes.few_rows(name)):
            yield Case(
                f"decode {name}, {rows} rows",
                lambda r=rows, w=weight, p=parts, i=inputs: fp4_linear(given.normal(r, i), w, bias, p),
                ("decode",),
            )
        if regimes.few_rows(name) < regimes.DECODE_ROWS:
            placed = flatten(parts)
            yield Case(
                f"decode {name}, {regimes.DECODE_ROWS} rows, which devices without a middle kernel ask for",
                lambda w=weight, p=placed, i=inputs: decode.product(given.normal(regimes.DECODE_ROWS, i), w, bias, *p),
                ("decode",),
            )
        for rows in (20, 64, 100, 200) if name == "nvfp4" else (33,):
            for chosen in ((), parts) if name == "nvfp4" else (parts,):
                placed = flatten(chosen)
                yield Case(
                    f"middle {name}, {rows} rows, {len(chosen)} adapters",
                    lambda r=rows, w=weight, p=placed, i=inputs: middle.product(given.normal(r, i), w, bias, *p),
                    ("middle",),
                )
        yield Case(
            f"dequantize {name}",
            lambda w=weight, i=inputs: dense.dequantize_tiles(w, given.normal(sum(segments), i)),
            ("dequantize",),
        )
    if "nvfp4" in formats:
        # The second has more than can lie in shared memory at a time.
        for rank, rows, of in ((48, 40, (200,)), (136, 100, segments)):
            weight, placed = weight_of("nvfp4", of, 328), flatten(given.parts(of, 328, rank))
            yield Case(
                f"middle, adapters of rank {rank}",
                lambda r=rows, w=weight, p=placed: middle.product(given.normal(r, 328), w, None, *p),
                ("middle",),
            )
        yield Case("shrink", lambda: shrink(given.normal(70, d_in), given.normal(24, d_in)), ("shrink",))


def fp8_cases() -> Iterator[Case]:
    """The CUDA C++ kernels with FP8 tiles: float32 outputs without adapters, as an LM head has them."""
    given, shape = Inputs("cuda"), (361, 328)
    head = get_format("fp8").tiled(get_format("fp8").quantize(given.normal(*shape)))
    for rows in (3, 16, 40, 100, 200):
        few = rows <= regimes.DECODE_ROWS
        kernel, product = ("decode", decode.product) if few else ("middle", middle.product)
        yield Case(
            f"{kernel} fp8, {rows} rows",
            lambda r=rows, p=product: p(given.normal(r, 328), head, None, (), (), (), dtype=torch.float32),
            (kernel,),
        )
    yield Case("dequantize fp8", lambda: dense.dequantize_tiles(head, given.normal(*shape)), ("dequantize",))


def kept_cases(device: str) -> Iterator[Case]:
    """The product with V that is kept, in every shape of tiles, with blocks that share one and without."""
    given, segments, d_in = Inputs(device), (128, 61), 328
    if device == "cuda":
        fmt = get_format("nvfp4")
        packed = fmt.for_device(fmt.quantize(given.normal(189, d_in), segments=segments))

        def layer() -> None:
            held = keep(packed)
            for chosen in ((), given.parts(segments, d_in, 8)):
                fp4_linear(given.normal(40, d_in), held, None, chosen)

        yield Case("kept, as a layer calls it", layer, ("fp4_linear.kept._product", "dequantize"))
    values, bias = given.normal(189, d_in), given.normal(189)
    parts = given.parts(segments, d_in, 8)
    pieces = (kept.Piece(128, 0.5, 0), kept.Piece(189, 0.25, 1))
    for shape, splits in zip(kept.SHAPES, (3, 1, 1, 2), strict=True):
        cut = replace(shape, splits=splits)
        yield Case(
            f"kept, tiles of {shape.rows} x {shape.columns} x {shape.depth}, {splits} blocks each",
            lambda c=cut: kept.run(given.normal(140, d_in), values, bias, pieces, *flatten(parts), c),
            ("fp4_linear.kept._product",),
        )


def attention_cases(device: str) -> Iterator[Case]:
    """Decode attention: rows with one page, contexts that are cut, shared prompts, FP8."""
    from qerl.kernels.cached_attention import FP8, CacheRows, SharedPages, cached_attention

    given, heads, size = Inputs(device), 6, 64
    angle = torch.rand(300, size // 2, device=device)
    cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)

    def attend(rows: CacheRows, kv_heads: int, pages: int, dtype: torch.dtype = torch.bfloat16) -> None:
        count = len(rows.lengths_B)
        caches = [torch.zeros(pages, rows.page_tokens, kv_heads, size, device=device).to(dtype) for _ in range(2)]
        turns = cos[rows.lengths_B % 300], sin[rows.lengths_B % 300]
        qkv, types = given.normal(count, (heads + 2 * kv_heads) * size), {}
        if dtype == torch.float16:
            qkv, types = qkv.float(), {"dtype": dtype, "output_dtype": torch.bfloat16}
        cached_attention(qkv, turns, heads, kv_heads, *caches, rows, 0.125, **types)

    def ints(*values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    attention = ("cached_attention.contexts.attend",)
    table = ints([3, 1, 2, 0], [4, 5, 0, 0], [6, 7, 0, 0], [3, 1, 8, 0])
    lengths = torch.tensor([130, 65, 64, 191], device=device)
    long = CacheRows(
        torch.tensor([40 * 64 - 1, 700], device=device),
        64,
        table_BN=torch.stack((ints(*range(40)), ints(*range(40, 80)))),
    )
    members = ints([0, 3] + [-1] * 14, [-1] * 16)
    shared = SharedPages(pages_B=ints(2, 0, 0, 2), members_CM=members, likely_groups=2)
    together = CacheRows(lengths, 64, table_BN=table, shared=shared)
    yield Case("attention, a page a row", lambda: attend(CacheRows(given.range(7), 32), 1, 7), attention)
    yield Case("attention over pages", lambda: attend(CacheRows(lengths, 64, table_BN=table), 2, 9), attention)
    yield Case("attention over FP8", lambda: attend(CacheRows(lengths, 64, table_BN=table), 2, 9, FP8), attention)
    half = torch.float16
    yield Case("attention of float16", lambda: attend(CacheRows(lengths, 64, table_BN=table), 2, 9, half), attention)
    yield Case("attention, contexts that are cut", lambda: attend(long, 2, 80), attention)
    yield Case(
        "attention, prompts read together",
        lambda: attend(together, 2, 9),
        (*attention, "cached_attention.contexts.attend_together"),
    )


def sampling_cases(device: str) -> Iterator[Case]:
    """What follows the LM head in a decode step."""
    from qerl.kernels.sampling import advance_rows, draw_token, keyed_uniforms, truncate

    given, rows = Inputs(device), 5
    logits = given.normal(rows, 3001, dtype=torch.float32)
    draw = ("sampling.triton._block_stats", "sampling.triton._pick")
    books = {name: given.range(rows) + 1 for name in ("last_token_R", "length_R", "count_R", "limit_R", "alive_R")}
    windows = {
        "tokens_WR": torch.zeros(3, rows, dtype=torch.int32, device=device),
        "logprobs_2WR": torch.zeros(2, 3, rows, device=device),
    }
    yield Case("draw_token", lambda: draw_token(logits, torch.rand(rows, device=device), 0.7), draw)
    yield Case("draw_token, arg-max", lambda: draw_token(logits, None, 1.0), draw)
    yield Case("truncate", lambda: truncate(logits, 0.7, top_k=50, top_p=0.9), ("sampling.truncation._truncate",))
    yield Case(
        "keyed_uniforms",
        lambda: keyed_uniforms(given.range(3), given.range(131), given.range(131)),
        ("sampling.triton._uniforms",),
    )
    yield Case(
        "advance_rows",
        lambda: advance_rows(
            given.range(3), logits[0, :3], logits[1, :3], **books, **windows, cursor_1=given.range(1) + 2,
            eos_E=given.range(2),
        ),
        ("sampling.triton._advance",),
    )  # fmt: skip


def layer_cases(device: str) -> Iterator[Case]:
    """Norms, activation, rotation, random numbers, quantization."""
    from qerl.kernels import philox
    from qerl.kernels.activation import silu_mul
    from qerl.kernels.fp4_linear.unpack import unpack
    from qerl.kernels.quantize import mxfp4, quantize
    from qerl.kernels.rms_norm import KeyedNoise, add_rms_norm
    from qerl.kernels.rope import CachePlaces, rope

    given, tokens, width = Inputs(device), 7, 200
    noise = KeyedNoise(
        key_2=torch.tensor(philox.stream_key(1, "noise"), device=device), width=width, c1=3,
        c2_R=given.range(tokens), c3_1=torch.tensor([2], device=device), spread=torch.tensor([0.1], device=device),
    )  # fmt: skip
    angle = torch.rand(32, 32, device=device)
    cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)

    def norm_with_gradient() -> None:
        x, residual, weight = (
            t.requires_grad_()
            for t in (given.normal(tokens, width), given.normal(tokens, width), given.normal(width).float())
        )
        y, stream = add_rms_norm(x, residual, weight, 1e-6, noise)
        (y.float().sum() + stream.float().sum()).backward()

    def rope_with_gradient(qkv: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        outputs = rope(qkv.requires_grad_(), None, cos, sin, 4, 1, dtype=dtype)
        sum(output.float().sum() for output in outputs).backward()

    @torch.no_grad()
    def rope_stored(qkv: torch.Tensor) -> None:
        k, v = (given.normal(48, 64).view(6, 8, 1, 64) for _ in range(2))
        source, place = torch.cat((given.range(32), given.range(5))), given.range(37) + 3
        rope(qkv, None, cos, sin, 4, 1, stored=CachePlaces(k_PLKd=k, v_PLKd=v, source_M=source, place_M=place))

    def unpacked(name: str, inputs: int) -> None:
        unpack(get_format(name).quantize(given.normal(33, inputs)), given.normal(33, inputs))

    yield Case("add_rms_norm and gradient", norm_with_gradient, _both("rms_norm.triton", "_forward", "_backward"))
    yield Case(
        "silu_mul and gradient",
        lambda: silu_mul(given.normal(tokens, 2 * 129).requires_grad_()).float().sum().backward(),
        _both("activation.triton", "_silu", "_silu_gradient"),
    )
    turns = _both("rope.triton", "_forward", "_backward")
    yield Case("rope and gradient", lambda: rope_with_gradient(given.normal(32, 6 * 64)), turns)
    into = torch.float16
    yield Case("rope into float16", lambda: rope_with_gradient(given.normal(32, 6 * 64).float(), into), turns)
    yield Case("rope into a cache", lambda: rope_stored(given.normal(32, 6 * 64)), ("rope.triton._forward",))
    yield Case(
        "normal_rows",
        lambda: philox.normal_rows(1, "noise", 133, c1=given.range(5), c2=7, c3=1),
        ("philox.triton._normal_rows",),
    )
    yield Case(
        "uniform_at", lambda: philox.uniform_at(1, "noise", given.range(133), 7, 1, 2), ("philox.triton._uniform_at",)
    )
    for inputs in (208, 200):
        yield Case(
            f"quantize, {inputs} inputs",
            lambda i=inputs: quantize(given.normal(33, i), "nvfp4"),
            _both("quantize.triton", "_largest", "_quantize"),
        )
    for inputs in (224, 200):
        yield Case(
            f"quantize mxfp4, {inputs} inputs",
            lambda i=inputs: mxfp4.rounded(given.normal(33, i), (33,)),
            ("quantize.mxfp4._quantize_mxfp4",),
        )
    for inputs in (192, 100):
        yield Case(
            f"quantize nf4, scales too, {inputs} inputs",
            lambda i=inputs: quantize(given.normal(33, i), "nf4_dq"),
            _both("quantize.nf4", "_quantize_nf4", "_quantize_scales"),
        )
        yield Case(
            f"quantize fp8, {inputs} inputs",
            lambda i=inputs: quantize(given.normal(33, i), "fp8"),
            ("quantize.fp8._quantize_fp8",),
        )
    yield Case(
        "quantize nvfp4 as torchao does",
        lambda: quantize(given.normal(33, 200), "nvfp4", rounding="torchao"),
        _both("quantize.triton", "_largest", "_quantize"),
    )
    yield Case("unpack mxfp4", lambda: unpacked("mxfp4", 104), ("fp4_linear.unpack._mxfp4",))
    yield Case("unpack nf4", lambda: unpacked("nf4", 100), ("fp4_linear.unpack._nf4",))


def head_cases(device: str) -> Iterator[Case]:
    """Log-probs of the LM head with their gradients, and its logits, in every format of a head."""
    from qerl.kernels.token_logprobs import head_logits, token_choices, token_logprobs

    given = Inputs(device)
    forward = _both("token_logprobs.device", "absorb", "finish")

    def log_probs(head: Any, outputs: int = 1) -> None:
        hidden = given.normal(21, 96).requires_grad_()
        found = token_logprobs(hidden, head, given.range(21))
        torch.autograd.backward([output.sum() for output in found[:outputs]])

    yield Case("token_logprobs and gradient", lambda: log_probs(given.normal(501, 96)), forward)
    yield Case(
        "token_choices",
        lambda: token_choices(
            given.normal(21, 96), given.normal(501, 96), given.range(21), torch.rand(21, device=device), temperature=0.7
        ),
        (*forward, "token_logprobs.draw.pick_part", "token_logprobs.draw.pick_token"),
    )
    yield Case(
        "token_logprobs, gradient of both outputs to the head too",
        lambda: log_probs(given.normal(501, 96).requires_grad_(), 2),
        (*forward, "token_logprobs.device.logits_gradient"),
    )
    few = {"fp8": ("token_logprobs.logits._fp8_logits",), "nvfp4": ("decode", "middle")}
    for name in few if device == "cuda" else ():
        head = get_format(name).quantize(given.normal(501, 96))
        if name == "nvfp4":
            head = get_format(name).for_device(head)
        yield Case(f"{name} head", lambda h=head: [head_logits(given.normal(n, 96), h) for n in (3, 40)], few[name])
        yield Case(f"token_logprobs of a {name} head", lambda h=head: log_probs(h), forward)


def _both(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for name in names)


def triton_cases(device: str) -> Iterator[Case]:
    """Those that need no CUDA C++ kernel; on the CPU, all that run there."""
    for cases in (attention_cases, sampling_cases, layer_cases, kept_cases, head_cases):
        yield from cases(device)


PARTS: dict[str, tuple[Callable[[], Iterator[Case]], ...]] = {
    "nvfp4": (lambda: linear_cases(FORMATS[:1]),),
    "other formats": (lambda: linear_cases(FORMATS[1:]),),
    "fp8": (fp8_cases,),
    "attention": (lambda: attention_cases("cuda"),),
    "step": (lambda: sampling_cases("cuda"), lambda: layer_cases("cuda")),
    "products": (lambda: kept_cases("cuda"), lambda: head_cases("cuda")),
}
"""What a process runs; several, since compiling takes most of the time."""
CUDA_PARTS = ("nvfp4", "other formats", "fp8")
"""Those of the CUDA C++ kernels."""
