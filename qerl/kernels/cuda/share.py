"""What a process may take of a device: torch's allocator and lent memory (`lent`) together.

Torch bounds what its allocator reserves (`set_per_process_memory_fraction`): at the bound it gives cached blocks back to the device before it
asks for more, and only then runs out of memory. It does not know of lent memory, so within `bounded` the bound of torch is lowered by
what is lent at the moment. Outside of both are the context of a process, its loaded kernels and instantiated graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class _Account:
    """Of one device."""

    now: int = 0
    """Bytes lent."""
    peak: int = 0
    """Most of them since the last reset."""
    bound: int | None = None
    """Bytes that torch's allocator and lent memory may have together; None outside `bounded`."""


_ACCOUNTS: dict[int, _Account] = {}


def index_of(device: torch.device) -> int:
    """Number of a CUDA device; that of ``cuda`` is the current one's."""
    return torch.cuda.current_device() if device.index is None else device.index


def lent_bytes(device: torch.device) -> tuple[int, int]:
    """(bytes now, most since the last reset) that `LentMemory` has on a device."""
    account = _ACCOUNTS.get(index_of(device), _Account())
    return account.now, account.peak


def reset_lent_peak(device: torch.device) -> None:
    """Start the count of the most anew, at what there is."""
    account = _ACCOUNTS.setdefault(index_of(device), _Account())
    account.peak = account.now


def book(index: int, size: int) -> None:
    """So many bytes of a device are lent from now on, or no longer (below 0)."""
    account = _ACCOUNTS.setdefault(index, _Account())
    account.now += size
    account.peak = max(account.peak, account.now)
    if account.bound is not None:
        _bound_allocator(index, account)


def share_of(device: torch.device) -> int:
    """Bytes of a CUDA device that this process may take: all, or the share that it was limited to."""
    index = index_of(device)
    account = _ACCOUNTS.get(index, _Account())
    if account.bound is not None:
        return account.bound
    # Asked of the device's number: torch takes no device `cuda` there.
    fraction = torch.cuda.get_per_process_memory_fraction(index)
    return int(fraction * torch.cuda.get_device_properties(index).total_memory)


def room_in_share(device: torch.device) -> int:
    """Bytes that a CUDA device's allocator and lent memory do not have yet of that share, whatever other processes have."""
    return share_of(device) - torch.cuda.memory_reserved(index_of(device)) - lent_bytes(device)[0]


@contextmanager
def bounded(size: int | None, device: torch.device) -> Iterator[None]:
    """Within it torch's allocator and lent memory together have at most ``size`` bytes of a device; afterwards what they had before.

    A bound above the share that the process has is that share. What is cached from before is given back at the beginning if it is more
    than the bound; what tensors hold is not touched.

    Args:
        size: bytes; None sets no bound.
        device: of another kind than CUDA, nothing is bounded.
    """
    if size is None or device.type != "cuda" or size >= share_of(device):
        yield
        return
    index = index_of(device)
    account = _ACCOUNTS.setdefault(index, _Account())
    outer, fraction = account.bound, torch.cuda.get_per_process_memory_fraction(index)
    account.bound = size
    try:
        _bound_allocator(index, account)
        if room_in_share(device) < 0:
            torch.cuda.empty_cache()
        yield
    except BaseException:
        # After a fault of a kernel every call is refused, this one too; what is told is the fault.
        with suppress(RuntimeError):
            _restore(index, account, outer, fraction)
        raise
    _restore(index, account, outer, fraction)


def _restore(index: int, account: _Account, bound: int | None, fraction: float) -> None:
    """The bound that was there before, or torch's own as it was."""
    account.bound = bound
    if bound is None:
        torch.cuda.set_per_process_memory_fraction(fraction, index)
    else:
        _bound_allocator(index, account)


def _bound_allocator(index: int, account: _Account) -> None:
    """Leave torch's allocator what lent memory leaves of the bound."""
    assert account.bound is not None
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(max(0, account.bound - account.now) / total, index)
