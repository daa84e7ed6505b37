"""Single calculations in digits: a task for models that word problems are too hard for.

    What is 17 + 25?

Sums and differences of numbers up to ``LARGEST_TERM``, products of numbers up to ``LARGEST_FACTOR``; every result is a natural number
or 0. Each calculation occurs once, in the split that the SHA-256 of its text gives it, and in the order of that hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

LARGEST_TERM = 20
LARGEST_FACTOR = 12
TEST_PERCENT = 30


def calculations(split: str) -> list[dict[str, str]]:
    """All calculations of one split, the same list always.

    Args:
        split: ``train`` or ``test``.

    Returns:
        Rows of ``id``, ``question``, ``answer``.
    """
    found = []
    for text, result in _all():
        digest = hashlib.sha256(text.encode()).hexdigest()
        if ("test" if int(digest[:16], 16) % 100 < TEST_PERCENT else "train") == split:
            found.append((digest, text, result))
    return [
        {"id": f"{split}-{digest[:16]}", "question": f"What is {text}?", "answer": str(result)}
        for digest, text, result in sorted(found)
    ]


def _all() -> Iterator[tuple[str, int]]:
    terms, factors = range(1, LARGEST_TERM + 1), range(1, LARGEST_FACTOR + 1)
    for x in terms:
        for y in terms:
            yield f"{x} + {y}", x + y
            if x >= y:
                yield f"{x} - {y}", x - y
    for x in factors:
        for y in factors:
            yield f"{x} * {y}", x * y
