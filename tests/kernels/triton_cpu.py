"""Triton kernels on the CPU: import this before any kernel module; skips the test module where Triton is missing.

`conftest` sets TRITON_INTERPRET before Triton is imported. Two repairs of the interpreter of Triton 3.6 under numpy 2.4: its
scalars are arrays of one element, which numpy no longer turns into Python integers by itself.
"""

import pytest

triton = pytest.importorskip(
    "triton", reason="Triton is not installed: `pip install triton` runs its interpreter on the CPU"
)

from triton.runtime import interpreter  # noqa: E402

_patch_tensor = interpreter._patch_lang_tensor


def _patched(tensor, scope):
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patched

if not triton.knobs.runtime.interpret:
    pytest.skip("kernels run on the GPU in this run (`-m gpu`)", allow_module_level=True)
