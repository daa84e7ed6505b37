"""List where math-verify by itself disagrees with the hand labels of tests/reward/hard_cases.jsonl, in docs/rewards.md.

    python scripts/math_verify_alone.py            # rewrites the list in the page
    python scripts/math_verify_alone.py --check    # exit code 1 when the page is not what would be written

"Alone" is ``verify(parse(reference), parse(text))`` with math-verify's own defaults: how a first reward function is
usually written. A reference is what follows ``####`` and stands between dollar signs, as its manual asks for.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from math_verify import parse, verify

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tests" / "reward" / "hard_cases.jsonl"
PAGE = ROOT / "docs" / "rewards.md"
BEGIN, END = "<!-- math-verify alone: begin -->", "<!-- math-verify alone: end -->"


def says_right(text: str, reference: str) -> bool:
    """math-verify's verdict, without anything of ours around it."""
    value = reference.rpartition("####")[2].strip()
    expected = parse(f"${value}$" if "$" not in value and "boxed" not in value else value)
    return bool(verify(expected, parse(text)))


def disagreements(cases: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Cases whose label is not math-verify's verdict, with that verdict. Unparsable answers are not right."""
    for case in cases:
        verdict = says_right(case["text"], case["answer"])
        if verdict != (case["outcome"] == "correct"):
            yield case, verdict


def block(cases: list[dict[str, Any]]) -> str:
    """The part of the page between the marks."""
    found = list(disagreements(cases))
    right = sum(verdict for _, verdict in found)
    version = importlib.metadata.version("math-verify")
    counts = f"it rejects {len(found) - right} right answers and accepts {right} that are wrong"
    lines = [
        BEGIN,
        f"math-verify {version} alone disagrees with {len(found)} of the {len(cases)} labels: {counts}.",
        "",
        "| Case | Answer | Reference | Label | math-verify |",
        "|---|---|---|---|---|",
    ]
    for case, verdict in found:
        cells = [
            case["why"],
            code(case["text"]),
            code(case["answer"]),
            case["outcome"],
            "right" if verdict else "not right",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, END])


def code(text: str) -> str:
    """A code span that keeps its table cell whole."""
    shown = " ".join(text.split()).replace("|", "\\|")
    return f"`` {shown} ``" if shown else "(empty)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when the page is stale")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    wanted = before + block(cases) + after
    if arguments.check:
        return int(wanted != page)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
