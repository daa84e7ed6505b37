"""Bytes that exist: tensors by owner, and what the allocator and the system say, by phase."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.config.schema import Config
from qerl.kernels.cuda import lent_bytes, reset_lent_peak
from qerl.memory.ledger import PHASES, Ledger, predict
from qerl.model.decoder import Decoder, DecoderLayer
from qerl.model.spec import ModelSpec


def measure_resident(
    model: Decoder, *, masters: Iterable[Tensor] = (), moments: Iterable[Tensor] = ()
) -> dict[str, int]:
    """Bytes of the tensors that exist, under the owners that outlive a phase. A tensor is counted once.

    Args:
        model: the shared decoder.
        masters: float32 copies that the optimizer keeps of narrower weights.
        moments: the optimizer's state; without it the owner is left out.
    """
    linears = list(model.grouped_linears())
    adapters = [p for linear in linears if linear.lora is not None for p in linear.lora.parameters()]
    packed = [linear.weight for linear in linears] + ([] if model.packed_head is None else [model.packed_head])
    kept = [weight.kept_OI for weight in packed if weight.format != "bf16"]
    head = [model.lm_head] if model.packed_head is None else list(model.packed_head.tensors.values())
    norms = [p for name, p in model.named_parameters() if name.endswith("norm")]
    layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    references = [norm for layer in layers for norm in layer.reference_norms.values()]
    owners = {
        "base_weights": sum(linear.weight.nbytes() for linear in linears) + _bytes(linear.bias_O for linear in linears),
        "dense_cache": _bytes([model.dense_head, *kept, *(x.dense_OI for x in linears if x.weight.format != "bf16")]),
        "embeddings": _bytes([model.embed_tokens, *head]),
        "norms": _bytes([*norms, *references]),
        "tables": _bytes([model.rope_cos, model.rope_sin]),
        "adapters": _bytes(adapters),
        "adapter_copies": _bytes(copy for x in linears if x.lora is not None for copy in x.lora.copies()),
        "masters": _bytes(masters),
    }
    held = _bytes(moments)
    return owners | {"optimizer": held} if held else owners


def held_against(
    ledger: Ledger, measured: Mapping[str, int], peaks: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, float]]:
    """Predicted and measured bytes with the error of the prediction, by owner; and by phase what its other owners have together.

    Args:
        ledger: the prediction.
        measured: owner -> bytes of its tensors (``measure_resident`` and the largest cache).
        peaks: phase -> `allocated` at its peak; empty where nothing is known.

    Returns:
        Owner, or "PHASE, all else" -> ``predicted``, ``measured`` and ``error`` (predicted / measured - 1; left out where nothing was measured). What is
        left of a phase is its peak without the owners that are measured: what backward passes keep, workspaces, and all that exists for a
        moment. A peak is of passes as they fell, the prediction of full ones.
    """
    predicted = ledger.owners()
    rows = {owner: (predicted.get(owner, 0), size) for owner, size in measured.items() if size or predicted.get(owner)}
    for phase in PHASES:
        if phase not in peaks:
            continue
        there = {**ledger.resident, **ledger.phases[phase]}
        known = [owner for owner in measured if owner in there]
        left = ledger.total(phase) - sum(there[owner] for owner in known)
        rows[f"{phase}, all else"] = (left, peaks[phase]["allocated"] - sum(measured[owner] for owner in known))
    return {
        name: {"predicted": ours, "measured": found} | ({"error": ours / found - 1} if found > 0 else {})
        for name, (ours, found) in rows.items()
    }


def held_against_its_tokens(
    config: Config, spec: ModelSpec, measured: Mapping[str, int], peaks: PhasePeaks
) -> dict[str, Any]:
    """The backward pass's peak beside a plan for the tokens of the largest pass that was made: a run's plan is for passes that are full.

    Args:
        config: the run's configuration.
        spec: the model's shapes.
        measured: as ``held_against`` has it.
        peaks: of the run.

    Returns:
        ``tokens`` of the largest pass with a gradient, prompts included; ``backward`` and ``backward, all else`` as ``held_against`` has them,
        for that many tokens. Empty where no pass had a gradient, or nothing is known (CPU).
    """
    if not peaks.largest_pass or "backward" not in peaks.run:
        return {}
    train = config.train.model_copy(update={"token_budget": peaks.largest_pass})
    ledger = predict(config.model_copy(update={"train": train}), spec, device_type=peaks.device.type)
    predicted, found = ledger.total("backward"), peaks.run["backward"]["allocated"]
    rest = held_against(ledger, measured, {"backward": peaks.run["backward"]})["backward, all else"]
    whole = {"predicted": predicted, "measured": found, "error": predicted / found - 1}
    return {"tokens": peaks.largest_pass, "backward": whole, "backward, all else": rest}


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    distinct = {id(tensor): tensor for tensor in tensors if tensor is not None}
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())


def process_bytes() -> dict[str, int]:
    """Current and peak resident set of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    statm = Path("/proc/self/statm")
    current = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak
    return {"rss": current, "rss_peak": peak}


def device_bytes(device: torch.device) -> dict[str, int]:
    """Figures of a CUDA device in bytes, torch's allocator and memory that is lent together; empty for the CPU. The peaks of the two may
    be of different moments."""
    if device.type != "cuda":
        return {}
    lent, most_lent = lent_bytes(device)
    return {
        "allocated": torch.cuda.memory_allocated(device) + lent,
        "allocated_peak": torch.cuda.max_memory_allocated(device) + most_lent,
        "reserved": torch.cuda.memory_reserved(device) + lent,
        "reserved_peak": torch.cuda.max_memory_reserved(device) + most_lent,
    }


def return_unused(device: torch.device) -> None:
    """Give memory that no tensor uses back to the device, so that it can be had in other pieces."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(slots=True)
class PhasePeaks:
    """Peaks of a CUDA device between the borders of phases; on the CPU nothing is known and nothing is kept.

    Torch's own peak counters are started anew at each border, so they hold the last phase's peak afterwards; ``overall`` is the run's.
    """

    device: torch.device
    step: dict[str, dict[str, int]] = field(default_factory=dict)
    """Phase -> peaks of this step."""
    run: dict[str, dict[str, int]] = field(default_factory=dict)
    """Phase -> highest peaks so far."""
    largest_pass: int = 0
    """Tokens of the largest pass so far that kept activations."""
    larger_passes: int = 0
    """Passes that were larger than any before them."""

    def begin(self) -> None:
        """A phase begins: what came before is nobody's."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            reset_lent_peak(self.device)

    def end(self, phase: str) -> None:
        """A phase ends: its peaks since ``begin`` are kept."""
        figures = device_bytes(self.device)
        if figures:
            self.note(phase, allocated=figures["allocated_peak"], reserved=figures["reserved_peak"])

    def note(self, phase: str, *, allocated: int, reserved: int) -> None:
        """Keep the larger of what was and what is."""
        for kept in (self.step, self.run):
            peaks = kept.setdefault(phase, {"allocated": 0, "reserved": 0})
            peaks["allocated"] = max(peaks["allocated"], allocated)
            peaks["reserved"] = max(peaks["reserved"], reserved)

    def make_room(self, tokens: int) -> None:
        """Before a pass that keeps activations: one that is larger than any before finds nothing cached.

        Torch's allocator keeps the memory of each large tensor apart, and gives it to tensors of at most its size. So the memory of the passes so far
        has no room for the activations of a larger one, one tensor a layer, and would stay beside the new one: a run reserved twice what it needed after
        one larger pass, and three times after two. Few passes are the largest yet.

        Args:
            tokens: of the pass; what it keeps grows with them.
        """
        if tokens > self.largest_pass:
            self.largest_pass = tokens
            self.larger_passes += 1
            return_unused(self.device)

    def end_step(self) -> dict[str, dict[str, int]]:
        """Peaks of the step that ends; the next begins with none."""
        ended, self.step = self.step, {}
        return ended

    @property
    def overall(self) -> dict[str, int]:
        """Highest peaks of the run; empty where nothing is known."""
        return {
            f"{kind}_peak": max(peaks[kind] for peaks in self.run.values())
            for kind in ("allocated", "reserved")
            if self.run
        }
