"""Loading machine code and launching it through the CUDA driver, on torch's context, stream and memory.

A launch is asynchronous, never waits for the device and allocates nothing, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch

from qerl.errors import KernelUnavailableError

_DYNAMIC_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MAX_SHARED_MEMORY = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


_BFLOAT16, _UINT64 = 9, 4  # CU_TENSOR_MAP_DATA_TYPE_*
_SWIZZLE_NONE, _SWIZZLE_128 = 0, 3  # CU_TENSOR_MAP_SWIZZLE_*
_PROMOTION_128 = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


_Argument = ctypes.c_void_p * 1


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The geometry of a launch."""

    grid: int
    """Blocks."""
    block: int
    """Threads of a block."""
    shared: int = 0
    """Bytes of dynamic shared memory."""
    cluster: int = 1
    """Blocks of a cluster."""
    overlap: bool = False
    """Programmatic dependent launch, where the device has it: the kernel may start before the one in front of it has ended, and itself waits."""


class Kernel:
    """One function of a loaded module, on the current device."""

    def __init__(self, code: bytes, function: str):
        library = driver()
        torch.cuda.current_stream()  # makes torch's context current
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        check(library.cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
        check(library.cuModuleGetFunction(ctypes.byref(self._function), module, function.encode()), function)
        self._name = function
        self._shared = 48 * 1024
        self._can_overlap = torch.cuda.get_device_capability() >= (9, 0)
        self._device = torch.device("cuda", torch.cuda.current_device())

    def launch(self, launch: Launch, params: ctypes.Structure) -> None:
        """Start the kernel on torch's current stream, with one argument passed by value.

        Raises:
            KernelUnavailableError: the driver refuses the launch.
        """
        self._allow_shared(launch.shared)
        if launch.overlap and not self._can_overlap:
            launch = replace(launch, overlap=False)
        config, _attributes = _config(launch, stream_handle(self._device))
        arguments = _Argument(ctypes.addressof(params))
        check(driver().cuLaunchKernelEx(ctypes.byref(config), self._function, arguments, None), self._name)

    def resident_clusters(self, launch: Launch) -> int:
        """Most clusters of this geometry that run at the same time on the whole device."""
        self._allow_shared(launch.shared)
        config, _attributes = _config(launch, 0)
        count = ctypes.c_int()
        status = driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), self._function, ctypes.byref(config))
        check(status, self._name)
        return count.value

    def _allow_shared(self, size: int) -> None:
        if size > self._shared:
            status = driver().cuFuncSetAttribute(self._function, _DYNAMIC_SHARED_MEMORY, ctypes.c_int(size))
            check(status, self._name)
            self._shared = size


TensorMap = ctypes.c_uint64 * 16
"""What the copy engine knows of a matrix in global memory."""


@lru_cache(maxsize=4096)
def tensor_map(address: int, shape: tuple[int, int], row_bytes: int, box: tuple[int, int], *, words: bool) -> TensorMap:  # type: ignore[valid-type]
    """The tensor map of a row-major matrix, from which the copy engine takes boxes; outside the matrix it reads zeros.
    A function of what it is given, so maps are kept: those of weights and adapters are asked for in every pass. Callers copy them.

    Args:
        address: of the first element, a multiple of 16.
        shape: rows and columns, in elements.
        row_bytes: from one row to the next, a multiple of 16.
        box: rows and columns of a box, at most 256 each.
        words: elements are words of 8 bytes, and boxes lie plainly in shared memory; otherwise they are bfloat16, and boxes of 64 columns
            lie there in the 128-byte swizzle.

    Raises:
        KernelUnavailableError: the driver refuses it.
    """
    buffer = ctypes.create_string_buffer(128 + 64)
    aligned = -(-ctypes.addressof(buffer) // 64) * 64
    pair, four = ctypes.c_uint64 * 2, ctypes.c_uint32 * 2
    status = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        _UINT64 if words else _BFLOAT16,
        2,
        ctypes.c_void_p(address),
        pair(shape[1], shape[0]),
        (ctypes.c_uint64 * 1)(row_bytes),
        four(box[1], box[0]),
        four(1, 1),
        0,
        _SWIZZLE_NONE if words else _SWIZZLE_128,
        _PROMOTION_128,
        0,
    )
    check(status, "cuTensorMapEncodeTiled")
    return TensorMap.from_buffer_copy(ctypes.string_at(aligned, 128))


def stream_handle(device: torch.device) -> int:
    """The driver's handle of torch's current stream of a device, without the object that `torch.cuda.current_stream` makes for it."""
    return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if device.index is None else device.index)


def architecture(device: torch.device) -> str:
    """Target of the compiler for a device, such as `sm_90a`: with the suffix where the device has features of its own."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory_limit(device: torch.device) -> int:
    """Most bytes of dynamic shared memory that a block can ask for."""
    value = ctypes.c_int()
    index = torch.cuda.current_device() if device.index is None else device.index
    check(driver().cuDeviceGetAttribute(ctypes.byref(value), _MAX_SHARED_MEMORY, index), "cuDeviceGetAttribute")
    return value.value


@lru_cache(maxsize=4096)
def _config(launch: Launch, stream: int) -> tuple[_Config, ctypes.Array[_Attribute] | None]:
    """The driver's record of a launch, and what it points to; kept, and read by launches."""
    grid, block = (launch.grid, 1, 1), (launch.block, 1, 1)
    if launch.cluster == 1 and not launch.overlap:
        return _Config(grid=grid, block=block, shared=launch.shared, stream=stream), None
    attributes = (_Attribute * 2)()
    count = 0
    if launch.cluster > 1:
        attributes[count].id = _CLUSTER_DIMENSION
        attributes[count].value[0:3] = [launch.cluster, 1, 1]
        count += 1
    if launch.overlap:
        attributes[count].id = _PROGRAMMATIC
        attributes[count].value[0] = 1
        count += 1
    config = _Config(
        grid=grid,
        block=block,
        shared=launch.shared,
        stream=stream,
        attributes=ctypes.cast(attributes, ctypes.POINTER(_Attribute)),
        count=count,
    )
    return config, attributes


@cache
def driver() -> ctypes.CDLL:
    """The driver library.

    Raises:
        KernelUnavailableError: it cannot be loaded.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelUnavailableError(
            "the CUDA driver library cannot be loaded", got=str(error), expected="libcuda.so.1 of an NVIDIA driver"
        ) from error


def check(status: int, what: str) -> None:
    """Nothing where a call of the driver succeeded.

    Raises:
        KernelUnavailableError: it did not; ``what`` names the call.
    """
    if status != 0:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        raise KernelUnavailableError(f"the CUDA driver refused {what}", got=f"error {status}: {reason}")
