"""The least memory of paged keys and values: one sequence at its longest must fit, or nothing ever ends."""

from __future__ import annotations

from qerl.errors import ConfigError

SPARE_PAGES = 2
"""Pages beside those of the running sequences: one of the spare row, and the one that belongs to nobody."""


def check_pages(pages: int, longest: int, *, page_tokens: int, page_bytes: int) -> None:
    """Refuse a stock of pages in which the longest sequence has no room.

    Args:
        pages: that the memory holds.
        longest: tokens in the cache of the longest prompt and answer.
        page_tokens: tokens of a page.
        page_bytes: bytes of a page, keys and values of all layers.

    Raises:
        ConfigError: fewer pages than that sequence and the spare ones need.
    """
    least = -(-longest // page_tokens) + SPARE_PAGES
    if pages >= least:
        return
    # In whole kilobytes and one more, so that the figure is enough as it is printed.
    gigabytes = f"{(least * page_bytes // 1000 + 1) / 1e6:.6f}"
    raise ConfigError(
        "the keys and values of the longest sequence do not fit the memory for them",
        got=f"room for {max(0, pages - SPARE_PAGES) * page_tokens} tokens",
        expected=f"{longest}, of the longest prompt and answer",
        remedy=f"Set rollout.kv_cache_gb to at least {gigabytes}, shorten rollout.max_prompt_tokens or the answers, or free memory on "
        "the device.",
    )
