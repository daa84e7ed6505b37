"""What an engine is not made with: settings out of range, and those that exclude one another or would be ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import torch

from qerl.config.schema import KvFormat
from qerl.errors import ConfigError


def check_counts(
    counts: Mapping[str, int | None], *, expected_tokens: int, max_model_len: int | None, limit: int
) -> None:
    """Refuse numbers out of range.

    Args:
        counts: name -> 1 or more; None is what the engine chooses.
        expected_tokens: 0 or more.
        max_model_len: at most ``limit``, the model's own.
    """
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"engine setting {name} is out of range", got=value, expected="1 or more")
    if expected_tokens < 0:
        raise ConfigError("engine setting expected_tokens is out of range", got=expected_tokens, expected="0 or more")
    if max_model_len is not None and not 1 <= max_model_len <= limit:
        raise ConfigError(
            "engine setting max_model_len is out of range",
            got=max_model_len,
            expected=f"1 to {limit}, the model's longest sequence",
        )


def check_kv_format(kv_format: str, device: torch.device) -> None:
    """Refuse a format that there is not, or not on this device."""
    known = get_args(KvFormat)
    if kv_format not in known:
        raise ConfigError("engine setting kv_format is not known", got=kv_format, expected=", ".join(known))
    if kv_format != "compute" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(
            "keys and values in FP8 need a GPU that converts it",
            got=f"rollout.kv_format={kv_format} on compute capability {torch.cuda.get_device_capability(device)}",
            expected="8.9 or newer",
            remedy="Set rollout.kv_format=compute.",
        )


def check_choices(
    *,
    paged: bool,
    graphs: bool,
    static_shapes: bool,
    read_together: bool,
    kv_bytes: int | None,
    device: torch.device,
) -> None:
    """Refuse what excludes one another, and what an unpaged cache would ignore."""
    if read_together and static_shapes:
        raise ConfigError(
            "rows that read pages together do not keep their bits when others end",
            got="rollout.read_together=true and rollout.static_shapes=true",
            expected="one of them at most",
        )
    if graphs and not (device.type == "cuda" and paged):
        raise ConfigError("decode steps can be captured on CUDA with a paged cache only", got=str(device))
    asked = {"static_shapes": static_shapes, "read_together": read_together, "kv_bytes": kv_bytes is not None}
    needing = [name for name, given in asked.items() if given]
    if needing and not paged:
        raise ConfigError(
            f"engine setting {needing[0]} needs keys and values in pages",
            got=f"{needing[0]} with an unpaged cache on {device.type}",
            remedy=f"Add paged=True, or leave {needing[0]} out.",
        )
