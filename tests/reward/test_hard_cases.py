"""Hand-labeled answers: ``outcome`` is what a person says; ``parsed``, where given, is what must have been found."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from answer_builders import make_completion

from qerl.config.schema import RewardConfig
from qerl.reward.compose import Rewarder

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "rewards.md"
CASES = [json.loads(line) for line in Path(__file__).with_name("hard_cases.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def scores():
    with Rewarder(RewardConfig(), max_new_tokens=100) as rewarder:
        return rewarder.score([make_completion(case["text"], case["answer"]) for case in CASES])


def test_there_are_enough_cases_of_every_kind():
    outcomes = [case["outcome"] for case in CASES]
    assert len(CASES) >= 300
    assert min(outcomes.count("wrong"), outcomes.count("correct")) >= 60
    assert outcomes.count("unparsable") >= 8
    assert len({case["why"] for case in CASES}) == len(CASES)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case["why"] for case in CASES])
def test_verdict_agrees_with_the_label(scores, index):
    case, score = CASES[index], scores[index]
    assert score.outcome.value == case["outcome"], (score.parsed, score.note)
    assert score.parsed == case.get("parsed", score.parsed)
    assert score.reward == float(case["outcome"] == "correct")


def test_the_list_of_what_math_verify_alone_gets_wrong_is_current():
    """Written by the script for the pinned version; another version may judge otherwise."""
    if f"math-verify {importlib.metadata.version('math-verify')} alone" not in PAGE.read_text(encoding="utf-8"):
        pytest.skip("docs/rewards.md was written with another version of math-verify")
    done = subprocess.run([sys.executable, ROOT / "scripts" / "math_verify_alone.py", "--check"], check=False)
    assert done.returncode == 0, "run `python scripts/math_verify_alone.py`"
