"""The CUDA sources compile for every architecture that is claimed, without spilling; the cache and its errors."""

import shutil
import subprocess

import pytest

from qerl.errors import KernelUnavailableError
from qerl.kernels.cuda import compiler
from qerl.kernels.fp4_linear.workspace import compile_source

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")
SOURCES = [("dequantize", {}), ("probe", {})] + [
    ("decode", {"NT": columns, "WARPS": 12, "STAGES": 6, "CLUSTER": cluster}) for columns, cluster in ((1, 1), (2, 1))
]
CLUSTERS = [("decode", {"NT": 2, "WARPS": 12, "STAGES": 6, "CLUSTER": cluster}) for cluster in (2, 8)]

needs_compiler = pytest.mark.skipif(
    compiler.load_nvrtc() is None and compiler.find_nvcc() is None, reason="neither NVRTC nor nvcc is installed"
)


@needs_compiler
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_sources_compile(arch, tmp_path, monkeypatch):
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    for name, defines in SOURCES + (CLUSTERS if arch >= "sm_90" or arch.startswith("sm_1") else []):
        code = compile_source(name, arch, defines)
        assert code[:4] == b"\x7fELF"
        # The second time there is nothing to compile.
        monkeypatch.setattr(compiler.Nvcc, "compile", None)
        monkeypatch.setattr(compiler.Nvrtc, "compile", None)
        assert compile_source(name, arch, defines) == code
        monkeypatch.undo()
        monkeypatch.setenv("QERL_CACHE", str(tmp_path))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="the resource report needs nvcc")
def test_the_decode_kernel_spills_nothing(tmp_path):
    folder = compiler.Path(__file__).parents[2] / "qerl" / "kernels" / "fp4_linear" / "cuda"
    text = "".join((folder / name).read_text("utf-8") for name in ("tile.cuh", "decode.cu"))
    source = tmp_path / "decode.cu"
    source.write_text(text, encoding="utf-8")
    macros = ["-DNT=2", "-DWARPS=12", "-DSTAGES=6", "-DCLUSTER=8"]
    command = ["nvcc", "-cubin", "-arch=sm_90", "-Xptxas", "-v", *macros, "-o", str(tmp_path / "out"), str(source)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "0 bytes spill stores" in report


def test_without_a_compiler_the_error_names_the_choices(monkeypatch):
    monkeypatch.setattr(compiler, "load_nvrtc", lambda: None)
    monkeypatch.setattr(compiler, "find_nvcc", lambda: None)
    compiler._compiler.cache_clear()
    try:
        with pytest.raises(KernelUnavailableError, match=r"no compiler.*NVRTC or nvcc.*kernel=reference"):
            compiler.compile_cuda("", name="k", arch="sm_90a")
    finally:
        compiler._compiler.cache_clear()


@needs_compiler
def test_a_source_that_does_not_compile_shows_the_compilers_words(tmp_path, monkeypatch):
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    with pytest.raises(KernelUnavailableError, match=r"kernel broken does not compile for sm_90a.*error"):
        compiler.compile_cuda("int f( {", name="broken", arch="sm_90a")
    assert not list(tmp_path.rglob("*.cubin"))
