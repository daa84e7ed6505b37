"""Fixtures of the kernels' tests."""

import pytest
import torch


@pytest.fixture
def poisoned_memory():
    """torch fills what it allocates without a value with NaN while its algorithms have to be deterministic. For tests on a device."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
