"""The one place where an operation's implementation is chosen.

An implementation is a module; the operation's README says which functions it has. A faster one is one more line in
`_IMPLEMENTATIONS`, before `reference`. What runs is recorded in the run folder by calling `resolve`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
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
    needs: str | None = None
    """Package that it needs beside torch."""

    def runs_on(self, device: torch.device) -> bool:
        return device.type in self.devices and (self.needs is None or _installed(self.needs))


@cache
def _installed(package: str) -> bool:
    return find_spec(package) is not None


def _triton(op: str) -> Implementation:
    """Its module `triton`; torch's CUDA builds bring the compiler along."""
    return Implementation("triton", f"qerl.kernels.{op}.triton", ("cuda",), needs="triton")


def _reference(op: str) -> Implementation:
    return Implementation("reference", f"qerl.kernels.{op}.reference")


# Operation -> implementations, the preferred one first.
_IMPLEMENTATIONS: dict[str, tuple[Implementation, ...]] = {
    "fp4_linear": (
        Implementation("cuda", "qerl.kernels.fp4_linear.cuda", devices=("cuda",)),
        Implementation("reference", "qerl.kernels.fp4_linear.reference"),
    ),
    "rms_norm": (_triton("rms_norm"), _reference("rms_norm")),
    "attention": (Implementation("flash", "qerl.kernels.attention.flash", ("cuda",)), _reference("attention")),
    "cached_attention": (_triton("cached_attention"), _reference("cached_attention")),
    "token_logprobs": (_triton("token_logprobs"), _reference("token_logprobs")),
    "activation": (_triton("activation"), _reference("activation")),
    "rope": (_triton("rope"), _reference("rope")),
    "sampling": (_triton("sampling"), _reference("sampling")),
    "philox": (_triton("philox"), _reference("philox")),
    "quantize": (_triton("quantize"), _reference("quantize")),
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
    return _loaded(op, device.type if isinstance(device, torch.device) else torch.device(device).type, wanted)


@cache
def _loaded(op: str, device_type: str, wanted: str) -> ModuleType:
    """Kept, since a decoder asks some hundred times a step."""
    return importlib.import_module(_choose(op, torch.device(device_type), wanted).module)


def _named(op: str, name: str) -> Implementation:
    return next(implementation for implementation in _IMPLEMENTATIONS[op] if implementation.name == name)


def _choose(op: str, device: torch.device, wanted: str) -> Implementation:
    for implementation in _IMPLEMENTATIONS[op]:
        if wanted in ("auto", implementation.name) and implementation.runs_on(device):
            return implementation
    names = available(op)
    if wanted in names:
        raise KernelUnavailableError(
            f"the '{wanted}' kernel of {op} does not run here",
            got=device.type,
            expected=" or ".join(_named(op, wanted).devices),
            remedy=f"It also needs the package {needs}." if (needs := _named(op, wanted).needs) else None,
        )
    close = nearest(wanted, names)
    raise KernelUnavailableError(
        f"there is no such kernel of {op}",
        got=repr(wanted),
        expected="auto or one of " + ", ".join(names),
        remedy=f"Did you mean '{close}'?" if close else None,
    )
