"""``qerl bench``: the benchmarks of a source checkout."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

import qerl
from qerl.errors import ConfigError, nearest


def bench(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="kernels, rollout, step, or another file of benchmarks/.")
    ],
) -> None:
    """Run a benchmark of the source checkout; further options are its own (--help shows them)."""
    if name in ("-h", "--help"):
        typer.echo(context.get_help())
        return
    folder = Path(qerl.__file__).resolve().parents[1] / "benchmarks"
    known = sorted(path.stem for path in folder.glob("*.py") if '"__main__"' in path.read_text(encoding="utf-8"))
    if name not in known:
        close = nearest(name, known)
        raise ConfigError(
            "there is no such benchmark",
            got=name,
            expected=f"one of {', '.join(known)}" if known else f"a source checkout with {folder}",
            remedy=f"Did you mean {close}?" if close else None,
        )
    # Not the folder itself: a benchmark would hide a package of its name from those that look for one (``kernels``).
    sys.path.insert(0, str(folder.parent))
    sys.argv = [str(folder / f"{name}.py"), *context.args]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
