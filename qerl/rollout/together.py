"""Where rows that share a prompt read its pages together: the rule, in one place. Plain arithmetic.

A step that does so has a launch more in every layer, and each row joins a sum more: 8 us and .15 us a row on an H200 (heads of a 7B, groups of 8;
docs/rollout.md), for which a row is spared .4 ns for each token that another reads for it. So it pays from some 700 such tokens a row on at 64
rows, and from 400 at 512. What is asked for is above both, since groups of other sizes and other heads were not timed. The rule looks at the prompts of
a call alone, never at clocks or at the rows beside, so a run that is repeated decides as it did.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from qerl.rollout.sequence import Sequence

LEAST_ROWS = 64
"""Fewest rows of a step that reads together."""
LEAST_PAGES = 16
"""Fewest full pages of a prompt that is read so."""
LEAST_SPARED = 12
"""Fewest pages that a sequence of the call is spared, on average over all of them."""


def pays(sequences: Iterable[Sequence], members: int, page_tokens: int) -> bool:
    """Whether the steps of a call shall read prompts together.

    Args:
        sequences: of the call; those of one prefix follow one another.
        members: rows of a group at most (`members_for`).
        page_tokens: tokens a page.
    """
    count = spared = 0
    for _, group in groupby(sequences, key=lambda sequence: sequence.prefix):
        sharing = list(group)
        # All but the last token of a prompt are stored before the first step.
        pages = (sharing[0].prompt_length - 1) // page_tokens
        count += len(sharing)
        if pages >= LEAST_PAGES:
            spared += pages * (len(sharing) - -(-len(sharing) // members))
    return spared >= LEAST_SPARED * count
