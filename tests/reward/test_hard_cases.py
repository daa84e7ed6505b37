"""Hand-labeled answers: ``outcome`` is what a person says; ``parsed``, where given, is what must have been found."""

import json
from pathlib import Path

import pytest
from answer_builders import make_completion

from qerl.config.schema import RewardConfig
from qerl.reward.compose import Rewarder

CASES = [json.loads(line) for line in Path(__file__).with_name("hard_cases.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def scores():
    with Rewarder(RewardConfig(), max_new_tokens=100) as rewarder:
        return rewarder.score([make_completion(case["text"], case["answer"]) for case in CASES])


def test_there_are_enough_cases_of_every_kind():
    outcomes = [case["outcome"] for case in CASES]
    assert len(CASES) >= 100
    assert min(outcomes.count("wrong"), outcomes.count("correct")) >= 20
    assert outcomes.count("unparsable") >= 5


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case["why"] for case in CASES])
def test_verdict_agrees_with_the_label(scores, index):
    case, score = CASES[index], scores[index]
    assert score.outcome.value == case["outcome"], (score.parsed, score.note)
    assert score.parsed == case.get("parsed", score.parsed)
    assert score.reward == float(case["outcome"] == "correct")
