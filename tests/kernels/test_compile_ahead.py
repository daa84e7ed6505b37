"""What is compiled before the first step is what products of every number of rows run: all of it, and nothing else."""

import triton_cpu  # isort: skip  (before any module with kernels)

import random
from types import SimpleNamespace

import pytest
import torch
from pretended import pretend
from specialization import recorded
from triton.runtime._async_compile import active_mode

from qerl.formats import PackedWeight
from qerl.kernels.fp4_linear import (
    AdapterPart,
    Layer,
    ahead,
    compile_ahead,
    cuda,
    decode,
    dense,
    kept,
    middle,
    regimes,
    shrink,
)
from qerl.kernels.fp4_linear.adapter import flatten
from qerl.kernels.fp4_linear.workspace import Code

assert triton_cpu
MODELS = {"0.5B": (896, 4864, 896, 128), "7B": (3584, 18944, 3584, 512)}
"""Hidden size, width of the MLP, rows of q, rows of k and of v."""
ROWS = 4200


@pytest.fixture
def hopper(monkeypatch):
    """An H200 as far as choices ask for one; gives what was compiled and what was loaded."""
    pretend(monkeypatch)
    monkeypatch.setattr(ahead, "architecture", lambda device: "sm_90a")
    done = SimpleNamespace(compiled=[], loaded=[])

    def compile_source(name, arch, defines, extra, *, quiet):
        assert arch == "sm_90a" and quiet
        done.compiled.append(Code(name, tuple(defines.items()), extra))

    monkeypatch.setattr(ahead, "compile_source", compile_source)
    monkeypatch.setattr(ahead, "compiled", lambda device, *code: done.loaded.append(Code(*code)))
    return done


def layer(segments, d_in, members, dtype, *, keep, rank=32):
    """Of zeros, with an adapter for each member."""
    d_out, stops = sum(segments), [sum(members[: i + 1]) for i in range(len(members))]
    tensors = {
        "tiles": torch.empty(-(-d_out // 16), -(-d_in // 64), 576, dtype=torch.uint8),
        "global_scale": torch.ones(len(segments)),
    }
    values = torch.empty(d_out, d_in, dtype=torch.bfloat16) if keep else None
    a = torch.empty(rank * len(members), d_in, dtype=torch.bfloat16)
    parts = [
        AdapterPart(
            start=stop - rows, stop=stop, a_RI=a, b_OR=torch.empty(rows, rank, dtype=torch.bfloat16), scale=1.0,
            rank_start=rank * index,
        )
        for index, (rows, stop) in enumerate(zip(members, stops, strict=True))
    ]  # fmt: skip
    if keep == "bf16":
        weight = PackedWeight(format=keep, shape=(d_out, d_in), tensors={"weight": values}, segments=segments)
        weight = dense.keep(weight)
    else:
        weight = PackedWeight(
            format="nvfp4", shape=(d_out, d_in), tensors=tensors, segments=segments, order="tiles", kept_OI=values
        )
    return Layer(weight=weight, bias_O=None, adapters=parts, dense_OI=None, dtype=dtype)


def layers_of(name, keep):
    hidden, mlp, q, k = MODELS[name]
    narrow, wide = torch.bfloat16, torch.float32
    return [
        layer((q, k, k), hidden, (q, k, k), narrow, keep=keep),
        layer((hidden,), q, (hidden,), wide, keep=keep),
        layer((mlp, mlp), hidden, (mlp, mlp), narrow, keep=keep),
        layer((hidden,), mlp, (hidden,), wide, keep=keep),
    ]


def met(layers, rows):
    """Code that products of these numbers of rows run; kernels of kept values are launched, for whoever records that."""
    codes = set()
    for item in layers:
        placements, a_RI, b_OR = flatten(item.adapters)
        whole = torch.empty(max(rows), item.weight.shape[1], dtype=torch.bfloat16)
        for count in rows:
            x = whole[:count]
            regime = cuda.regime_of(x, item.weight, placements, a_RI, b_OR)
            if regime == regimes.DECODE:
                codes.add(decode.code(x, item.weight, a_RI))
            elif regime == regimes.MIDDLE:
                codes.add(middle.code(x, item.weight, placements))
            elif regime == regimes.KEPT:
                kept.product(x, item.weight, None, placements, a_RI, b_OR, dtype=item.dtype)
    return codes


@pytest.mark.parametrize(("name", "keep"), [("0.5B", True), ("0.5B", False), ("7B", False), ("0.5B", "bf16")])
def test_products_of_any_number_of_rows_run_what_was_compiled_ahead(hopper, capsys, name, keep):
    layers = layers_of(name, keep)
    with recorded() as ready:
        compile_ahead(layers, 16384)
    edges = [edge + by for edge in (8, 16, 32, 64, 96, 128, 256, 512, 768, 1024, 2048, 4096) for by in (-1, 0, 1)]
    rows = sorted({1, *edges, *random.Random(0).sample(range(1, ROWS), 60)})
    with recorded() as variants:
        codes = met(layers, rows)
    assert codes == {code for code in hopper.loaded if code.name in ("decode", "middle")}
    assert variants.keys == ready.keys
    assert sorted(hopper.compiled) == sorted(hopper.loaded) and len(set(hopper.loaded)) == len(hopper.loaded)
    assert ("dequantize" in {code.name for code in hopper.loaded}) == (keep != "bf16")
    assert bool(variants.keys) == bool(keep)
    # Triton compiles nothing here, so that what it has to is not told.
    told = "kernels of linear layers for any number of tokens:" in capsys.readouterr().err
    assert told == bool(hopper.loaded) == (keep != "bf16")


def test_a_pass_of_few_rows_needs_no_code_of_many(hopper):
    compile_ahead(layers_of("7B", False), 64)
    assert {dict(code.defines).get("TOKENS") for code in hopper.loaded if code.name == "middle"} == {32, 64}


def test_adapters_of_more_than_32_ranks_have_as_many_kernels(hopper):
    """Others, with places for more of them, in the place of those of rank 32."""
    found = []
    for rank in (32, 128):
        hopper.loaded.clear()
        layers = [layer((4608,), 3584, (4608,), torch.bfloat16, keep=False, rank=rank)]
        compile_ahead(layers, 4096)
        codes = {code for code in hopper.loaded if code.name == "middle"}
        assert codes == {code for code in met(layers, range(1, 4097, 8)) if code.name == "middle"}
        found.append(codes)
    assert len(found[0]) == len(found[1]) and not found[0] & found[1]
    assert {dict(code.defines)["PLACES"] for code in found[0]} == {1}
    assert {dict(code.defines)["PLACES"] for code in found[1]} == {2, 4}


@pytest.mark.parametrize("failing", ["triton", "cuda"])
def test_a_kernel_that_is_not_made_leaves_nothing_behind(hopper, monkeypatch, capsys, failing):
    """Triton would go on handing compilations to threads that are gone, and keep the failure in the kernel's place."""
    forgotten = []
    monkeypatch.setattr(kept, "forget", lambda: forgotten.append(True))

    def refuse(*args, **options):
        raise RuntimeError("no room")

    def compile_call(*args, **options):
        active_mode.get().submit(len(forgotten), refuse, lambda kernel: None)

    if failing == "triton":
        monkeypatch.setattr(kept, "compile_call", compile_call)
    else:
        monkeypatch.setattr(ahead, "compile_source", refuse)
    with pytest.raises(RuntimeError, match="no room"):
        compile_ahead(layers_of("0.5B", failing == "triton"), 300)
    assert active_mode.get() is None and forgotten and capsys.readouterr().err.endswith("not made\n")


def test_every_kernel_is_asked_for_under_the_name_it_was_loaded_by(monkeypatch):
    """Not doing so loads it twice, the second time in the middle of a step."""
    asked = []

    class Asked(Exception):
        pass

    def compiled(device, *code):
        asked.append(code)
        raise Asked

    monkeypatch.setattr(dense, "compiled", compiled)
    monkeypatch.setattr(shrink, "compiled", compiled)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: regimes.HOPPER)
    space = SimpleNamespace(multiprocessors=132, device=torch.device("cpu"))
    monkeypatch.setattr(dense, "workspace", lambda device: space)
    item = layers_of("0.5B", False)[1]
    x = torch.zeros(64, 896, dtype=torch.bfloat16)
    for call in (lambda: dense.dequantize_tiles(item.weight, x), lambda: shrink.shrink(x, item.adapters[0].a_RI)):
        with pytest.raises(Asked):
            call()
    assert asked == [dense.code("nvfp4"), shrink.code()]


def test_layers_that_other_kernels_multiply_need_none(hopper, capsys):
    plain = layers_of("0.5B", False)[:1]
    compile_ahead([Layer(
        weight=plain[0].weight, bias_O=None, adapters=(), dtype=torch.bfloat16,
        dense_OI=torch.empty(plain[0].weight.shape, dtype=torch.bfloat16),
    )], 4096)  # fmt: skip
    assert not hopper.loaded and not capsys.readouterr().err
