"""Shared test set-up: helper modules beside tests import by their own names."""

import sys
from pathlib import Path

sys.path[:0] = [str(path) for path in sorted(Path(__file__).parent.iterdir()) if path.is_dir()]
