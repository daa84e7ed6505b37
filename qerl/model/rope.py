"""How a ``config.json`` describes the rotary position embedding. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from qerl.errors import CheckpointError

ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding: base ``theta`` and how its frequencies are stretched.

    ``linear`` divides every frequency by ``factor``. ``llama3`` divides the slow ones (wavelength above
    original_max_positions / low_freq_factor), keeps the fast ones (below original_max_positions / high_freq_factor)
    and interpolates between.
    """

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0


def read_rope(config: Mapping[str, Any], max_positions: int, source: str) -> RopeSpec:
    """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before).

    Raises:
        CheckpointError: a kind of scaling that is not supported, or an unusable number.
    """
    values = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = values.get("rope_type", values.get("type", "default"))
    if any(isinstance(value, Mapping) for value in values.values()):
        kind = "one per layer type"
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"{source}: this kind of rotary embedding is not supported",
            got=f"rope_type={kind}",
            expected=f"one of {', '.join(ROPE_KINDS)}",
        )
    if values.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise CheckpointError(f"{source}: rotating a part of each head is not supported", got="partial_rotary_factor")
    theta = positive_number(values.get("rope_theta", config.get("rope_theta", 10000.0)), "rope_theta", source)
    if kind == "default":
        return RopeSpec(theta=theta)
    needed = ("factor",) if kind == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
    stretch = {key: positive_number(values.get(key), f"rope {key}", source) for key in needed}
    if kind == "llama3" and stretch["high_freq_factor"] <= stretch["low_freq_factor"]:
        raise CheckpointError(
            f"{source}: llama3 rope factors are unusable", got=stretch, expected="high_freq_factor > low_freq_factor"
        )
    original = config.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
    return RopeSpec(theta=theta, kind=kind, original_max_positions=int(original or max_positions), **stretch)


def positive_number(value: Any, key: str, source: str) -> float:
    """``value`` as a float, or an error that names file and key."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise CheckpointError(f"{source}: {key} is unusable", got=value, expected="a positive number")
    return float(value)
