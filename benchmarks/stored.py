"""Results as files: what was measured, by which command, on what."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from qerl.env_info import collect_env
from qerl.metrics.files import to_json, whole_file


def write_result(out: Path, **content: Any) -> None:
    """One JSON file with the running command and the environment in front of ``content``; whole or not at all."""
    result = {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "environment": {key: value for key, value in collect_env().items() if key != "variables"},
        **content,
    }
    with whole_file(out) as temporary:
        temporary.write_text(json.dumps(to_json(result), indent=1) + "\n", encoding="utf-8")
