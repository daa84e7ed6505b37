"""Shared test set-up: thread settings before torch is imported; helper modules beside tests import by their own names."""

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# One thread a test process: the tensors are tiny, and pytest runs one process a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# What a machine does besides is no property: cases have no deadline, and may take their time to be drawn.
settings.register_profile("qerl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("qerl")


def pytest_configure(config):
    """Triton kernels run in its interpreter, on the CPU, except in a run of the GPU tests; set before Triton is imported. So a GPU
    that is there is hidden: kernels would be interpreted on it, too."""
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


def pytest_collection_finish(session):
    """What importing and collecting has made stays to the end: later collections of garbage need not look at it."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item):
    """Memory that a test has taken and given up goes back to the device, which other processes test too."""
    if item.get_closest_marker("gpu"):
        import torch  # not needed to collect tests

        if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2 << 30:
            torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def blank_reports():
    """Runs in this process end with an empty page: to draw it takes a third of a short run. Tests of reports draw them."""
    from qerl.metrics.run_dir import RunDir  # not needed to collect tests

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qerl.train.run.write_report", lambda path: RunDir(path).write_text(RunDir(path).report_path, ""))
        yield


sys.path[:0] = [str(path) for path in sorted(Path(__file__).parent.iterdir()) if path.is_dir()]
