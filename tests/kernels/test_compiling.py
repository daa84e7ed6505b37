"""The clock of compilers, against compilers that take a known time."""

import time
from types import SimpleNamespace

import pytest

from qerl.kernels import compiling
from qerl.kernels.compiling import CompileClock
from qerl.kernels.cuda import compiler

knobs = pytest.importorskip("triton.knobs", reason="Triton is not installed")


@compiling.counted()
def refused():
    """A kernel that does not compile has taken its time too."""
    time.sleep(0.01)
    raise ValueError


def test_a_clock_counts_from_its_last_reading_and_not_what_other_clocks_read():
    first = CompileClock(triton=False)
    with compiling.counted():
        time.sleep(0.02)
    second = CompileClock(triton=False)
    with pytest.raises(ValueError):
        refused()
    assert 0.03 <= first.take() < 1.0
    assert 0.01 <= second.take() < 0.5
    assert first.take() == second.take() == 0.0


def test_triton_tells_of_each_kernel_and_whoever_listened_before_still_hears(monkeypatch):
    heard = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **event: heard.append(event["cache_hit"]))
    clock = CompileClock(triton=True)
    CompileClock(triton=True)
    # What Triton passes: microseconds of all stages.
    for hit, microseconds in ((False, 1_500_000), (True, 250)):
        event = {"src": None, "metadata": {}, "metadata_group": {}, "times": SimpleNamespace(total=microseconds)}
        knobs.compilation.listener(**event, cache_hit=hit)
    assert clock.take() == pytest.approx(1.50025)
    assert heard == [False, True]


def test_a_cuda_kernel_is_counted_when_it_is_compiled_and_not_when_it_is_read_from_the_disk(monkeypatch, tmp_path):
    class Slow:
        version = label = "slow"

        def compile(self, source, name, arch, macros):
            time.sleep(0.02)
            return b"code"

    slow = Slow()
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "_compilers", lambda passed: iter([slow]))
    monkeypatch.setattr(compiler, "_unfit", lambda compiler, arch: None)
    clock = CompileClock(triton=False)
    assert compiler.compile_cuda("text", name="kernel", arch="sm_90a") == b"code"
    assert 0.02 <= clock.take() < 0.5
    assert compiler.compile_cuda("text", name="kernel", arch="sm_90a") == b"code"
    assert clock.take() == 0.0
