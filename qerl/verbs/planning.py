"""``qerl plan``: does it fit?"""

from __future__ import annotations

from typing import Annotated

import typer

from qerl.verbs.options import Settings, split_settings


def plan(
    settings: Settings = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="GPU memory to plan for, such as 24GB, or train.memory_budget if less; default: this machine's.",
        ),
    ] = None,
) -> None:
    """Predict memory by owner and phase from the model's config.json alone; exit code 1 if the run does not fit."""
    config_file, overrides = split_settings(settings)
    from qerl.config.load import load_config
    from qerl.train.fit import plan as plan_memory

    text, fits = plan_memory(load_config(config_file, overrides), gpu=gpu)
    typer.echo(text, nl=False)
    if not fits:
        raise typer.Exit(1)
