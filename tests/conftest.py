"""Shared test set-up: thread settings before torch is imported; helper modules beside tests import by their own names."""

import os
import sys
from pathlib import Path

# One thread a test process: the tensors are tiny, and pytest runs one process a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path[:0] = [str(path) for path in sorted(Path(__file__).parent.iterdir()) if path.is_dir()]
