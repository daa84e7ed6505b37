"""Where the rows of a decode step stand in the cache.

Legend: B rows, P pages of the cache, L tokens a page, N pages a row has at most, C groups, M rows of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPages:
    """First pages that several rows have in common, so that a kernel may read them once for all of them. They are full."""

    pages_B: Tensor
    """int32 [B]: how many of a row's pages are read with its group; 0 where a row is in none."""
    members_CM: Tensor
    """int32 [C, M]: rows of each group, all of them with the same such pages, then -1; a group without rows is -1 throughout."""
    likely_groups: int
    """Groups that work is planned for; there may be more or fewer."""


class CacheRows:
    """Lengths and pages of the rows, and what follows from them, which is computed once for all layers and only where it is asked for.

    Args:
        lengths_B: int64 [B], tokens of each row in the cache, which is the position of its new one.
        page_tokens: L.
        table_BN: int32 [B, N], the pages of each row in order; None when row b has page b alone (P >= B). A row whose only page is full
            goes on writing to its last place.
        longest: largest of ``lengths_B`` where the host knows it and there is no table; the device is asked otherwise.
        shared: pages that rows have in common, with a table; what is computed does not depend on it, but by rounding.
    """

    def __init__(
        self,
        lengths_B: Tensor,
        page_tokens: int,
        *,
        table_BN: Tensor | None = None,
        longest: int | None = None,
        shared: SharedPages | None = None,
    ):
        assert shared is None or table_BN is not None

        self.lengths_B = lengths_B
        self.page_tokens = page_tokens
        self.table_BN = table_BN
        self.shared = shared
        self._longest = longest
        self._masks: dict[torch.dtype, Tensor] = {}

    @cached_property
    def _position_B(self) -> Tensor:
        return self.lengths_B if self.table_BN is not None else self.lengths_B.clamp(max=self.page_tokens - 1)

    @cached_property
    def place_B(self) -> Tensor:
        """int64 [B]: page * L + offset of each row's new token."""
        if self.table_BN is None:
            return torch.arange(len(self.lengths_B), device=self.lengths_B.device) * self.page_tokens + self._position_B
        page_B = self.table_BN.gather(1, (self._position_B // self.page_tokens)[:, None])[:, 0]
        return page_B * self.page_tokens + self._position_B % self.page_tokens

    @cached_property
    def end(self) -> int:
        """Tokens of the cache to look at, in every row."""
        if self.table_BN is not None:
            return self.table_BN.shape[1] * self.page_tokens
        longest = int(self.lengths_B.max()) if self._longest is None else self._longest
        return min(longest + 1, self.page_tokens)

    def mask_B11L(self, dtype: torch.dtype) -> Tensor:
        """[B, 1, 1, end]: 0 for the tokens that a row attends to, its new one included, and -inf for others. In ``dtype`` and not bool, which
        torch's attention would turn into this in every layer."""
        if dtype not in self._masks:
            beyond_BL = torch.arange(self.end, device=self.lengths_B.device) > self._position_B[:, None]
            mask_BL = torch.zeros(beyond_BL.shape, dtype=dtype, device=beyond_BL.device)
            self._masks[dtype] = mask_BL.masked_fill_(beyond_BL, float("-inf"))[:, None, None]
        return self._masks[dtype]
