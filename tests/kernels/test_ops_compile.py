"""The Triton kernels compile for the architectures that qerl names, though only one of them may be at hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

HERE = Path(__file__).parent
ARCHITECTURES = ("80", "89", "90", "100", "120")


def test_all_kernels_compile_for_all_architectures():
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(HERE / "triton_compile.py"), *ARCHITECTURES]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    for architecture in ARCHITECTURES:
        assert result.stdout.count(f"sm_{architecture} ") >= 15
