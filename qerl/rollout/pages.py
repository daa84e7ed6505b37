"""Which pages of the key/value cache each row holds: plain bookkeeping, free of tensors.

A page holds the keys and values of ``page_tokens`` consecutive tokens of a sequence. Sequences that start from one prompt share its
full pages; the page in which the prompt ends is each row's own, since the answer goes on in it. Page 0 belongs to nobody:
rows that do not run write there.

Shape legend: R rows of the decode batch, B the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import pairwise

import numpy as np


class PageBook:
    """Free pages, and the pages of every row and of the spare row (which keeps a prompt for sequences that still wait).

    Args:
        pages: pages of the cache, page 0 included.
        page_tokens: tokens a page.
        rows: rows of the decode batch.
    """

    def __init__(self, *, pages: int, page_tokens: int, rows: int):
        self.page_tokens = page_tokens
        self.total = pages - 1
        """Pages that can be held."""
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self.spare: list[int] = []
        self.shared = [0] * rows
        """How many of a row's first pages are full ones of its prompt, which other rows may hold too."""
        self._counts_R = np.zeros(rows, dtype=np.int64)
        self.changed: set[int] = set()
        """Rows whose pages are not those of the device's table any more; emptied by whoever writes it."""
        self._free = list(range(pages - 1, 0, -1))
        self._holders = [0] * pages

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_tokens)

    def startable(self, tokens: int, *, prefill: bool, reserve: int) -> int:
        """Sequences that can start from a prompt of which ``tokens`` are stored, so that ``reserve`` pages stay free.

        One page each, beside the prompt's full pages if it must be computed and a page for the spare row.
        """
        return self.free - reserve - (tokens // self.page_tokens + 1 if prefill else 0)

    def start(self, rows: Items[int], tokens: int, *, prefill: bool, keep: bool) -> list[tuple[int, int]]:
        """Give pages to rows that start from one prompt, enough for its ``tokens`` stored ones and one more.

        Args:
            rows: each without pages.
            tokens: all but the last of the prompt.
            prefill: the prompt will be computed; else it is the one that the spare row keeps.
            keep: the spare row shall keep it (or go on doing so).

        Returns:
            (source, target) pages whose content must be copied: the page in which a kept prompt ends.
        """
        full = tokens // self.page_tokens
        partial = tokens % self.page_tokens > 0
        shared = self._take(full) if prefill else self.spare[:full]
        copies = []
        for row in rows:
            assert not self.rows[row], f"row {row} holds pages"
            (own,) = self._take(1)
            self._set(row, self._hold([*shared, own]))
            self.shared[row] = full
            if partial and not prefill:
                copies.append((self.spare[full], own))
        if prefill and keep:
            self.drop_spare()
            self.spare = self._hold([*shared, *self._take(int(partial))])
        elif not keep and not prefill:
            self.drop_spare()
        return copies

    def missing(self, tokens_B: np.ndarray) -> np.ndarray:
        """int64 [B]: pages that the first B rows lack for so many tokens each (int64 [B])."""
        wanted_B = -(-tokens_B // self.page_tokens)
        return np.maximum(wanted_B - self._counts_R[: len(tokens_B)], 0)

    def grow(self, row: int, tokens: int) -> bool:
        """Give a row pages for so many tokens; False (and nothing changed) when there are too few."""
        missing = self.pages_for(tokens) - len(self.rows[row])
        if missing > self.free:
            return False
        if missing > 0:
            self._set(row, [*self.rows[row], *self._hold(self._take(missing))])
        return True

    def release(self, row: int) -> None:
        """Take a row's pages away."""
        self._drop(self.rows[row])
        self._set(row, [])
        self.shared[row] = 0

    def drop_spare(self) -> None:
        """Forget the prompt that the spare row keeps."""
        self._drop(self.spare)
        self.spare = []

    def move(self, source: int, target: int) -> None:
        """Hand a row's pages to a row that has none."""
        assert not self.rows[target], f"row {target} holds pages"
        self._set(target, self.rows[source])
        self._set(source, [])
        self.shared[target], self.shared[source] = self.shared[source], 0

    def groups(self, most: int, least_pages: int) -> list[list[int]]:
        """Rows that hold the same first pages, at least so many, two and up to ``most`` of them together, as evenly as they go."""
        of_page: dict[int, list[int]] = {}
        for row, count in enumerate(self.shared):
            if count >= least_pages:
                of_page.setdefault(self.rows[row][0], []).append(row)
        groups = []
        for rows in of_page.values():
            parts = -(-len(rows) // most)
            cuts = [index * len(rows) // parts for index in range(parts + 1)]
            groups += [rows[start:stop] for start, stop in pairwise(cuts) if stop - start > 1]
        return groups

    def _set(self, row: int, pages: list[int]) -> None:
        self.rows[row] = pages
        self._counts_R[row] = len(pages)
        self.changed.add(row)

    def _take(self, count: int) -> list[int]:
        assert count <= self.free, "the caller asks for what there is"
        return [self._free.pop() for _ in range(count)]

    def _hold(self, pages: list[int]) -> list[int]:
        for page in pages:
            self._holders[page] += 1
        return pages

    def _drop(self, pages: list[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)
