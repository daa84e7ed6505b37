"""Sizes of a tile of logits. Legend: N tokens, D hidden size."""

from __future__ import annotations

TILE_ROWS = 8192
"""Rows of the head in a tile."""
TILE_TOKENS, MOST_TILE_TOKENS = 1024, 4096
"""Tokens of a tile. 1024 x 8192 float32 logits are 32 MiB: the product writes them and the pass over them reads them without leaving the
cache. Four times as many do leave it, which costs less than asking for four products that are shorter than the asking."""
_LONG_PRODUCT = 1 << 22
"""Tokens times hidden size from which a tile's product takes as long as the host needs for the next."""


def tile_tokens(tokens: int, width: int) -> int:
    """Most tokens of a tile in a pass over ``tokens`` (N) of hidden size ``width`` (D): a power of 2, more in narrow models if the pass
    itself is larger than that."""
    wanted = min(tokens // 2, _LONG_PRODUCT // width, MOST_TILE_TOKENS)
    return max(TILE_TOKENS, 1 << max(wanted, 1).bit_length() - 1)
