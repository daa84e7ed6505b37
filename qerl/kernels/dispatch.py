"""The one place where an operation's implementation is chosen.

An implementation is a module; the operation's README says which functions it has. A faster one is one more line in
`_IMPLEMENTATIONS`, before `reference`. What runs is recorded in the run folder by calling `resolve`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch

from qerl.errors import KernelUnavailableError, nearest


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to run an operation."""

    name: str
    module: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Device types it runs on."""


# Operation -> implementations, the preferred one first.
_IMPLEMENTATIONS: dict[str, tuple[Implementation, ...]] = {
    "fp4_linear": (
        Implementation("cuda", "qerl.kernels.fp4_linear.cuda", devices=("cuda",)),
        Implementation("reference", "qerl.kernels.fp4_linear.reference"),
    ),
    "rms_norm": (Implementation("reference", "qerl.kernels.rms_norm.reference"),),
    "attention": (Implementation("reference", "qerl.kernels.attention.reference"),),
    "cached_attention": (
        Implementation("triton", "qerl.kernels.cached_attention.triton", ("cuda",)),
        Implementation("reference", "qerl.kernels.cached_attention.reference"),
    ),
    "token_logprobs": (Implementation("reference", "qerl.kernels.token_logprobs.reference"),),
    "activation": (Implementation("reference", "qerl.kernels.activation.reference"),),
    "rope": (Implementation("reference", "qerl.kernels.rope.reference"),),
    "sampling": (
        Implementation("triton", "qerl.kernels.sampling.triton", ("cuda",)),
        Implementation("reference", "qerl.kernels.sampling.reference"),
    ),
}

OPERATIONS = tuple(_IMPLEMENTATIONS)


def available(op: str) -> tuple[str, ...]:
    """Names of the implementations of `op`, the preferred one first."""
    return tuple(implementation.name for implementation in _IMPLEMENTATIONS[op])


def resolve(op: str, device: torch.device | str, wanted: str = "auto") -> str:
    """Name of the implementation that runs `op` on `device`.

    Args:
        op: one of `OPERATIONS`.
        device: where the tensors are.
        wanted: a name, or `auto` for the first that runs on the device.

    Raises:
        KernelUnavailableError: `wanted` does not exist or does not run on the device; there is no fallback.
    """
    return _choose(op, torch.device(device), wanted).name


def load(op: str, device: torch.device | str, wanted: str = "auto") -> ModuleType:
    """The module of the implementation that `resolve` names."""
    return importlib.import_module(_choose(op, torch.device(device), wanted).module)


def _choose(op: str, device: torch.device, wanted: str) -> Implementation:
    for implementation in _IMPLEMENTATIONS[op]:
        if wanted in ("auto", implementation.name) and device.type in implementation.devices:
            return implementation
    names = available(op)
    if wanted in names:
        raise KernelUnavailableError(
            f"the '{wanted}' kernel of {op} does not run on this device", got=device.type, expected="another device"
        )
    close = nearest(wanted, names)
    raise KernelUnavailableError(
        f"there is no such kernel of {op}",
        got=repr(wanted),
        expected="auto or one of " + ", ".join(names),
        remedy=f"Did you mean '{close}'?" if close else None,
    )
