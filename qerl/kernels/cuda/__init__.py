"""CUDA C++ kernels compiled on first use: `compiler` (source to machine code, cached on disk) and `driver` (load and launch)."""

from qerl.kernels.cuda.compiler import compile_cuda
from qerl.kernels.cuda.driver import (
    Kernel,
    Launch,
    TensorMap,
    architecture,
    multiprocessors,
    shared_memory_limit,
    tensor_map,
)

__all__ = [
    "Kernel",
    "Launch",
    "TensorMap",
    "architecture",
    "compile_cuda",
    "multiprocessors",
    "shared_memory_limit",
    "tensor_map",
]
