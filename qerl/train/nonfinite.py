"""An update whose gradient is not finite: it is not made, and what it would have been made from is written for inspection.

The file is a dictionary that ``torch.load(path, weights_only=True)`` reads: the update's number, the gradient's norm, the names of
the parameters whose gradients are not finite, the loss of each micro-batch, and the micro-batches themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from qerl.errors import TrainingError
from qerl.metrics.files import whole_file
from qerl.records import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """What is known of an update that cannot be made."""

    update: int
    """Its number, 1 for the first of the run."""
    norm: float
    """Of the gradient: infinity or NaN."""
    parameters: tuple[str, ...]
    """Trained parameters whose own gradient is not finite; none when only the sum of squares overflows."""
    losses: tuple[float, ...]
    """Of each micro-batch."""
    batches: tuple[TrainBatch, ...]

    def error(self, written: Path | None) -> TrainingError:
        """The error that stops a run."""
        bad = [index for index, loss in enumerate(self.losses) if not abs(loss) < float("inf")]
        where = f"losses of micro-batches {bad} are not finite" if bad else "all losses are finite"
        return TrainingError(
            f"the gradient of update {self.update} is not finite",
            got=f"norm {self.norm}, {len(self.parameters)} parameters ({', '.join(self.parameters[:3]) or 'none alone'}); {where}"
            + (f"; the batch is in {written}" if written is not None else ""),
            remedy="Lower optim.lr, look at the batch for degenerate answers, or use optim.nonfinite=skip to go on without such updates",
        )


Report: TypeAlias = Callable[[NonFinite], None]
"""Told of an update that is skipped, or before the run stops."""


def write_nonfinite(path: Path, found: NonFinite) -> None:
    """Write the file, whole or not at all."""
    content: dict[str, object] = {
        "update": found.update,
        "norm": found.norm,
        "parameters": list(found.parameters),
        "losses": list(found.losses),
        "batches": [_tensors(batch) for batch in found.batches],
    }
    with whole_file(path) as temporary:
        torch.save(content, temporary)


def _tensors(batch: TrainBatch) -> dict[str, Tensor]:
    """What was packed. How shared prompts are read follows from the pieces."""
    return {field.name: getattr(batch, field.name).cpu() for field in fields(batch) if field.name != "shared"}


def names_of(gradients: Sequence[tuple[str, Tensor | None]]) -> tuple[str, ...]:
    """Names whose gradient holds a value that is not finite."""
    return tuple(name for name, grad in gradients if grad is not None and not bool(torch.isfinite(grad).all()))
