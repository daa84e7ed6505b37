"""Results as files: what was measured, by which command, on what."""

from __future__ import annotations

import functools
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qerl.env_info import collect_env
from qerl.metrics.files import to_json, whole_file

ROOT = Path(__file__).resolve().parents[1]


def command(arguments: Sequence[str] | None = None) -> str:
    """The running command (``sys.argv``, or what is given), as it can be given in the repository's root anywhere.

    A path of this machine becomes one in the repository, or its last part: what ``--out`` names, and every JSON file that is not in the
    repository, has its place in ``results/``.
    """
    program, *words = sys.argv if arguments is None else arguments
    shown = ["python", _portable(program)]
    for before, word in zip(("", *words), words, strict=False):
        option, equals, value = word.rpartition("=")
        if before == "--out" or (option == "--out" and equals):
            shown.append(f"{option}{equals}results/{Path(value).name}")
        else:
            shown.append(f"{option}{equals}{_portable(value)}")
    return shlex.join(shown)


def _portable(word: str) -> str:
    path = Path(word)
    if not path.is_absolute():
        return word
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return f"results/{path.name}" if path.suffix == ".json" else path.name


@functools.cache
def environment() -> dict[str, Any]:
    """Commit and machine, as a run's ``env.json`` has them, and ``driver``: that of the GPUs, null without one."""
    return {key: value for key, value in collect_env().items() if key != "variables"} | {"driver": _driver()}


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    return (answer.stdout.split("\n")[0].strip() or None) if answer.returncode == 0 else None


def made_by() -> dict[str, str | None]:
    """What a row of a file that is put together from several runs says of its own: command, commit, torch and device."""
    known = environment()
    device = known["gpus"][0]["name"] if known["gpus"] else "cpu"
    return {"command": command(), "commit": known["commit"], "torch": known["versions"]["torch"], "device": device}


def write_result(out: Path, **content: Any) -> None:
    """One JSON file with the running command and the environment in front of ``content``; whole or not at all."""
    result = {"command": command(), "environment": environment(), **content}
    with whole_file(out) as temporary:
        temporary.write_text(json.dumps(to_json(result), indent=1) + "\n", encoding="utf-8")
