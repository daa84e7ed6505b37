"""Where a model lies that a setting names."""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path

from qerl.errors import CheckpointError, nearest

DEMO_MODEL = "demo"


def resolve_model_path(name: str, *, weights: bool = True) -> Path:
    """The folder that a user's model setting means.

    ``demo`` is the packaged tiny model; otherwise an existing folder, or a NAME under ``$QERL_MODELS``.

    Args:
        name: the setting.
        weights: they will be read; False where ``config.json`` alone is, which a message then says.

    Raises:
        CheckpointError: there is no such folder; names the nearest one.
    """
    if name == DEMO_MODEL:
        return Path(str(resources.files("qerl") / "assets" / "demo_model"))
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    root = os.environ.get("QERL_MODELS")
    names = (
        sorted(entry.name for entry in Path(root).iterdir() if entry.is_dir()) if root and Path(root).is_dir() else []
    )
    if root and (Path(root) / name).is_dir():
        return Path(root) / name
    asked = _sizes_in(Path(name).name)
    # A model of another size is not the one that was meant.
    close = nearest(
        Path(name).name, [known for known in (*names, DEMO_MODEL) if not asked or _sizes_in(known) == asked]
    )
    remedy = None if root else "Set QERL_MODELS to the folder that holds your models to use their names."
    if Path(name).expanduser().is_file():
        remedy = "That is a file: give its folder, with config.json, safetensors and tokenizer files."
    elif close:
        remedy = f"Did you mean {close}?"
    elif re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not Path(name).parent.exists():
        remedy = f"No model is downloaded; if the hub has it: hf download {name} --local-dir {Path(name).name}, and give that folder."
    raise CheckpointError(
        "the model cannot be found",
        got=name,
        expected=f"a folder{'' if weights else ' (its config.json alone is enough)'}, `{DEMO_MODEL}`, or a name under $QERL_MODELS"
        + (f" ({', '.join(names[:8])})" if names else " (not set or empty)"),
        remedy=remedy,
    )


def _sizes_in(name: str) -> list[str]:
    """The numbers of parameters that a model's name gives, such as ``0.5b``."""
    return re.findall(r"(?<![\w.])\d+(?:\.\d+)?[bm](?![a-z0-9])", name.lower())
