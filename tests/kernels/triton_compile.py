"""Compile Triton kernels for GPUs that are not here: calls on CPU tensors are caught at the launch and compiled instead.

    python tests/kernels/triton_compile.py ARCH ...

prints one line a kernel and architecture. Exit status 1 if one does not compile, or has an offset of 32 bits that may not be wide enough (`addresses.py`).
"""

import sys
from dataclasses import replace
from types import SimpleNamespace

import torch
import triton
from addresses import growing_offsets
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from qerl.formats import get_format
from qerl.kernels.activation import triton as activation
from qerl.kernels.cached_attention import FP8, CacheRows, SharedPages
from qerl.kernels.cached_attention import triton as cached_attention
from qerl.kernels.cached_attention.plan import Plan
from qerl.kernels.fp4_linear import AdapterPart, kept, unpack
from qerl.kernels.fp4_linear.adapter import flatten
from qerl.kernels.philox import triton as philox
from qerl.kernels.quantize import fp8, mxfp4, nf4
from qerl.kernels.quantize import triton as quantize
from qerl.kernels.rms_norm import KeyedNoise, TableNoise
from qerl.kernels.rms_norm import triton as rms_norm
from qerl.kernels.rope import CachePlaces, HeadBias, HeadNorms
from qerl.kernels.rope import triton as rope
from qerl.kernels.sampling import triton as sampling
from qerl.kernels.token_logprobs import logits
from qerl.kernels.token_logprobs import triton as token_logprobs
from qerl.kernels.token_logprobs.choices import Wanted

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
    FP8: "*fp8e4nv",
    torch.uint8: "*u8",
}

NARROW = {
    "token_logprobs.logits._fp8_logits": "token * width of at most 256 tokens",
    "cached_attention.contexts.attend": "pages of one row: its length over the page's",
    "cached_attention.contexts.attend_together": "as `attend`",
    "fp4_linear.kept._product": "row of B * rank, of an adapter; runs of one tile's inputs, at most a few",
}
"""Kernel -> why an offset of 32 bits that is a product of two numbers is wide enough."""

FIRST_FP8, FIRST_OVERLAP = 89, 90
"""Architectures that convert FP8, and that know overlapping launches."""


def signature_of(function: JITFunction, arguments: tuple, options: dict) -> tuple[dict, dict]:
    """(name -> type, name -> value of what is known at compile time)."""
    types, known = {}, {}
    given = dict(zip([p.name for p in function.params], arguments, strict=False)) | options
    for parameter in function.params:
        value = given[parameter.name]
        if parameter.is_constexpr or value is None:
            types[parameter.name], known[parameter.name] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            types[parameter.name] = f"tensordesc<{TYPES[value.base.dtype][1:]}{value.block_shape}>"
        elif isinstance(value, torch.Tensor):
            types[parameter.name] = TYPES[value.dtype]
        else:
            types[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    return types, known


def catch(archs: list[int], failures: list[str]) -> None:
    """Replace launches by compilation."""
    done = set()

    def run(self, *arguments, grid, warmup, **options):
        types, known = signature_of(self, arguments, options)
        names = {p.name for p in self.params}
        flags = {name: value for name, value in options.items() if name not in names}
        for arch in archs:
            if arch < FIRST_FP8 and "*fp8e4nv" in types.values():
                continue
            if "OVERLAP" in known and arch >= FIRST_OVERLAP:
                known, flags = known | {"OVERLAP": True}, flags | {"launch_pdl": True}
            key = (self.__name__, arch, str(types), str(known), str(flags))
            if key in done:
                continue
            done.add(key)
            try:
                source = ASTSource(self, types, known, {})
                binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=flags)
            except Exception as error:  # noqa: BLE001 - any failure to compile is the finding
                failures.append(f"{self.__module__}.{self.__name__} for sm_{arch}: {str(error)[-1500:]}")
                continue
            name = f"{self.__module__.removeprefix('qerl.kernels.')}.{self.__name__}"
            if name not in NARROW and (offsets := growing_offsets(binary.asm["ttir"])):
                failures.append(f"{name} has offsets of 32 bits that grow with its inputs:\n" + "\n".join(offsets))
            print(f"sm_{arch} {name}: {binary.metadata.shared} bytes of shared memory")

    JITFunction.run = run


def calls() -> None:
    """Every kernel, in its larger forms."""
    tokens, width = 4, 3584
    x, weight = torch.randn(tokens, width).bfloat16(), torch.ones(width)
    key = torch.zeros(2, dtype=torch.int64)
    rows, noisy = torch.arange(tokens), torch.ones(tokens, dtype=torch.bool)
    keyed = {"key_2": key, "width": width, "c1": 3, "c2_R": rows, "c3_1": rows[:1]}
    forms = (
        None,
        TableNoise(z_RD=torch.zeros(2, width), rows_T=rows // 2, noisy_T=noisy),
        KeyedNoise(**keyed, spread=weight, c1_R=rows, noisy_T=noisy),
        KeyedNoise(**keyed, spread=weight, rows_T=rows, noisy_T=noisy),
    )
    rms_norm.add_forward(x, x, weight, 1e-6, TableNoise(z_RD=x.float()), x.dtype)
    for noise in forms:
        _, stream, inverse = rms_norm.add_forward(x.float(), x.float(), weight, 1e-6, noise, x.dtype)
        rms_norm.backward(x, stream, weight, inverse, noise, stream, needs_weight=noise is not None)
    for inputs in (256, 40):
        quantize.rounded(torch.ones(8, inputs).bfloat16(), (8,), fused=True)
        mxfp4.rounded(torch.ones(8, inputs).bfloat16(), (8,), fused=True)
        nf4.rounded(torch.ones(9, inputs).bfloat16(), (9,), doubly=False)
    for converts in (True, False):
        fp8.rounded(torch.ones(8, width).bfloat16(), (8,), converts=converts)
    fp8.rounded(torch.ones(1, fp8.LONGEST_ROW), (1,), converts=True)
    nf4.rounded(torch.ones(512, 64), (200, 312), doubly=True)
    quantize.rounded(torch.ones(8, 256).bfloat16(), (8,), "torchao")
    mxfp4.rounded(torch.ones(8, 256).bfloat16(), (8,), "torchao")
    philox.normal_rows((1, 2), width, rows, 3, 4)
    philox._MANY = 0
    philox.normal_rows((1, 2), width, rows, 3, 4)
    philox.uniform_at((1, 2), (rows, rows, rows, rows))
    activation.backward(activation.forward(x), x)
    cos = torch.zeros(tokens, 128)
    qkv = torch.randn(tokens, 6 * 128).bfloat16()
    norms = HeadNorms(q_weight_d=weight[:128], k_weight_d=weight[:128], eps=1e-6, q_noise=weight[:128])
    leaf = qkv.clone().requires_grad_()
    outputs = rope.rope(leaf, rows, cos, cos, 4, 1, norms)
    torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
    with torch.no_grad():
        rope.rope(qkv, rows, cos, cos, 4, 1, None, HeadBias(bias_X=qkv[0], shift_Kd=cos[:1]))
        slabs = [torch.zeros(2, 64, 1, 128, dtype=torch.float16) for _ in range(2)]
        stored = CachePlaces(k_PLKd=slabs[0], v_PLKd=slabs[1], source_M=rows, place_M=rows)
        bias = HeadBias(bias_X=qkv[0], shift_Kd=cos[:1])
        rope.rope(qkv.float(), None, cos, cos, 4, 1, None, bias, torch.float16, stored)
    for given, added in ((norms, None), (None, HeadBias(bias_X=qkv[0], shift_Kd=cos[:1]))):
        leaf = qkv.float().requires_grad_()
        outputs = rope.rope(leaf, None, cos, cos, 4, 1, given, added, torch.float16)
        torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
    for name in unpack.FORMATS:
        packed = get_format(name).quantize(torch.randn(4, 256))
        unpack.unpack(packed, torch.empty(4, 256).bfloat16())
    logits.fp8_logits(x, get_format("fp8").quantize(torch.randn(512, width)))
    head, hidden = torch.randn(8000, 64).bfloat16(), torch.randn(tokens, 64).bfloat16().requires_grad_()
    logp, entropy = token_logprobs.token_logprobs(hidden, head, None, rows, 1.0, None)
    (logp.sum() + entropy.sum()).backward()
    wanted = Wanted.of(tokens, torch.full((tokens,), 0.5), torch.float32, head.device)
    token_logprobs.token_logprobs(hidden.detach(), head, None, rows, 0.7, None, wanted)
    decode_calls(rows)
    kept_calls()


def kept_calls() -> None:
    """The product with kept values, in each of its shapes, with and without adapters, and with blocks that share a tile."""
    kept.workspace = lambda device: SimpleNamespace(counters=lambda: torch.zeros(1, dtype=torch.int32))
    x, values, bias = torch.zeros(64, 512).bfloat16(), torch.zeros(512, 512).bfloat16(), torch.zeros(512).bfloat16()
    part = AdapterPart(start=0, stop=512, a_RI=values[:32], b_OR=torch.zeros(512, 32).bfloat16(), scale=1.0)
    for shape in kept.SHAPES:
        for parts, splits, added in (([part], 1, bias), ([part], 2, None), ([], 1, None)):
            placements, a, b = flatten(parts)
            pieces = (kept.Piece(512, 1.0, len(parts) - 1),)
            kept.run(x, values, added, pieces, placements, a, b, replace(shape, splits=splits))


def decode_calls(rows: torch.Tensor) -> None:
    """The kernels of a decode step alone."""
    table = torch.ones(4, 2, dtype=torch.int32)
    qkv, cos, cache = torch.zeros(4, 36 * 128).bfloat16(), torch.zeros(4, 128), torch.zeros(4, 64, 4, 128).bfloat16()
    paged, plain = CacheRows(rows, 64, table_BN=table), CacheRows(rows, 64)
    norms = HeadNorms(q_weight_d=cos[0], k_weight_d=cos[0], eps=1e-6, q_noise=cos)
    whole, cut = Plan(first=1, most=1, programs=20), Plan(first=64, most=64, programs=256)
    bias = HeadBias(bias_X=qkv[0], shift_Kd=cos)
    for plan, given, added in ((whole, None, None), (whole, None, bias), (cut, norms, None), (cut, None, bias)):
        cached_attention.cached_attention(qkv, (cos, cos), 28, 4, cache, cache, paged, 0.1, given, plan, bias=added)
        shared = SharedPages(pages_B=table[:, 0], members_CM=table[:2].repeat(1, 4), likely_groups=2)
        together = CacheRows(rows, 64, table_BN=table, shared=shared)
        cached_attention.cached_attention(qkv, (cos, cos), 28, 4, cache, cache, together, 0.1, given, plan, bias=added)
    cached_attention.cached_attention(qkv, (cos, cos), 28, 4, cache.to(FP8), cache.to(FP8), paged, 0.1, norms, cut)
    cached_attention.cached_attention(
        qkv.float(), (cos, cos), 28, 4, cache.float(), cache.float(), plain, 0.1, None, whole
    )
    half, types = cache.half(), {"dtype": torch.float16, "output_dtype": torch.bfloat16}
    for plan, given, added, where in (
        (whole, None, bias, together),
        (cut, norms, None, paged),
        (cut, None, bias, plain),
    ):
        cached_attention.cached_attention(
            qkv.float(), (cos, cos), 28, 4, half, half, where, 0.1, given, plan, bias=added, **types
        )
    cached_attention.cached_attention(
        qkv.float(), (cos, cos), 28, 4, half, half.to(FP8), paged, 0.1, None, cut, bias=bias, **types
    )
    logits, uniforms = torch.zeros(4, 151936), torch.full((4,), 0.5)
    tokens, logprobs = sampling.draw_token(logits, uniforms, torch.ones(1, dtype=torch.float64))
    sampling.draw_token(logits, None, 1.0)
    sampling.truncate(logits, 1.0, 20, 0.9, 0.1)
    sampling.keyed_uniforms(rows[:3], rows, rows)
    books = {name: rows.clone() for name in ("last_token_R", "length_R", "count_R", "limit_R", "alive_R")}
    windows = {"tokens_WR": torch.zeros(8, 4, dtype=torch.int32), "logprobs_2WR": torch.zeros(2, 8, 4)}
    sampling.advance_rows(tokens, logprobs, logprobs, **books, **windows, cursor_1=rows[:1], eos_E=rows[:2])


if __name__ == "__main__":
    failures: list[str] = []
    catch([int(arch) for arch in sys.argv[1:]], failures)
    calls()
    print(*failures, sep="\n\n")
    sys.exit(bool(failures))
