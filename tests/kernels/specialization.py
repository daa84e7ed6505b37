"""Which variants of a Triton kernel its launches ask for, by Triton's own rules and without a GPU: launches are caught, and the key under which
Triton looks for compiled code is made by its binder and kept. Nothing runs; where whole operations are recorded, new memory holds zeros, so that what
follows has finite numbers to go on with."""

import importlib
from collections import defaultdict
from contextlib import contextmanager

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from qerl.kernels import dispatch

HOPPER = make_backend(GPUTarget("cuda", 90, 32))


class Variants:
    """Keys of the launches so far."""

    def __init__(self):
        self.keys: dict[str, set] = defaultdict(set)
        """By kernel, as `rms_norm.triton._forward`: (what Triton knows of each argument, options of the launch)."""
        self.launches: dict[str, int] = defaultdict(int)
        self._binders = {}

    def add(self, kernel: InterpretedFunction, arguments: tuple, options: dict) -> None:
        if kernel.fn not in self._binders:
            compiled = JITFunction(kernel.fn, **kernel.kwargs)
            binder = create_function_from_signature(compiled.signature, compiled.params, HOPPER)
            self._binders[kernel.fn] = binder, [parameter.name for parameter in compiled.params]
        binder, names = self._binders[kernel.fn]
        _, specialization, others = binder(*arguments, **options)
        name = f"{kernel.fn.__module__.removeprefix('qerl.kernels.')}.{kernel.fn.__name__}"
        self.keys[name].add((*zip(names, map(str, specialization), strict=True), ("options", str(others))))
        self.launches[name] += 1

    def counts(self) -> dict[str, int]:
        """Variants by kernel."""
        return {name: len(keys) for name, keys in sorted(self.keys.items())}

    def differences(self) -> dict[str, dict[str, set[str]]]:
        """What tells the variants of a kernel apart: kernel -> argument -> what Triton knows of it."""
        found: dict[str, dict[str, set[str]]] = {}
        for name, keys in self.keys.items():
            seen = defaultdict(set)
            for argument, what in (pair for key in keys for pair in key):
                seen[argument].add(what)
            found[name] = {argument: values for argument, values in seen.items() if len(values) > 1}
        return found


@contextmanager
def recorded(*operations: str):
    """Launches inside are recorded instead of run, and these operations go through Triton on the CPU."""
    variants, load = Variants(), dispatch.load

    def run(kernel, *arguments, grid, warmup, **options):
        variants.add(kernel, arguments, options)

    def chosen(op, device, wanted="auto"):
        return importlib.import_module(f"qerl.kernels.{op}.triton") if op in operations else load(op, device, wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", run)
        patch.setattr(dispatch, "load", chosen)
        if operations:
            for name in ("empty", "empty_like"):
                patch.setattr(torch, name, getattr(torch, name.replace("empty", "zeros")))
            patch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
        yield variants
