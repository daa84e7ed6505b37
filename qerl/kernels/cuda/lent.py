"""Memory of a device that can be given back and had again at the same address: what was captured with it stays valid.

Addresses are reserved once; what lies behind them comes and goes, through the driver's virtual memory management. Torch's allocator does
not know of it; `share` counts it.
"""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

from qerl.kernels.cuda.driver import check, driver
from qerl.kernels.cuda.share import book, index_of, room_in_share

_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED
_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE_*, CU_MEM_LOCATION_TYPE_*, CU_MEM_ACCESS_FLAGS_*
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class LentMemory:
    """Bytes at one address of a device, zeros at first. `give_back` ends what is behind the address, `take` puts zeros there again.

    Args:
        size: bytes wanted.
        device: where.

    Raises:
        KernelUnavailableError: the driver refuses to reserve addresses.
        OutOfMemoryError: see `take`.
    """

    def __init__(self, size: int, device: torch.device):
        self.device = device
        self.index = index_of(device)
        torch.cuda.current_stream(device)  # makes torch's context current
        self._properties = _Properties(type=_PINNED, location=_Location(_DEVICE, self.index))
        step = ctypes.c_size_t()
        status = driver().cuMemGetAllocationGranularity(ctypes.byref(step), ctypes.byref(self._properties), 0)
        check(status, "cuMemGetAllocationGranularity")
        self.size = -(-size // step.value) * step.value
        address = ctypes.c_uint64()
        status = driver().cuMemAddressReserve(
            ctypes.byref(address),
            ctypes.c_size_t(self.size),
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        check(status, "cuMemAddressReserve")
        self.address = address.value
        self._behind = [0]
        """Bytes behind the address; a list, so that what frees it need not hold this object."""
        self._end = weakref.finalize(self, _free, self.index, self.address, self.size, self._behind)
        self._end.atexit = False  # the process gives up everything anyway, and its context is gone by then
        self.take()

    def tensor(self) -> Tensor:
        """uint8, all bytes at the address, to be touched only while there is memory behind it. It, and what is made of it, keeps this
        object."""
        return torch.as_tensor(_Array(self), device=self.device)

    @property
    def there(self) -> bool:
        """Whether there is memory behind the address."""
        return self._behind[0] > 0

    def take(self) -> None:
        """Have memory behind the address again, all zeros; nothing where it is there.

        Raises:
            OutOfMemoryError: the device, or the share of it that the process is limited to, has not as much left.
        """
        if self.there:
            return
        handle = ctypes.c_uint64()
        status = self._create(handle)
        if status == _OUT_OF_MEMORY:
            torch.cuda.empty_cache()
            status = self._create(handle)
        if status == _OUT_OF_MEMORY:
            free = torch.cuda.mem_get_info(self.index)[0]
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to have {self.size / 2**30:.2f} GiB behind an address; {free / 2**30:.2f} GiB are free."
            )
        check(status, "cuMemCreate")
        address, size = ctypes.c_uint64(self.address), ctypes.c_size_t(self.size)
        check(driver().cuMemMap(address, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0)), "cuMemMap")
        # The mapping keeps the memory from here on.
        check(driver().cuMemRelease(handle), "cuMemRelease")
        access = _Access(location=_Location(_DEVICE, self.index), flags=_READ_WRITE)
        check(driver().cuMemSetAccess(address, size, ctypes.byref(access), ctypes.c_size_t(1)), "cuMemSetAccess")
        self._behind[0] = self.size
        book(self.index, self.size)
        status = driver().cuMemsetD8Async(
            address, ctypes.c_ubyte(0), size, ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        )
        check(status, "cuMemsetD8Async")

    def give_back(self) -> None:
        """End what is behind the address, after the device has done all it was asked to."""
        if self.there:
            torch.cuda.synchronize(self.index)
            _unmap(self.index, self.address, self._behind)

    def _create(self, handle: ctypes.c_uint64) -> int:
        """Status of the driver; out of memory also where the process has not as much left of its share."""
        if self.size > room_in_share(torch.device("cuda", self.index)):
            return _OUT_OF_MEMORY
        size, flags = ctypes.c_size_t(self.size), ctypes.c_uint64(0)
        return int(driver().cuMemCreate(ctypes.byref(handle), size, ctypes.byref(self._properties), flags))


class _Array:
    """What torch makes a tensor of, which keeps the memory's address."""

    def __init__(self, memory: LentMemory):
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.size,), "typestr": "|u1", "data": (memory.address, False), "strides": None, "version": 3,
        }  # fmt: skip


def can_lend(device: torch.device) -> bool:
    """Whether a device has addresses apart from memory."""
    if device.type != "cuda":
        return False
    value, index = ctypes.c_int(), index_of(device)
    torch.cuda.current_stream(device)
    check(driver().cuDeviceGetAttribute(ctypes.byref(value), _SUPPORTED, index), "cuDeviceGetAttribute")
    return value.value == 1


def _unmap(index: int, address: int, behind: list[int]) -> None:
    size, behind[0] = behind[0], 0
    check(driver().cuMemUnmap(ctypes.c_uint64(address), ctypes.c_size_t(size)), "cuMemUnmap")
    book(index, -size)


def _free(index: int, address: int, size: int, behind: list[int]) -> None:
    if behind[0]:
        torch.cuda.synchronize(index)
        _unmap(index, address, behind)
    check(driver().cuMemAddressFree(ctypes.c_uint64(address), ctypes.c_size_t(size)), "cuMemAddressFree")
