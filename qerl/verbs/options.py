"""Arguments that several verbs share, and the examples under their help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from qerl.errors import ConfigError

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG.yaml] [key=value …]", help="Configuration file, then settings that override it."),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="FILE_OR_NAME",
        help="JSONL/parquet file, `arithmetic`, `calculations`, a NAME under $QERL_DATA, or hub name; NAME:split.",
    ),
]
Checkpoint = Annotated[
    int | None, typer.Option(metavar="N", help="Step of the run's checkpoint; the newest if not given.")
]
Adapter = Annotated[Path | None, typer.Option(metavar="DIR", help="PEFT adapter to load on a model folder.")]
Base = Annotated[bool, typer.Option("--base", help="The run's base model, without its adapter.")]
Sigma = Annotated[
    float | None,
    typer.Option(
        metavar="S", min=0.0, help="Sample with noise of this level; with eval.noise=true the run's own if not given."
    ),
]
TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN_OR_MODEL", help="Run folder, model folder, NAME under $QERL_MODELS, `demo`, or CONFIG.yaml."
    ),
]


def split_settings(settings: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """The configuration file, if one is named, and the ``key=value`` settings.

    Raises:
        ConfigError: several files are named.
    """
    files = [item for item in settings or () if "=" not in item]
    if len(files) > 1:
        raise ConfigError(
            "more than one configuration file is named",
            got=" ".join(files),
            expected="one file, then key=value settings",
            remedy="Settings have an equals sign without spaces around it",
        )
    return (files[0] if files else None), [item for item in settings or () if "=" in item]


def meant_as_setting(option: str) -> list[str]:
    """The keys that an option which no verb has may be meant for: ``--optim.lr``, ``--lr``, or another library's ``--learning-rate``."""
    from qerl.config.fields import all_keys
    from qerl.config.suggest import ALIASES, suggest_key

    name = option.lstrip("-").replace("-", "_")
    known = all_keys()
    mapping = next((key for key in known if known[key].is_mapping and name.startswith(f"{key}.")), None)
    if mapping is not None:
        return [mapping + option.lstrip("-")[len(mapping) :]]
    if "." in name:
        close = suggest_key(name, known)
        return [] if close is None else [close]
    return [ALIASES[name]] if name in ALIASES else [key for key in known if key.rpartition(".")[2] == name]


def meant_as_argument(option: str) -> ConfigError | None:
    """What to say of an option that no verb has and that is written without dashes here: a setting, or the configuration file."""
    if option in ("--config", "--config-file", "--config_file"):
        return ConfigError("the configuration file has no option before it", got=option, remedy="Write its path alone")
    keys = meant_as_setting(option)
    remedy = "Write " + " or ".join(f"{key}=VALUE" for key in keys)
    return ConfigError("settings have no dashes", got=option, remedy=remedy) if keys else None


def as_settings(flags: dict[str, Any]) -> list[str]:
    """Flags that were given, as ``key=value`` settings."""
    return [f"{key}={value}" for key, value in flags.items() if value is not None]
