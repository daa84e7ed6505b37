"""Calls of the command line inside the test process, and settings that make them take seconds."""

import sys
from pathlib import Path

from typer.testing import CliRunner

from qerl.cli import app

SMALL = (
    "model.path=demo",
    "model.dtype=float32",
    "rollout.max_prompt_tokens=96",
    "rollout.max_new_tokens=48",
    "data.train=arithmetic",
    "data.eval=arithmetic",
    "data.eval_limit=8",
    "log.progress=off",
)


def qerl(*arguments: str | Path):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def ok(*arguments: str | Path) -> str:
    result = qerl(*arguments)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


def refused(*arguments: str | Path) -> str:
    result = qerl(*arguments)
    assert result.exit_code == 2, result.output + repr(result.exception)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


def bench(*arguments: str | Path) -> str:
    """What ``qerl bench`` prints; it has the process's arguments and search path for its own, which come back."""
    path, given = sys.path[:], sys.argv
    sys.modules.pop(f"benchmarks.{arguments[0]}", None)  # runpy warns of a module that another test has imported
    try:
        return ok("bench", *arguments)
    finally:
        sys.path[:], sys.argv = path, given
