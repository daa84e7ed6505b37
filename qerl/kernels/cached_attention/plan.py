"""How the contexts of a decode step are cut into parts. Plain arithmetic, free of torch.

The numbers of a plan follow from the batch, the heads, the device and the most tokens of a row alone, so one captured graph serves every
length; how many parts a context has then follows from its own length, on the device: `part_tiles` there.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_TILES = 2
"""Fewest tiles of a part where a context has several."""
LONG_TILES = 32
"""A part of so many tiles costs little beside its tiles: contexts that are longer than `first` of them have more parts, for other
programs, whatever the rows beside them."""
MOST_PARTS = 64
"""Of a context; joined in two turns of eight."""
ALL_PARTS = 1024
"""Of all rows together, about, beyond those that fill the device: their sums take memory."""
PROGRAMS_PER_PROCESSOR = 2

TOGETHER_SIDE = 64
"""Rows of the matrix product of what a group of rows reads together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the kernel is told."""

    first: int
    """Parts that a context is cut into as soon as it has the tiles."""
    most: int
    """Parts of a context at most; 1: none is cut."""
    programs: int
    """Programs that share out the parts of all rows and heads."""

    @property
    def slots(self) -> int:
        """Sums that a row may leave in memory: those of its parts, and of eights of them."""
        return self.most + (-(-self.most // 8) if self.most > 8 else 0)


def plan_for(rows: int, kv_heads: int, processors: int, most_tiles: int) -> Plan:
    """The plan of a batch of `rows` rows whose contexts have at most `most_tiles` tiles of keys of their own."""
    pairs = rows * kv_heads
    first = max(1, min(MOST_PARTS, PROGRAMS_PER_PROCESSOR * processors // pairs))
    most = max(first, min(MOST_PARTS, ALL_PARTS // rows))
    # No more than the longest context can have.
    most = max(1, min(most, max(min(first, -(-most_tiles // LEAST_TILES)), -(-most_tiles // LONG_TILES))))
    return Plan(first=first, most=most, programs=max(pairs, min(pairs * most, PROGRAMS_PER_PROCESSOR * processors)))


def members_for(heads: int, kv_heads: int) -> int:
    """Rows of a group at most: those whose heads, padded to a power of 2 for each key/value head, fill the product."""
    return max(1, TOGETHER_SIDE >> (heads // kv_heads - 1).bit_length())


def shared_plan(groups: int, kv_heads: int, processors: int) -> Plan:
    """The plan for what the rows of each of up to `groups` groups read together; its sums go to every row, so there are fewer of them."""
    pairs = groups * kv_heads
    first = max(1, min(MOST_PARTS // 2, PROGRAMS_PER_PROCESSOR * processors // pairs))
    most = max(first, min(MOST_PARTS // 2, ALL_PARTS // (8 * groups)))
    return Plan(first=first, most=most, programs=PROGRAMS_PER_PROCESSOR * processors)
