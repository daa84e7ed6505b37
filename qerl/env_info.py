"""What a run ran on: versions, machine and source state, for ``env.json`` and ``qerl env``.

No torch at import; no paths, user names or values of environment variables other than thread and device counts, so that
the text can be pasted into an issue as it is.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import qerl

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "pyarrow",
    "math-verify",
    "plotly",
    "peft",
    "compressed-tensors",
    "torchao",
    "bitsandbytes",
)
"""Distributions whose versions are recorded; one that is not installed is null."""

_SHOWN = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "TRITON_INTERPRET",
)
_SET_OR_NOT = ("QERL_MODELS", "QERL_DATA")


def collect_env() -> dict[str, Any]:
    """Facts about the machine, JSON-ready.

    Returns:
        ``commit`` (of the checkout that the package is imported from; null outside one), ``modified`` (tracked files
        differ from it), ``platform``, ``cpu`` {model, usable, torch_threads}, ``memory_gb``, ``cuda`` (that torch was built
        for), ``gpus`` [{name, capability, memory_gb}], ``versions`` (qerl, python and packages), ``variables``.
    """
    import torch

    root = Path(qerl.__file__).resolve().parents[1]
    commit = _git(root, "rev-parse", "HEAD")
    modified = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit,
        "modified": None if commit is None else bool(modified),
        "platform": platform.platform(),
        "cpu": {"model": _cpu_model(), "usable": _usable_cpus(), "torch_threads": torch.get_num_threads()},
        "memory_gb": _memory_gb(),
        "cuda": torch.version.cuda,
        "gpus": _gpus(),
        "versions": {"qerl": qerl.__version__, "python": platform.python_version()}
        | {name: _version(name) for name in PACKAGES},
        "variables": {name: os.environ.get(name) for name in _SHOWN}
        | {name: "set" if os.environ.get(name) else None for name in _SET_OR_NOT},
    }


def env_text(env: dict[str, Any]) -> str:
    """The same as lines of ``name: value``, for people."""
    lines = []
    for name, value in env.items():
        if isinstance(value, dict):
            shown = ", ".join(f"{key} {item if item is not None else '-'}" for key, item in value.items())
        elif isinstance(value, list):
            shown = "; ".join(" ".join(f"{key} {item}" for key, item in row.items()) for row in value) or "none"
        else:
            shown = "-" if value is None else str(value)
        lines.append(f"{name}: {shown}")
    return "\n".join(lines)


def _git(root: Path, *arguments: str) -> str | None:
    """Output of a git command in the source checkout; None when there is no checkout or no git."""
    if not (root / ".git").exists():
        return None
    try:
        result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_multiplies_bfloat16() -> bool | None:
    """Whether the CPU has instructions for products in bfloat16 (AVX512_BF16 or AMX); None where the system does not tell."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("flags"):
                return not {"avx512_bf16", "amx_bf16"}.isdisjoint(line.split())
    return None


def _usable_cpus() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory_gb() -> float | None:
    """Physical memory in GiB, where the system tells it."""
    size = machine_memory()
    return None if size is None else round(size / 2**30, 1)


def machine_memory() -> int | None:
    """Bytes of physical memory, where the system tells it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_gb": round(properties.total_memory / 2**30, 1),
            }
        )
    return gpus


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
