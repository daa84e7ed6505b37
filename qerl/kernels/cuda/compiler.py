"""From CUDA C++ to machine code: NVRTC, which comes with torch, or nvcc. Results are cached on disk.

The first compiler that makes an empty kernel for the device is taken: each NVRTC that is found, then each nvcc. One that does not load, lacks a
part of itself or does not know the architecture (an NVRTC older than the device) is passed over, and the line of progress says so. What it
then says of a kernel is final: a fault of the source is not asked of another compiler.

The cache is `$QERL_CACHE/kernels`, or `$XDG_CACHE_HOME/qerl/kernels`, or `~/.cache/qerl/kernels`. A file's name is the hash of
everything that the machine code depends on, so nothing in it is ever stale, and it may be deleted at any time.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from qerl.errors import KernelUnavailableError
from qerl.kernels import compiling

_NVRTC_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
_NVRTC_FUNCTIONS = (
    "nvrtcVersion",
    "nvrtcCreateProgram",
    "nvrtcCompileProgram",
    "nvrtcGetProgramLogSize",
    "nvrtcGetProgramLog",
    "nvrtcGetCUBINSize",
    "nvrtcGetCUBIN",
    "nvrtcDestroyProgram",
)
_EMPTY = 'extern "C" __global__ void empty() {}'
_CHOICES = (
    "Install an NVRTC that knows the device (pip install --upgrade nvidia-cuda-nvrtc, nvidia-cuda-nvrtc-cu12 for a torch of CUDA 12), "
    "put an nvcc that does on the path or in CUDA_HOME, or choose kernel=reference."
)


def compile_cuda(
    source: str, *, name: str, arch: str, defines: Mapping[str, int] | None = None, quiet: bool = False
) -> bytes:
    """Machine code (cubin) of a CUDA C++ source that includes no header.

    Args:
        source: the text.
        name: how messages call it.
        arch: such as `sm_90a`.
        defines: macros.
        quiet: no line of progress, for callers who compile several beside each other.

    Raises:
        KernelUnavailableError: there is no compiler for `arch`, or the first one there is refuses the source.
    """
    macros = tuple(f"-D{key}={value}" for key, value in sorted((defines or {}).items()))
    passed: dict[str, str] = {}
    for compiler in _compilers(passed):
        key = hashlib.sha256("\0".join((source, arch, *macros, compiler.version)).encode()).hexdigest()[:24]
        path = cache_folder() / f"{name}-{arch}-{key}.cubin"
        if path.exists():
            return path.read_bytes()
        reason = _unfit(compiler, arch)
        if reason is None:
            with compiling.counted():
                if quiet:
                    code = compiler.compile(source, name, arch, macros)
                else:
                    code = _timed(compiler, source, name, arch, macros, passed)
            _write(path, code)
            return code
        passed[compiler.label] = reason
    for choice in ("NVRTC", "nvcc"):
        if not any(label.startswith(choice) for label in passed):
            passed[choice] = "not found"
    raise KernelUnavailableError(
        f"no compiler here makes CUDA kernels for {arch}",
        got="; ".join(f"{label}: {reason}" for label, reason in passed.items()),
        expected="NVRTC or nvcc, one that knows this architecture",
        remedy=_CHOICES,
    )


def _timed(
    compiler: Nvrtc | Nvcc, source: str, name: str, arch: str, macros: tuple[str, ...], passed: Mapping[str, str]
) -> bytes:
    """Compile, with a line that says what, by which compiler, what was passed over for it, and how long it took."""
    start = time.monotonic()
    why = "".join(f", not {label} ({reason})" for label, reason in passed.items())
    print(
        f"qerl: compiling the CUDA kernel {name} ({' '.join(macros)}) for {arch} by {compiler.label}{why}",
        end=" ",
        file=sys.stderr,
        flush=True,
    )
    code = compiler.compile(source, name, arch, macros)
    print(f"{time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    return code


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    if own := os.environ.get("QERL_CACHE"):
        return Path(own) / "kernels"
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "qerl" / "kernels"


def _write(path: Path, code: bytes) -> None:
    """Whole or not at all; a cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError as error:
        print(f"qerl: the compiled kernel is not kept: {error}", file=sys.stderr)


def has_compiler() -> bool:
    """Whether there is any, of whatever age."""
    return next(_compilers({}), None) is not None


def _compilers(passed: dict[str, str]) -> Iterator[Nvrtc | Nvcc]:
    """Those there are, the preferred one first; why one cannot be used at all is added to `passed`."""
    for path in (*_NVRTC_NAMES, *(str(path) for path in _wheel_libraries())):
        found = _nvrtc(path)
        if isinstance(found, Nvrtc):
            yield found
        elif not found.startswith(f"{path}: cannot open shared object file"):
            passed[f"NVRTC ({path})"] = found
    for path in find_nvcc():
        compiler = _nvcc(path)
        if isinstance(compiler, Nvcc):
            yield compiler
        else:
            passed[f"nvcc ({path})"] = compiler


@cache
def _nvrtc(path: str) -> Nvrtc | str:
    """The library, a name on the loader's path or a file; or why it cannot be used."""
    try:
        # NVRTC of CUDA 13 does not look for its other half beside itself.
        for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")) if os.sep in path else ():
            ctypes.CDLL(str(builtins))
        return Nvrtc(ctypes.CDLL(path))
    except (OSError, AttributeError) as error:
        return str(error)


@cache
def _nvcc(path: str) -> Nvcc | str:
    """The program; or why it does not start."""
    try:
        return Nvcc(path)
    except OSError as error:
        return str(error)


@cache
def _unfit(compiler: Nvrtc | Nvcc, arch: str) -> str | None:
    """Why a compiler makes nothing for an architecture, in its own words; None if it does."""
    try:
        compiler.compile(_EMPTY, "empty", arch, ())
    except KernelUnavailableError as error:
        return " ".join(str(error.got).split())[:300]
    return None


def find_nvcc() -> tuple[str, ...]:
    """Paths of nvcc: on the path, then of CUDA_HOME or CUDA_PATH."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = (shutil.which("nvcc"), shutil.which("nvcc", path=str(Path(home) / "bin")) if home else None)
    return tuple(dict.fromkeys(path for path in found if path))


def _wheel_libraries() -> Iterator[Path]:
    """NVRTC libraries of the nvidia-* wheels beside torch."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(root).glob("*/lib/libnvrtc.so.*"))


class Nvrtc:
    """NVIDIA's run-time compiler as a library."""

    def __init__(self, library: ctypes.CDLL):
        for function in _NVRTC_FUNCTIONS:
            getattr(library, function)
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"nvrtc {major.value}.{minor.value}"
        self.label = f"NVRTC {major.value}.{minor.value}"

    def compile(self, source: str, name: str, arch: str, macros: tuple[str, ...]) -> bytes:
        library, program = self._library, ctypes.c_void_p()
        options = [f"--gpu-architecture={arch}", "--std=c++17", *macros]
        self._check(
            library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None),
            name,
        )
        try:
            array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            if library.nvrtcCompileProgram(program, len(options), array) != 0:
                size = ctypes.c_size_t()
                library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
                log = ctypes.create_string_buffer(size.value)
                library.nvrtcGetProgramLog(program, log)
                raise _refused(self.label, name, arch, log.value.decode(errors="replace"))
            size = ctypes.c_size_t()
            self._check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), name)
            code = ctypes.create_string_buffer(size.value)
            self._check(library.nvrtcGetCUBIN(program, code), name)
            return code.raw
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _check(self, status: int, name: str) -> None:
        if status != 0:
            raise KernelUnavailableError(f"NVRTC failed on the kernel {name}", got=f"status {status}", remedy=_CHOICES)


class Nvcc:
    """The CUDA toolkit's compiler, as a program."""

    def __init__(self, path: str):
        self._path = path
        lines = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.split("\n")
        release = next((line for line in lines if "release" in line), "unknown")
        self.version = f"nvcc {release}"
        self.label = f"nvcc ({path}, {release})"

    def compile(self, source: str, name: str, arch: str, macros: tuple[str, ...]) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            text, out = Path(folder) / f"{name}.cu", Path(folder) / f"{name}.cubin"
            text.write_text(source, encoding="utf-8")
            number = arch.removeprefix("sm_")
            target = f"-gencode=arch=compute_{number},code=sm_{number}"
            command = [self._path, "-cubin", target, "-std=c++17", *macros, "-o", str(out), str(text)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode != 0:
                raise _refused(self.label, name, arch, result.stderr)
            return out.read_bytes()


def _refused(label: str, name: str, arch: str, log: str) -> KernelUnavailableError:
    return KernelUnavailableError(
        f"the kernel {name} does not compile for {arch} by {label}", got=log.strip()[-2000:], remedy=_CHOICES
    )
