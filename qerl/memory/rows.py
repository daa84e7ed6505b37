"""Rows of the decode batch, and the noise that is kept for them and for the answers of a pass.

The engine (``qerl.rollout``) and the plan ask the same functions. A captured step has one of a few numbers of rows, so a batch may have more
than sequences are decoded at once.
"""

from __future__ import annotations

from qerl.config.schema import Config
from qerl.memory import shapes
from qerl.model.aqn.noise import PASS_TABLE_BYTES, keeps_tables
from qerl.model.spec import ModelSpec

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Rows that a captured step may have; beyond the last, multiples of 128."""


def buckets_for(most: int) -> tuple[int, ...]:
    """Row counts of captured steps, ascending, up to the first that holds ``most`` rows."""
    counts = [*BUCKETS, *range(BUCKETS[-1] + 128, most + 128, 128)]
    return tuple(counts[: sum(count < most for count in counts) + 1])


def decode_rows(config: Config, device_type: str) -> int:
    """Rows of the decode batch when all that are decoded at once run."""
    captured = device_type == "cuda" and not config.rollout.static_shapes
    return buckets_for(config.decode_slots)[-1] if captured else config.decode_slots


def table_bytes(config: Config, spec: ModelSpec, device_type: str) -> int:
    """Draws of the rows of the decode batch, float32, where each has its own and they are kept from step to step."""
    rows, width = decode_rows(config, device_type), shapes.noise_width(config, spec)
    by_row = config.aqn.scope in ("group", "response")
    return 4 * rows * width if by_row and keeps_tables(config.aqn.scope, rows, width, device_type) else 0


def pass_bytes(config: Config, spec: ModelSpec, tokens: int) -> int:
    """Draws that a pass of so many tokens holds for its answers, float32, taken to be as long as they may."""
    if config.aqn.scope not in ("group", "response"):
        return 0
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    held = 4 * -(-tokens // longest) * shapes.noise_width(config, spec)
    return held if held <= PASS_TABLE_BYTES else 0
