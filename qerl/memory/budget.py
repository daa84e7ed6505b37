"""How much memory a plan may take, on a device or on a card that is not there."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from qerl.config.schema import Config
from qerl.config.section import LARGEST
from qerl.errors import ConfigError
from qerl.kernels.cuda import share_of
from qerl.units import GB, bytes_text

USABLE = 0.92
"""Share of a GPU's memory, or of what a run is given of it, that a plan may fill; the rest is for gaps between allocations and ``OUTSIDE``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much memory a plan may take."""

    size: int
    """Bytes."""
    source: str
    """Where the figure comes from, in words."""


def budget_of(config: Config, device: torch.device) -> Budget | None:
    """The budget that ``train.memory_budget`` means on a device; None where there is no bound.

    A number on a GPU is like a GPU of that size: the plan may fill the same share of it, and the rest is for gaps (``bound``).
    """
    setting = config.train.memory_budget
    if setting == "off" or (setting == "auto" and device.type != "cuda"):
        return None
    if device.type != "cuda":
        assert setting != "auto"
        return Budget(size=int(setting * GB), source=f"train.memory_budget={setting:g}")
    share = share_of(device)
    return _smaller(config, share) or Budget(
        size=int(USABLE * share),
        source=f"{USABLE:.0%} of {bytes_text(share)} ({torch.cuda.get_device_name(device)})",
    )


def budget_of_size(config: Config, text: str) -> Budget:
    """The budget on a GPU of a given size, e.g. ``24GB`` (1e9 bytes each) or ``24GiB``: as :func:`budget_of` has it there, but with
    ``train.memory_budget=off`` it is the GPU.

    Raises:
        ConfigError: no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(GB|GiB|G)?\s*", text, flags=re.IGNORECASE)
    if match is None or not 0 < float(match[1]) <= LARGEST[float]:
        raise ConfigError("--gpu is not a size of memory", got=text, expected="a number of GB, such as 24GB or 80GB")
    unit = 2**30 if (match[2] or "").lower() == "gib" else GB
    size = float(match[1]) * unit
    return _smaller(config, size) or Budget(size=int(USABLE * size), source=f"{USABLE:.0%} of {text.strip()}")


def _smaller(config: Config, size: float) -> Budget | None:
    """What a plan may fill of ``train.memory_budget``, where that is less than a GPU has."""
    setting = config.train.memory_budget
    if isinstance(setting, str) or setting * GB >= size:
        return None
    return Budget(size=int(USABLE * setting * GB), source=f"{USABLE:.0%} of train.memory_budget={setting:g}")
