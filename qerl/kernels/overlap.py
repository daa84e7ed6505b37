# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Launches of Triton kernels that may begin while the kernel before them still ends (programmatic dependent launch, sm_90 on).

A kernel that takes part calls `begin` before it reads or writes anything, and is launched with the options of `overlap`. Its blocks then
stand ready when the last ones of the kernel before it finish: in a captured step the gap between two small kernels shrinks. `begin` first lets
the next kernel come, so that several may stand ready, and then waits until everything before is done and visible: each kernel ends after all
before it, so the order of reads and writes is that of the stream.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Options of a launch: `OVERLAP` for the kernel, and what the driver must be told."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@triton.jit
def launch_next(OVERLAP: tl.constexpr) -> None:
    """Let the next kernel take its place on the device, where it stands ready until this one has ended."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait(OVERLAP: tl.constexpr) -> None:
    """Wait until the kernels before this one are done, and what they wrote is visible."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def begin(OVERLAP: tl.constexpr) -> None:
    """Let the next kernel take its place on the device, and wait for the kernels before this one."""
    launch_next(OVERLAP)
    wait(OVERLAP)
