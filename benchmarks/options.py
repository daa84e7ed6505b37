"""Values of options: checked before anything is measured, for what is refused after minutes of measuring is measured again."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection, Mapping, Sequence

BASES = ("bf16", "nvfp4", "mxfp4", "nf4", "nf4_dq")
"""Formats of a base."""
HEADS = ("bf16", "fp8", "nvfp4")
"""Formats of an LM head."""
SCOPES = ("rollout", "group", "response", "token")
"""Of noise."""


def count(text: str, least: int = 1) -> int:
    """A whole number from ``least`` on."""
    try:
        found = int(text)
    except ValueError:
        found = least - 1
    if found < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from {least} on")
    return found


def count_from_0(text: str) -> int:
    """A whole number from 0 on."""
    return count(text, 0)


def counts(text: str) -> list[int]:
    """Whole numbers from 1 on, with commas; none of an empty text."""
    return [count(part) for part in text.split(",") if part]


def room(text: str) -> float | None:
    """GB, or None for auto."""
    if text == "auto":
        return None
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not (found > 0 and math.isfinite(found)):
        raise argparse.ArgumentTypeError(f"{text!r} is no room; expected auto or GB")
    return found


def rooms(text: str) -> list[float | None]:
    """Several, with commas."""
    return [room(part) for part in text.split(",")]


def names(known: Collection[str], *, none: bool = False) -> Callable[[str], list[str]]:
    """Reads names of these, with commas; ``none``: an empty text is none of them."""

    def read(text: str) -> list[str]:
        found = text.split(",") if text or not none else []
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return found

    return read


def tokens_by_size(known: Collection[str]) -> Callable[[str], tuple[str, int]]:
    """Reads 7B=512."""

    def read(text: str) -> tuple[str, int]:
        size, _, most = text.partition("=")
        if size not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is no SIZE=N of a size of {', '.join(known)}")
        return size, count(most)

    return read


_NOT_GIVEN = object()


def given(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> list[str]:
    """Options that stand on the command line, with whatever value, as the parser names them; in the parser's order."""
    known = vars(parser.parse_args(words))
    # What is there already is not set to its default.
    found = parser.parse_args(words, argparse.Namespace(**dict.fromkeys(known, _NOT_GIVEN)))
    return [name for name in known if getattr(found, name) not in (_NOT_GIVEN, [])]


def refuse_unused(
    parser: argparse.ArgumentParser, names: Sequence[str], acts: Mapping[str, str], missing: Mapping[str, str]
) -> None:
    """End with a message where an option acts on nothing.

    Args:
        parser: of the program.
        names: options that are given.
        acts: option -> what it acts on, one of a few things with a comma between; an option that is not here acts always.
        missing: what is not there -> what to say of an option that acts on nothing else.
    """
    for name in names:
        kinds = acts.get(name, "").split(",")
        if all(kind in missing for kind in kinds):
            parser.error(f"--{name.replace('_', '-')} is {missing[kinds[0]]}")
