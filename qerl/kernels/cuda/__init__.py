"""CUDA C++ kernels compiled on first use: `compiler` (source to machine code, cached on disk) and `driver` (load and launch).
`lent` is memory that is given back and had again where it was; `share` is what the process may take."""

from qerl.kernels.cuda.compiler import compile_cuda
from qerl.kernels.cuda.driver import (
    Kernel,
    Launch,
    TensorMap,
    architecture,
    multiprocessors,
    shared_memory_limit,
    stream_handle,
    tensor_map,
)
from qerl.kernels.cuda.lent import LentMemory, can_lend
from qerl.kernels.cuda.share import bounded, lent_bytes, reset_lent_peak, room_in_share, share_of

__all__ = [
    "Kernel",
    "Launch",
    "LentMemory",
    "TensorMap",
    "architecture",
    "bounded",
    "can_lend",
    "compile_cuda",
    "lent_bytes",
    "multiprocessors",
    "reset_lent_peak",
    "room_in_share",
    "share_of",
    "shared_memory_limit",
    "stream_handle",
    "tensor_map",
]
