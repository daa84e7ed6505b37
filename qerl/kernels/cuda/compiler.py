"""From CUDA C++ to machine code: NVRTC, which comes with torch, or nvcc where it is missing. Results are cached on disk.

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

_NVRTC_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
_CHOICES = (
    "Install torch's own NVRTC (pip install nvidia-cuda-nvrtc), put nvcc on the path, or choose kernel=reference."
)


def compile_cuda(source: str, *, name: str, arch: str, defines: Mapping[str, int] | None = None) -> bytes:
    """Machine code (cubin) of a CUDA C++ source that includes no header.

    Args:
        source: the text.
        name: how messages call it.
        arch: such as `sm_90a`.
        defines: macros.

    Raises:
        KernelUnavailableError: there is no compiler, or it refuses the source.
    """
    macros = tuple(f"-D{key}={value}" for key, value in sorted((defines or {}).items()))
    compiler = _compiler()
    key = hashlib.sha256("\0".join((source, arch, *macros, compiler.version)).encode()).hexdigest()[:24]
    path = cache_folder() / f"{name}-{arch}-{key}.cubin"
    if path.exists():
        return path.read_bytes()
    start = time.monotonic()
    print(
        f"qerl: compiling the CUDA kernel {name} ({' '.join(macros)}) for {arch}", end=" ", file=sys.stderr, flush=True
    )
    code = compiler.compile(source, name, arch, macros)
    print(f"{time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    _write(path, code)
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


@cache
def _compiler() -> Nvrtc | Nvcc:
    """The first compiler there is.

    Raises:
        KernelUnavailableError: there is none.
    """
    library = load_nvrtc()
    if library is not None:
        return Nvrtc(library)
    nvcc = find_nvcc()
    if nvcc is not None:
        return Nvcc(nvcc)
    raise KernelUnavailableError("no compiler for CUDA kernels was found", expected="NVRTC or nvcc", remedy=_CHOICES)


def load_nvrtc() -> ctypes.CDLL | None:
    """NVRTC's library, if there is one."""
    for name in (*_NVRTC_NAMES, *(str(path) for path in _wheel_libraries())):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def find_nvcc() -> str | None:
    """Path of nvcc, if there is one."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which("nvcc") or (shutil.which("nvcc", path=str(Path(home) / "bin")) if home else None)


def _wheel_libraries() -> Iterator[Path]:
    """NVRTC libraries of the nvidia-* wheels beside torch."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(root).glob("*/lib/libnvrtc.so.*"))


class Nvrtc:
    """NVIDIA's run-time compiler as a library."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"nvrtc {major.value}.{minor.value}"

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
                raise _refused(name, arch, log.value.decode(errors="replace"))
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
        self.version = "nvcc " + next((line for line in lines if "release" in line), "unknown")

    def compile(self, source: str, name: str, arch: str, macros: tuple[str, ...]) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            text, out = Path(folder) / f"{name}.cu", Path(folder) / f"{name}.cubin"
            text.write_text(source, encoding="utf-8")
            number = arch.removeprefix("sm_")
            target = f"-gencode=arch=compute_{number},code=sm_{number}"
            command = [self._path, "-cubin", target, "-std=c++17", *macros, "-o", str(out), str(text)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode != 0:
                raise _refused(name, arch, result.stderr)
            return out.read_bytes()


def _refused(name: str, arch: str, log: str) -> KernelUnavailableError:
    return KernelUnavailableError(
        f"the kernel {name} does not compile for {arch}", got=log.strip()[-2000:], remedy=_CHOICES
    )
