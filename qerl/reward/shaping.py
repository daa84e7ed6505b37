"""What is added to the reward for the shape of an answer, and says nothing about its being right."""

from __future__ import annotations

import re
from collections.abc import Sequence


def soft_overlong(length: int, *, max_new_tokens: int, buffer_tokens: int, penalty: float = 1.0) -> float:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), between ``-penalty`` and 0.

    0 up to ``max_new_tokens - buffer_tokens``, then linear, ``-penalty`` from ``max_new_tokens`` on.

    Args:
        length: answer length in tokens, the end token included.
        max_new_tokens: L_max of the paper.
        buffer_tokens: L_cache of the paper, at least 1.
        penalty: punishment at full length.
    """
    overshoot = length - (max_new_tokens - buffer_tokens)
    return -penalty * min(max(overshoot / buffer_tokens, 0.0), 1.0)


def pattern_found(completions: Sequence[str], pattern: str) -> list[float]:
    """1.0 for each text in which the regular expression is found anywhere (dot matches newline), else 0.0."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.search(text) is not None) for text in completions]
