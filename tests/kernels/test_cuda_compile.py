"""The CUDA sources compile for every architecture that is claimed, without spilling; the cache and its errors."""

import hashlib
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from qerl.errors import KernelUnavailableError
from qerl.kernels.cuda import compiler
from qerl.kernels.fp4_linear import decode, dense, middle, shrink
from qerl.kernels.fp4_linear.geometry import decode_geometry
from qerl.kernels.fp4_linear.tiled import TILED
from qerl.kernels.fp4_linear.workspace import compile_source, whole_source

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")


def decode_macros(columns: int, cluster: int, name: str = "nvfp4", *, vectors: bool = True) -> dict[str, int]:
    """As a launch for 8 * columns rows of x has them."""
    shape = decode_geometry(
        8 * columns, (4608, 3584), 0, cluster=cluster, clusters=128 // cluster, limit=232448, ring=4
    )
    assert shape is not None
    return decode.macros(shape, name, vectors)


DEVICE = SimpleNamespace(multiprocessors=132, shared_limit=232448, resident_clusters=lambda launch: 66)
PLAIN = [
    source
    for name in TILED
    for source in (("dequantize", dense.macros(name), ""), ("decode", decode_macros(2, 1, name), ""))
]
PLAIN += [("decode", decode_macros(1, 1, vectors=False), "")]
CLUSTERS = [("decode", decode_macros(2, 8, name), "") for name in TILED]
HOPPER = [
    ("probe", {}, ""),
    ("decode", decode_macros(4, 2), ""),
    ("shrink", shrink.macros(), ""),
    *(
        ("middle", middle.macros(shape), middle.wgmma_source(shape.tokens))
        for shape in (
            *(
                middle.choose(*size, 56, DEVICE)
                for size in ((32, 2368), (64, 224), (64, 2368), (128, 2368), (256, 224))
            ),
            *(middle.choose(64, 2368, 56, DEVICE, name) for name in TILED),
            *(middle.choose(tokens, 9496, 14, DEVICE, "fp8") for tokens in (32, 96, 256)),
            middle.choose(32, 2368, 56, DEVICE, rank=128),
            middle.choose(256, 224, 56, DEVICE, rank=64),
        )
    ),
    *(
        ("middle", middle.macros(shape), middle.wgmma_source(shape.tokens))
        for shape in (middle.choose(tokens, 288, 56, DEVICE) for tokens in (128, 256))
    ),
]


def sources_for(arch: str):
    """What a device of the architecture is given."""
    return PLAIN + (CLUSTERS if arch.endswith("a") else []) + (HOPPER if arch == "sm_90a" else [])


needs_compiler = pytest.mark.skipif(not compiler.has_compiler(), reason="neither NVRTC nor nvcc is installed")


@needs_compiler
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_sources_compile(arch):
    """Into the user's cache: only a change is compiled again."""
    for name, defines, extra in sources_for(arch):
        assert compile_source(name, arch, defines, extra)[:4] == b"\x7fELF"


@needs_compiler
def test_the_second_time_nothing_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    code = compile_source("probe", "sm_90a", {})
    monkeypatch.setattr(compiler.Nvcc, "compile", None)
    monkeypatch.setattr(compiler.Nvrtc, "compile", None)
    assert compile_source("probe", "sm_90a", {}) == code


def assembler_report(text: str, macros: dict[str, int], target: str, folder: Path) -> str:
    """What the assembler says of registers and spills. Kept beside the machine code: only a change is compiled again."""
    flags = ["-cubin", target, "-Xptxas", "-v", *(f"-D{key}={value}" for key, value in macros.items())]
    key = hashlib.sha256("\0".join((text, *flags, compiler.Nvcc("nvcc").version)).encode()).hexdigest()[:24]
    kept = compiler.cache_folder() / f"report-{key}.txt"
    if kept.exists():
        return kept.read_text(encoding="utf-8")
    source = folder / "source.cu"
    source.write_text(text, encoding="utf-8")
    command = ["nvcc", *flags, "-o", str(folder / "out"), str(source)]
    report = subprocess.run(command, capture_output=True, check=True).stderr
    compiler._write(kept, report)
    return report.decode()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="the resource report needs nvcc")
@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("name", TILED)
def test_the_decode_loop_keeps_its_values_in_registers(name, columns, tmp_path):
    """Two registers outside the loop, stored in a few places, are let through; an array in local memory would be hundreds of bytes."""
    report = assembler_report(whole_source("decode"), decode_macros(columns, 8, name), "-arch=sm_90", tmp_path)
    assert int(re.search(r"(\d+) bytes spill stores", report)[1]) <= 32


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="the resource report needs nvcc")
@pytest.mark.parametrize(("tokens", "row_tiles"), [(64, 2368), (256, 224)])
@pytest.mark.parametrize(("name", "rank"), [*((name, 32) for name in TILED), ("nvfp4", 128)])
def test_the_middle_kernel_expands_weights_while_products_are_under_way(name, rank, tokens, row_tiles, tmp_path):
    """The assembler says when it makes products wait for one another; and sums of 128 registers leave little for the end of a tile."""
    shape = middle.choose(tokens, row_tiles, 56, DEVICE, name, rank)
    text = whole_source("middle", middle.wgmma_source(shape.tokens))
    report = assembler_report(text, middle.macros(shape), "-gencode=arch=compute_90a,code=sm_90a", tmp_path)
    assert "serialized" not in report
    assert int(re.search(r"(\d+) bytes spill stores", report)[1]) <= 256


@needs_compiler
def test_a_source_that_does_not_compile_shows_the_compilers_words(tmp_path, monkeypatch):
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    with pytest.raises(KernelUnavailableError, match=r"kernel broken does not compile for sm_90a.*error"):
        compiler.compile_cuda("int f( {", name="broken", arch="sm_90a")
    assert not list(tmp_path.rglob("*.cubin"))
