import itertools
import json

import pytest
from answer_builders import make_completion, make_prompt

from qerl.config.schema import EvalConfig, RewardConfig
from qerl.errors import DataError
from qerl.eval.evaluate import compare, evaluate, pass_at_k
from qerl.eval.intervals import bootstrap, wilson
from qerl.metrics.catalogue import lookup
from qerl.model.aqn import Noise, NoiseState
from qerl.reward.compose import Rewarder


class ScriptedEngine:
    """Gives each question the texts written for it; ``(text, "length")`` is a truncated answer."""

    def __init__(self, texts):
        self.texts = texts
        self.calls = []

    def generate(self, prompts, sampling, *, group_size=1, noise=None, adapters=True, on_progress=None):
        self.calls.append({"sampling": sampling, "group_size": group_size, "noise": noise, "adapters": adapters})
        completions = []
        for prompt in prompts:
            for entry in self.texts[prompt.id][:group_size]:
                text, stop = entry if isinstance(entry, tuple) else (entry, "stop")
                completions.append(make_completion(text, prompt=prompt, tokens=len(text), stop_reason=stop))
        return tuple(completions), {}


@pytest.fixture(scope="module")
def rewarder():
    with Rewarder(RewardConfig(), 100) as shared:
        yield shared


def run(rewarder, texts, answers=None, **settings):
    """Questions whose answer is 18 unless ``answers`` says otherwise."""
    prompts = [make_prompt((answers or {}).get(name, "18"), id=name) for name in texts]
    engine = ScriptedEngine(texts)
    result = evaluate(engine, prompts, rewarder, eval_cfg=EvalConfig(**settings), seed=5, max_new_tokens=64)
    return result, engine


def test_greedy_evaluation_counts_every_outcome_and_uses_wilson(rewarder):
    texts = {
        "right": ["18"],
        "right too": ["The answer is 18."],
        "cut but right": [("18", "length")],
        "cut": [("9 and", "length")],
        "silent": ["no idea"],
        "wrong": ["9"],
        "bad reference": ["18"],
    }
    result, engine = run(rewarder, texts, {"bad reference": "???"})
    assert result.by_outcome == {"unscorable": 1, "correct": 3, "truncated": 1, "unparsable": 1, "wrong": 1}
    assert result.accuracy == 3 / 6
    assert (result.low, result.high) == wilson(3, 6)
    assert (result.count, result.answers) == (7, 7)
    assert result.truncated == 2 / 7
    assert result.unparsable == result.unscorable == 1 / 7
    # Scripted answers have as many tokens as letters.
    assert result.mean_length == (2 + 17 + 2 + 5 + 7 + 1 + 2) / 7
    assert result.pass_at_k == {1: 0.5}
    assert result.maj_at_k == 0.5
    (call,) = engine.calls
    assert call["sampling"].stream == "eval_sample"
    assert (call["sampling"].temperature, call["sampling"].seed, call["sampling"].rollout) == (0.0, 5, 0)
    assert (call["group_size"], call["noise"], call["adapters"]) == (1, None, True)


def test_several_samples_give_average_pass_majority_and_a_bootstrap_interval(rewarder):
    texts = {
        "always": ["18", "18.0", "$18", "The answer is 18."],
        "majority": ["18", "9", "18.", "7"],
        "minority": ["9", "18", "9.0", "no idea"],
        "never": ["1", "2", "3", "4"],
    }
    result, _ = run(rewarder, texts, samples=4, temperature=1.0)
    shares = [1.0, 0.5, 0.25, 0.0]
    assert result.accuracy == pytest.approx(1.75 / 4)
    assert (result.low, result.high) == bootstrap(shares, 0.95, anchors=(0.0, 1.0), seed=5)
    assert result.pass_at_k_interval[1] == (result.low, result.high)
    assert result.pass_at_k_interval[2] == bootstrap([1.0, 5 / 6, 0.5, 0.0], 0.95, anchors=(0.0, 1.0), seed=5)
    assert result.maj_at_k_interval == wilson(2, 4)
    assert result.interval == "bootstrap"
    assert result.maj_at_k == 0.5
    # By hand: right 4, 2, 1, 0 of 4; at k = 2 the misses are 0, 1/6, 3/6, 1.
    assert result.pass_at_k == pytest.approx({1: 1.75 / 4, 2: (1 + 5 / 6 + 1 / 2) / 4, 4: 3 / 4})
    assert [row["accuracy"] for row in result.rows] == shares


def test_the_first_answer_given_wins_a_tie_and_silence_has_no_vote(rewarder):
    result, _ = run(rewarder, {"a": ["hm", "18", "9", "?"], "b": ["9", "18", "?", "?"]}, samples=4, temperature=1.0)
    assert result.maj_at_k == 0.5


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (6, 1, 2), (4, 0, 2), (4, 4, 3), (5, 3, 3)])
def test_pass_at_k_is_the_average_over_all_subsets(n, c, k):
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_the_dictionary_is_json_and_the_metrics_are_in_the_catalogue(rewarder):
    result, _ = run(rewarder, {"a": ["18", "9"]}, samples=2, temperature=0.7, confidence=0.9)
    values = json.loads(json.dumps(result.to_dict()))
    assert {"accuracy", "low", "high", "confidence", "count", "truncated", "unparsable", "mean_length"} <= set(values)
    assert values["policy"]["noise"] is None
    assert values["policy"]["max_new_tokens"] == 64
    assert values["confidence"] == 0.9
    assert values["pass_at_k"] == {"1": 0.5, "2": 1.0}
    for key, value in result.metrics().items():
        lookup(key)
        assert isinstance(value, float | int)
    json.dumps(result.rows)
    assert result.rows[0]["answers"][1]["outcome"] == "wrong"
    assert result.rows[0]["answers"][1]["parsed"] == "9"


def test_headline_says_policy_interval_and_troubles(rewarder):
    result, _ = run(rewarder, {"a": ["18"], "b": [("9", "length")]})
    assert result.headline().startswith("accuracy 50.0% (95% interval 9.5% to 90.5%; 2 questions, greedy)")
    assert result.headline().endswith("50.0% truncated")
    sampled, _ = run(rewarder, {"a": ["18", "18"]}, samples=2, temperature=0.5)
    assert "T=0.5, 2 a question" in sampled.headline()


def test_noise_and_own_length_limit_are_passed_on_and_stated(rewarder):
    noise = Noise(NoiseState(seed=1, rollout=2, stage=3, sigma=0.01, sites=("attn_norm",)), {}, {})
    engine = ScriptedEngine({"a": ["18"]})
    result = evaluate(
        engine,
        [make_prompt(id="a")],
        rewarder,
        eval_cfg=EvalConfig(max_new_tokens=9),
        seed=0,
        max_new_tokens=64,
        noise=noise,
        adapters=False,
    )
    assert engine.calls[0]["noise"] is noise
    assert engine.calls[0]["adapters"] is False
    assert engine.calls[0]["sampling"].max_new_tokens == result.policy["max_new_tokens"] == 9
    assert result.policy["noise"]["sigma"] == 0.01
    assert result.policy["adapters"] is False


def test_nothing_scorable_is_accuracy_zero_with_the_widest_interval(rewarder):
    for settings in ({}, {"samples": 2, "temperature": 1.0}):
        result, _ = run(rewarder, {"a": ["18", "18"]}, {"a": "???"}, **settings)
        assert (result.accuracy, result.low, result.high, result.unscorable) == (0.0, 0.0, 1.0, 1.0)
        assert result.rows[0]["accuracy"] is None
        assert result.rows[0]["answers"][0]["note"]


@pytest.mark.parametrize("texts", [["18", "18"], ["9", "9"], ["18", "9"]])
def test_questions_that_all_came_out_alike_are_not_claimed_with_certainty(rewarder, texts):
    result, _ = run(rewarder, {f"q{i}": texts for i in range(10)}, samples=2, temperature=1.0)
    assert result.low <= result.accuracy <= result.high
    assert result.high - result.low > 0.15
    for low, high in result.pass_at_k_interval.values():
        assert high - low > 0.15


def test_samples_of_one_question_are_no_questions_of_their_own(rewarder):
    """Ten questions with eight equal answers each: the interval is that of ten questions, not of eighty."""
    texts = {f"q{i}": ["18" if i < 5 else "9"] * 8 for i in range(10)}
    many, _ = run(rewarder, texts, samples=8, temperature=1.0)
    one, _ = run(rewarder, {name: answers[:1] for name, answers in texts.items()})
    assert many.high - many.low == pytest.approx(one.high - one.low, abs=0.12)


def test_no_questions_is_an_error(rewarder):
    with pytest.raises(DataError, match="nothing to evaluate"):
        evaluate(ScriptedEngine({}), [], rewarder, eval_cfg=EvalConfig(), seed=0, max_new_tokens=4)


def test_paired_comparison_counts_gained_and_lost_questions(rewarder):
    before, _ = run(rewarder, {f"q{i}": ["18" if i in (0, 1) else "9"] for i in range(8)})
    after, _ = run(rewarder, {f"q{i}": ["18" if i >= 1 else "9"] for i in range(8)})
    result = compare(before.rows, after.rows)
    assert (result["gained"], result["lost"], result["count"]) == (6, 1, 8)
    assert result["difference"] == pytest.approx(5 / 8)
    # Two-sided exact: 2 (C(7,0) + C(7,1)) / 2^7.
    assert result["p_value"] == pytest.approx(16 / 128)
    assert result["low"] < 5 / 8 < result["high"]


def test_only_evaluations_of_the_same_questions_are_compared(rewarder):
    first, _ = run(rewarder, {"a": ["18"]})
    second, _ = run(rewarder, {"b": ["18"]})
    with pytest.raises(DataError, match="same questions"):
        compare(first.rows, second.rows)
    unscorable, _ = run(rewarder, {"a": ["18"]}, {"a": "???"})
    with pytest.raises(DataError, match="could score"):
        compare(first.rows, unscorable.rows)
