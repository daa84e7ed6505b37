"""What a run takes of a GPU at the most: ``train.memory_budget`` held to, and words for when it does not suffice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qerl.config.schema import Config
from qerl.errors import DeviceMemoryError, QerlError
from qerl.kernels.cuda import bounded, lent_bytes, share_of
from qerl.units import GB, bytes_text

OUTSIDE = int(0.9 * GB)
"""What a process takes of a GPU beside torch's allocator and lent memory: its context, kernels and graphs. .79 to .86 GB on an H200."""
_WANTED = re.compile(r"Tried to \w+ ([\d.]+) (KiB|MiB|GiB)")
_LAST_DIGIT = 0.01
"""Of that number: what was wanted is at most so much more."""
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SMALLER = "train.token_budget, rollout.max_num_seqs or rollout.kv_cache_gb (`qerl plan` says what each needs)"


@contextmanager
def within_budget(config: Config, device: torch.device) -> Iterator[None]:
    """Within it the process keeps to ``train.memory_budget`` on a GPU, where that is a number; afterwards it may have what it had before.

    ``auto`` and ``off`` set no bound: the GPU is one. The CPU has none.

    Raises:
        DeviceMemoryError: memory ran out, with or without a bound; in place of the errors of torch, CUDA and the driver.
    """
    if device.type != "cuda":
        yield
        return
    setting = config.train.memory_budget
    try:
        with bounded(None if isinstance(setting, str) else int(setting * GB), device):
            try:
                yield
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                # Here, for what the process may have is known within the bound alone.
                raise shortage(config, device, str(error)) from error
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise _no_context(error) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a GPU has no memory left: torch's allocator does, or what CUDA and its libraries have for themselves."""
    text = str(error)
    if isinstance(error, QerlError):
        return "CUDA driver refused" in text and "out of memory" in text
    said = any(word in text for word in ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"))
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and said)


def _no_context(error: RuntimeError) -> DeviceMemoryError:
    """What to tell where CUDA could not even begin: nothing can be asked of the GPU then."""
    found = DeviceMemoryError(
        "the GPU has no memory for another process",
        got=str(error).partition("\n")[0],
        expected=f"{bytes_text(OUTSIDE)} for its context and kernels, and the run's own",
        remedy="Wait until a process on it ends, or run fewer beside each other",
    )
    found.crowded = True
    return found


def shortage(config: Config, device: torch.device, said: str) -> DeviceMemoryError:
    """What to tell of a GPU that has no memory left: who has it, and what would help.

    Args:
        config: of the run.
        device: the GPU.
        said: the message of who asked in vain; how much that was is taken from it where it says so.
    """
    found = _WANTED.search(said)
    wanted, unsaid = (int(float(part) * _UNITS[found[2]]) for part in (found[1], _LAST_DIGIT)) if found else (0, 0)
    more = f", and {bytes_text(wanted)} were asked for" if wanted else ""
    free, total = torch.cuda.mem_get_info(device)
    ours = torch.cuda.memory_reserved(device) + lent_bytes(device)[0]
    tensors = torch.cuda.memory_allocated(device) + lent_bytes(device)[0]
    own, share = f"{bytes_text(ours)} reserved ({bytes_text(tensors)} in tensors)", share_of(device)
    if share < total and ours + wanted + unsaid > share:
        given = (
            ""
            if isinstance(config.train.memory_budget, str)
            else f" (train.memory_budget={config.train.memory_budget:g})"
        )
        return DeviceMemoryError(
            "the run does not fit the memory it was given",
            got=f"{own}{more}",
            expected=f"at most {bytes_text(share)}{given}",
            remedy=f"Raise train.memory_budget, or lower {_SMALLER}",
        )
    others = max(0, total - free - ours)
    crowded = others > 2 * OUTSIDE
    error = DeviceMemoryError(
        "the GPU's memory ran out" + (", most likely through other processes on it" if crowded else ""),
        got=f"{bytes_text(free)} free{more}; this run has {own}, all else on the GPU {bytes_text(others)}",
        expected=f"room for the run in {bytes_text(total)}",
        remedy="Give each process a part of the GPU with train.memory_budget=GB, or run fewer beside each other"
        if crowded
        else f"Lower {_SMALLER}, or set train.memory_budget for a smaller plan",
    )
    error.crowded = crowded
    return error
