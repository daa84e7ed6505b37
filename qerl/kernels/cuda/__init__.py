"""CUDA C++ kernels compiled on first use: `compiler` (source to machine code, cached on disk) and `driver` (load and launch)."""

from qerl.kernels.cuda.compiler import compile_cuda
from qerl.kernels.cuda.driver import Kernel, Launch, architecture, multiprocessors, shared_memory_limit

__all__ = ["Kernel", "Launch", "architecture", "compile_cuda", "multiprocessors", "shared_memory_limit"]
