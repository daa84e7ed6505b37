"""Where a GPU keeps dequantized copies of weights beside the packed ones: what ``quant.dense_cache=auto`` means."""

from __future__ import annotations

from qerl.config.schema import Config
from qerl.memory.shapes import ITEMSIZE, dense_cache_elements, largest_group, stored_groups
from qerl.model.spec import ModelSpec

COPIES_SHARE = 0.05
"""Share of the budget up to which a GPU has room for V beside the packed weights."""
LARGEST_TIMED = 30_000_000
"""Numbers of a model's largest weight up to which copies of its small ones have been timed: gate and up of a 1.5B are 27.5 million, and its
decode steps take 10 to 21 % less with copies of q k v and o (64 to 512 rows, H200, ``docs/rollout.md``); of a 3B's 45 nothing has been timed."""


def copies_pay(config: Config, spec: ModelSpec, room: int | None, *, device_type: str) -> bool | None:
    """Whether copies make the model faster and are a small share of the memory; None where there is nothing to decide.

    They do where at least one weight is small enough that V is kept of it, and none is larger than those of the models that were timed.

    Args:
        config: as asked for.
        spec: the model's shapes.
        room: bytes of the budget; without one nothing is kept.
        device_type: ``cpu`` or ``cuda``; the CPU keeps them whatever the plan.
    """
    if device_type != "cuda" or config.quant.dense_cache != "auto":
        return None
    kept = with_copies(config, True)
    elements = dense_cache_elements(kept, spec, stored_groups(kept, spec), device_type)
    if elements == 0:
        return None
    timed = config.model.dtype == "bfloat16" and largest_group(spec) <= LARGEST_TIMED
    return timed and room is not None and elements * ITEMSIZE[config.model.dtype] <= COPIES_SHARE * room


def settle_copies(config: Config, spec: ModelSpec, room: int | None, *, device_type: str) -> Config:
    """``quant.dense_cache=auto`` decided where nothing is trained, so that no plan is made (``memory.resolve`` asks also what they would take
    from it); arguments as for :func:`copies_pay`."""
    pays = copies_pay(config, spec, room, device_type=device_type)
    return config if pays is None else with_copies(config, pays)


def with_copies(config: Config, kept: bool) -> Config:
    """The configuration with copies on or off."""
    quant = config.quant.model_copy(update={"dense_cache": "on" if kept else "off"})
    return config.model_copy(update={"quant": quant})
