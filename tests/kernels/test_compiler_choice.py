"""Which compiler makes the CUDA kernels: NVRTC, or nvcc where NVRTC is missing, broken or too old; and what is said where neither does."""

import ctypes
import stat
import sys
from pathlib import Path

import pytest

from qerl.errors import KernelUnavailableError
from qerl.kernels.cuda import compiler

ELF = b"\x7fELF"
TOO_OLD = "nvrtc: error: invalid value for --gpu-architecture (-arch)"
KERNEL = 'extern "C" __global__ void k(float* out) { out[threadIdx.x] = SCALE; }'


class FakeNvrtc:
    """NVRTC's C interface: knows some architectures, and finds a fault in whatever holds the word FAULT."""

    def __init__(self, version=(12, 4), known=("sm_90a",), broken=None):
        self.version, self.known, self.broken = version, known, broken
        self.sources, self.log = [], b""

    def nvrtcVersion(self, major, minor):
        major._obj.value, minor._obj.value = self.version
        return 0

    def nvrtcCreateProgram(self, program, source, name, count, headers, names):
        self.sources.append(source)
        return 0

    def nvrtcCompileProgram(self, program, count, options):
        arch = next(option for option in options if option.startswith(b"--gpu-architecture="))
        if self.broken:
            self.log = self.broken.encode()
            return 7
        if arch.split(b"=")[1].decode() not in self.known:
            self.log = TOO_OLD.encode()
            return 5
        self.log = b"k.cu(1): error: a FAULT"
        return 6 if b"FAULT" in self.sources[-1] else 0

    def nvrtcGetProgramLogSize(self, program, size):
        size._obj.value = len(self.log) + 1
        return 0

    def nvrtcGetProgramLog(self, program, log):
        log.value = self.log
        return 0

    def nvrtcGetCUBINSize(self, program, size):
        size._obj.value = len(ELF) + 5
        return 0

    def nvrtcGetCUBIN(self, program, code):
        code.raw = ELF + b"nvrtc"
        return 0

    def nvrtcDestroyProgram(self, program):
        return 0


NVCC = """#!{python}
import sys
if "--version" in sys.argv:
    print("Cuda compilation tools, release {release}, V{release}.1")
elif not any(known in " ".join(sys.argv) for known in {known!r}):
    sys.exit("nvcc fatal   : Unsupported gpu architecture")
else:
    open(sys.argv[sys.argv.index("-o") + 1], "wb").write(b"\\x7fELFnvcc")
"""


def fake_nvcc(folder: Path, release="13.0", known=("compute_90a", "compute_120a")) -> str:
    path = folder / "nvcc"
    path.write_text(NVCC.format(python=sys.executable, release=release, known=known), encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with the given libraries (name -> what loading it gives) and programs, and an empty cache."""

    def give(libraries=None, programs=()):
        def load(name):
            found = (libraries or {}).get(name, f"{name}: cannot open shared object file: No such file or directory")
            if isinstance(found, str):
                raise OSError(found)
            return found

        monkeypatch.setenv("QERL_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(ctypes, "CDLL", load)
        monkeypatch.setattr(compiler, "_wheel_libraries", lambda: iter(()))
        monkeypatch.setattr(compiler, "find_nvcc", lambda: tuple(programs))

    _forget()
    yield give
    _forget()


def _forget():
    for cached in (compiler._nvrtc, compiler._nvcc, compiler._unfit):
        cached.cache_clear()


def compiled(arch: str, source: str = KERNEL) -> bytes:
    return compiler.compile_cuda(source, name="k", arch=arch, defines={"SCALE": 2})


def test_nvrtc_is_preferred_and_the_line_of_progress_names_it(machine, tmp_path, capfd):
    machine({"libnvrtc.so.12": FakeNvrtc()}, [fake_nvcc(tmp_path)])
    assert compiled("sm_90a") == ELF + b"nvrtc"
    assert "the CUDA kernel k (-DSCALE=2) for sm_90a by NVRTC 12.4 " in capfd.readouterr().err


def test_nvrtc_too_old_for_the_device_gives_way_to_nvcc_and_the_line_says_why(machine, tmp_path, capfd):
    machine({"libnvrtc.so.12": FakeNvrtc()}, [fake_nvcc(tmp_path)])
    assert compiled("sm_120a") == ELF + b"nvcc"
    said = capfd.readouterr().err
    assert "for sm_120a by nvcc (" in said and "release 13.0" in said
    assert f"not NVRTC 12.4 ({TOO_OLD})" in said
    assert compiled("sm_120a") == ELF + b"nvcc"
    assert capfd.readouterr().err == "", "the second time it comes from the cache"


def test_a_newer_nvrtc_behind_an_old_one_is_preferred_to_nvcc(machine, tmp_path):
    new = FakeNvrtc((12, 9), ("sm_120a",))
    machine({"libnvrtc.so.12": FakeNvrtc(), "libnvrtc.so": new}, [fake_nvcc(tmp_path)])
    assert compiled("sm_120a") == ELF + b"nvrtc"
    assert len(new.sources) == 2, "an empty kernel, and the kernel"


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        ("libnvrtc.so.13: invalid ELF header", "invalid ELF header"),
        (object(), "nvrtcVersion"),
        (FakeNvrtc((13, 0), broken="nvrtc: error: failed to open libnvrtc-builtins.so.13.0."), "libnvrtc-builtins"),
    ],
    ids=["does not load", "lacks a function", "lacks its other half"],
)
def test_a_broken_nvrtc_gives_way_to_nvcc(machine, tmp_path, capfd, library, reason):
    machine({"libnvrtc.so.13": library}, [fake_nvcc(tmp_path)])
    assert compiled("sm_90a") == ELF + b"nvcc"
    said = capfd.readouterr().err
    assert "by nvcc" in said and "not NVRTC" in said and reason in said


def test_a_fault_of_the_source_is_told_as_nvrtcs_and_not_asked_of_nvcc(machine, tmp_path):
    machine({"libnvrtc.so.12": FakeNvrtc()}, [fake_nvcc(tmp_path)])
    with pytest.raises(KernelUnavailableError, match=r"kernel k does not compile for sm_90a by NVRTC 12\.4.*a FAULT"):
        compiled("sm_90a", "FAULT")
    assert not list(tmp_path.rglob("*.cubin"))


def test_where_neither_knows_the_device_one_error_has_what_both_said(machine, tmp_path):
    (tmp_path / "other").mkdir()
    no_program = tmp_path / "other" / "nvcc"
    programs = [fake_nvcc(tmp_path, "12.2", ("compute_90a",)), str(no_program)]
    machine({"libnvrtc.so.12": FakeNvrtc(), "libnvrtc.so": "libnvrtc.so: file too short"}, programs)
    with pytest.raises(KernelUnavailableError) as caught:
        compiled("sm_120a")
    said = str(caught.value)
    assert said.startswith("no compiler here makes CUDA kernels for sm_120a; got ")
    assert f"NVRTC 12.4: {TOO_OLD}" in said and "NVRTC (libnvrtc.so): libnvrtc.so: file too short" in said
    assert "release 12.2" in said and "Unsupported gpu architecture" in said
    assert f"nvcc ({no_program}): [Errno 2]" in said
    assert "expected NVRTC or nvcc" in said and "pip install" in said and "CUDA_HOME" in said
    assert said.endswith("kernel=reference.")


def test_without_a_compiler_the_error_names_both(machine):
    machine()
    assert not compiler.has_compiler()
    with pytest.raises(
        KernelUnavailableError, match=r"NVRTC: not found; nvcc: not found; .*NVRTC or nvcc.*kernel=reference"
    ):
        compiled("sm_90a")


def test_the_nvcc_of_cuda_home_is_found_behind_that_of_the_path(tmp_path, monkeypatch):
    found = []
    for name in ("path", "home/bin"):
        (tmp_path / name).mkdir(parents=True)
        found.append(fake_nvcc(tmp_path / name))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert compiler.find_nvcc() == tuple(found)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    assert compiler.find_nvcc() == tuple(found[:1])


@pytest.mark.skipif(not compiler.find_nvcc(), reason="needs nvcc")
def test_the_real_nvcc_takes_over_from_an_nvrtc_that_does_not_know_the_device(machine, monkeypatch, capfd):
    programs = compiler.find_nvcc()
    machine({"libnvrtc.so.12": FakeNvrtc(known=())}, programs)
    assert compiled("sm_90a")[:4] == ELF
    assert f"by nvcc ({programs[0]}" in capfd.readouterr().err
    with pytest.raises(KernelUnavailableError, match=rf"{TOO_OLD.split('(')[0]}.*; nvcc .*[Uu]nsupported gpu"):
        compiled("sm_999a")
    with pytest.raises(KernelUnavailableError, match=r"does not compile for sm_90a by nvcc .*error"):
        compiled("sm_90a", "int f( {")


REAL = [str(path) for path in compiler._wheel_libraries()]


@pytest.mark.skipif(not REAL, reason="needs the NVRTC of a wheel")
def test_the_real_nvrtc_says_what_it_does_not_know_and_what_is_wrong_with_a_source():
    """By the path of its file, where CUDA 13's does not find its other half by itself."""
    found = compiler._nvrtc(REAL[-1])
    assert isinstance(found, compiler.Nvrtc), found
    assert compiler._unfit(found, "sm_90a") is None
    assert "gpu-architecture" in compiler._unfit(found, "sm_999a")
    assert found.compile(KERNEL, "k", "sm_90a", ("-DSCALE=2",))[:4] == ELF
    with pytest.raises(KernelUnavailableError, match=r"does not compile for sm_90a by NVRTC .*error"):
        found.compile("int f( {", "k", "sm_90a", ())
