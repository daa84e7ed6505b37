"""Cells beside each other on one GPU: whether what they are given is there, said before any of them begins."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qerl import memory
from qerl.config.schema import Config
from qerl.errors import ConfigError
from qerl.experiments.cells import Cell
from qerl.model.spec import ModelSpec
from qerl.train.fit import settle_memory
from qerl.train.session import require_model_path, resolve_device
from qerl.units import GB, bytes_text


def check_shares(cells: Sequence[Cell], jobs: int, devices: int) -> list[str]:
    """Refuse cells that would take each other's memory; returns what else there is to say of it (none or one text).

    A cell with a number as ``train.memory_budget`` may take so much, one with ``auto`` is counted with its plan; both take ``memory.OUTSIDE`` more. The
    largest of those that run are set beside each other: which will be is not known.

    Args:
        cells: those to be run.
        jobs: cells at one time.
        devices: GPUs that they are spread over; with 0 nothing is checked.

    Raises:
        ConfigError: they need more than a GPU has.
    """
    on_gpu = [cell for cell in cells if cell.problem is None and cell.config is not None and _is_on_gpu(cell.config)]
    each = min(-(-jobs // devices), len(on_gpu)) if devices else 1
    if each < 2:
        return []
    # Cells of one group differ by their seed alone.
    needs = {cell.group: _need(cell.config) for cell in {cell.group: cell for cell in on_gpu}.values() if cell.config}
    largest = sorted((needs[cell.group] for cell in on_gpu), reverse=True)[:each]
    total = min(torch.cuda.get_device_properties(index).total_memory for index in range(devices))
    part = (total / each - memory.OUTSIDE) // GB
    # Below 1 GB no model worth training has room.
    remedy = f"Set train.memory_budget={part:g} or less, or run" if part >= 1 else "Run"
    remedy += " fewer at one time (--jobs)"
    if sum(largest) > total:
        raise ConfigError(
            "cells beside each other on one GPU need more memory than it has",
            got=f"{each} of up to {bytes_text(largest[0])}, {bytes_text(sum(largest))} together (train.memory_budget or the plan of a cell, "
            f"and {bytes_text(memory.OUTSIDE)} of its process)",
            expected=f"at most {bytes_text(total)}",
            remedy=remedy,
        )
    if not any(isinstance(cell.config.train.memory_budget, str) for cell in on_gpu if cell.config is not None):
        return []
    return [
        f"{each} cells share a GPU, and some have no number as train.memory_budget: what such a cell keeps may grow until another has none. {remedy}"
    ]


def _is_on_gpu(config: Config) -> bool:
    return resolve_device(config.model.device).type == "cuda"


def _need(config: Config) -> int:
    """Bytes of a GPU that a cell may need; 0 where nothing is said of it (``off``)."""
    setting = config.train.memory_budget
    if setting == "off":
        return 0
    if setting == "auto":
        spec = ModelSpec.from_folder(require_model_path(config))
        return memory.predict(settle_memory(config), spec, device_type="cuda").peak + memory.OUTSIDE
    return int(setting * GB) + memory.OUTSIDE
