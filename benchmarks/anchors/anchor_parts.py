"""What the anchors share: what must be there before they start, and the file with what they found."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from qerl.env_info import collect_env
from qerl.metrics.files import to_json, whole_file


def require(packages: Mapping[str, str], *, cuda: bool) -> None:
    """Ends the program with one message that names everything that is missing.

    Args:
        packages: name -> version that the reference figures are of.
        cuda: a CUDA device is needed.
    """
    missing = [f"{name} (pip install {name}=={packages[name]})" for name in packages if not _installed(name)]
    if cuda and not torch.cuda.is_available():
        missing.append("a CUDA device that torch finds")
    if missing:
        print(f"error: this anchor needs what is missing here: {'; '.join(missing)}", file=sys.stderr)
        raise SystemExit(2)


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def write(out: Path, packages: Mapping[str, str], **content: Any) -> None:
    """One JSON file with the command, the environment and the peers' versions in front of ``content``; whole or not at all."""
    result = {
        "command": shlex.join(["python", f"benchmarks/anchors/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "environment": {key: value for key, value in collect_env().items() if key != "variables"},
        "peers": {name: importlib.metadata.version(name) for name in packages if _installed(name)},
        **content,
    }
    with whole_file(out) as temporary:
        temporary.write_text(json.dumps(to_json(result), indent=1) + "\n", encoding="utf-8")
