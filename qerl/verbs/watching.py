"""``qerl watch``: a live view of a run folder, or of the cells of a matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def watch(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run folder, or folder of a matrix: running, finished or crashed.")
    ],
    plain: Annotated[
        bool, typer.Option("--plain", help="A line a step instead of a display; so it is without a terminal too.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Show what there is and stop.")] = False,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="How often to look.")] = 1.0,
) -> None:
    """Follow a run, or the cells of a matrix, in the terminal until it ends; Ctrl-C leaves it and does not touch it."""
    from qerl.experiments.watch import is_matrix, watch_matrix
    from qerl.report.watch import watch as follow

    if is_matrix(run):
        watch_matrix(run, plain=plain, once=once, every=every)
        return
    follow(run, plain=plain, once=once, every=every)
