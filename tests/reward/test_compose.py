import time
from pathlib import Path

import pytest
from answer_builders import make_completion, make_prompt

from qerl.config.schema import OverlongConfig, RewardConfig
from qerl.errors import RewardError
from qerl.records import Outcome
from qerl.reward.compose import Rewarder

USER = Path(__file__).with_name("user_rewards.py")


def config(*functions: str, weights: tuple[float, ...] | None = None, **settings: object) -> RewardConfig:
    settings.setdefault("timeout_seconds", 5.0)
    return RewardConfig(functions=functions, weights=weights or (1.0,) * len(functions), **settings)


def score(cfg: RewardConfig, *completions, max_new_tokens: int = 100):
    with Rewarder(cfg, max_new_tokens) as rewarder:
        return rewarder.score(completions)


def test_reward_is_the_weighted_sum_of_unweighted_parts():
    right, bare, wrong = score(
        config("accuracy", "format", weights=(1.0, 0.5)),
        *map(make_completion, ("\\boxed{18}", "The answer is 18.", "\\boxed{3}")),
    )
    assert (right.reward, right.parts) == (1.5, {"accuracy": 1.0, "format": 1.0})
    assert (bare.reward, bare.parts) == (1.0, {"accuracy": 1.0, "format": 0.0})
    assert (wrong.reward, wrong.parts) == (0.5, {"accuracy": 0.0, "format": 1.0})


@pytest.mark.parametrize(
    ("text", "answer", "stop_reason", "outcome"),
    [
        ("The answer is 18.", "18", "stop", Outcome.CORRECT),
        ("The answer is 18.", "18", "length", Outcome.CORRECT),
        ("The answer is 3.", "18", "length", Outcome.TRUNCATED),
        ("hm", "18", "length", Outcome.TRUNCATED),
        ("hm", "18", "stop", Outcome.UNPARSABLE),
        ("The answer is 3.", "18", "stop", Outcome.WRONG),
        ("The answer is 18.", "\\frac{", "stop", Outcome.UNSCORABLE),
        ("The answer is 18.", "...", "length", Outcome.UNSCORABLE),
        ("hm", "\\frac{", "length", Outcome.UNSCORABLE),
    ],
)
def test_first_outcome_that_applies_is_taken(text, answer, stop_reason, outcome):
    (result,) = score(config("accuracy"), make_completion(text, answer, stop_reason=stop_reason))
    assert result.outcome is outcome
    assert (result.reward is None) == (outcome is Outcome.UNSCORABLE)
    assert (result.note is None) == (outcome is not Outcome.UNSCORABLE)


def test_a_reference_that_cannot_be_parsed_is_named_in_the_note():
    (result,) = score(config("accuracy"), make_completion("5", "\\frac{"))
    assert "reference answer" in result.note
    assert "frac" in result.note


def test_overlong_punishment_changes_the_reward_and_nothing_else():
    cfg = config("accuracy", overlong=OverlongConfig(enabled=True, buffer_tokens=10, penalty=0.5))
    short, long = score(cfg, make_completion("18", tokens=90), make_completion("18", tokens=95))
    assert (short.reward, short.parts["overlong"]) == (1.0, 0.0)
    assert (long.reward, long.parts) == (0.75, {"accuracy": 1.0, "overlong": -0.25})
    assert long.outcome is Outcome.CORRECT


def test_outcome_is_decided_by_accuracy_even_where_it_earns_nothing():
    right, wrong, unreadable = score(
        config("format"), make_completion("18"), make_completion("\\boxed{3}"), make_completion("\\boxed{3}", "...")
    )
    assert (right.reward, right.outcome, right.parts) == (0.0, Outcome.CORRECT, {"format": 0.0})
    assert (wrong.reward, wrong.outcome) == (1.0, Outcome.WRONG)
    # Its reward does not depend on the reference, so it stays in its group.
    assert (unreadable.reward, unreadable.outcome) == (1.0, Outcome.WRONG)


def test_user_function_from_a_file_gets_prompts_answers_ids_and_columns():
    prompt = make_prompt(level=3)
    (result,) = score(config(f"{USER}:echo"), make_completion("x", prompt=prompt))
    assert result.parts == {"echo": 1.0}


def test_user_function_gets_only_the_arguments_it_names():
    (result,) = score(config(f"{USER}:length"), make_completion("x", tokens=7))
    assert result.reward == 7.0


def test_user_function_may_return_an_array():
    results = score(config(f"{USER}:arrays"), make_completion("x"), make_completion("y"))
    assert [result.reward for result in results] == [0.0, 1.0]


def test_user_function_from_a_module():
    (result,) = score(config("qerl.reward.shaping:pattern_found"), make_completion("x"))
    assert "TypeError" in result.note
    assert result.outcome is Outcome.UNSCORABLE


def test_a_function_that_raises_hangs_or_dies_costs_only_its_own_samples(capfd):
    texts = ["18", "raise", "none", "nan", "text", "bool", "die", "hang", "fine"]
    began = time.monotonic()
    with Rewarder(config("accuracy", f"{USER}:moody", timeout_seconds=1.0), 100) as rewarder:
        results = dict(zip(texts, rewarder.score([make_completion(text) for text in texts]), strict=True))
        warnings = rewarder.take_warnings()
        assert rewarder.take_warnings() == []
    assert time.monotonic() - began < 15
    assert results["18"].reward == 1.5
    assert results["bool"].reward == 1.0
    assert results["fine"].reward == 0.5
    notes = {
        "raise": "KeyError: 'no such thing'",
        "none": "returned None",
        "nan": "returned nan",
        "text": "expected a number or None",
        "die": "ended with exit code 3",
        "hang": "timed out after 1 s",
    }
    for text, note in notes.items():
        assert results[text].outcome is Outcome.UNSCORABLE, text
        assert results[text].reward is None
        assert note in results[text].note
        assert "moody" in results[text].note
    assert len(warnings) == 1
    assert "9 answers" in warnings[0]
    assert capfd.readouterr().out == ""


def test_a_function_that_always_hangs_is_given_up_after_a_few_samples():
    began = time.monotonic()
    results = score(config(f"{USER}:hang", timeout_seconds=0.2), *[make_completion("x")] * 50)
    assert time.monotonic() - began < 10
    assert all(result.outcome is Outcome.UNSCORABLE for result in results)
    assert "not tried" in results[-1].note


@pytest.mark.parametrize(
    ("name", "note"), [("too_few", "returned 1 values for 2 answers"), ("a_number", "returned float")]
)
def test_a_return_value_of_the_wrong_shape_makes_the_batch_unscorable(name, note):
    results = score(config(f"{USER}:{name}"), make_completion("x"), make_completion("y"))
    assert all(note in result.note and result.outcome is Outcome.UNSCORABLE for result in results)


def test_a_symbolic_comparison_that_does_not_end_is_unscorable_and_the_next_one_works():
    with Rewarder(config("accuracy", timeout_seconds=3.0), 100) as rewarder:
        absurd, right = rewarder.score(
            [
                make_completion("\\boxed{10^{10^{10^{10}}}}", "\\sqrt{2}"),
                make_completion("\\boxed{2^{1/2}}", "\\sqrt{2}"),
            ]
        )
    assert absurd.outcome is Outcome.UNSCORABLE
    assert "timed out" in absurd.note or "MemoryError" in absurd.note
    assert right.outcome is Outcome.CORRECT


def test_a_catastrophic_format_pattern_does_not_hang_the_run():
    cfg = config("format", format_pattern=r"(a+)+$", timeout_seconds=0.5)
    good, bad = score(cfg, make_completion("aaa"), make_completion("a" * 40 + "b"))
    assert good.reward == 1.0
    assert "timed out" in bad.note


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("acuracy", "Did you mean `accuracy`"),
        (f"{USER}:nothing", "has no function 'nothing'"),
        (f"{USER}:not_callable", "has no function 'not_callable'"),
        (f"{USER.parent}/absent.py:f", "there is no file"),
        ("no_such_module:f", "No module named 'no_such_module'"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused_with_a_remedy(function, message):
    with pytest.raises(RewardError, match=message) as caught:
        Rewarder(config(function), 100)
    assert caught.value.remedy


def test_two_functions_of_one_name_are_refused():
    with pytest.raises(RewardError, match="several reward functions are called 'length'"):
        Rewarder(config(f"{USER}:length", "elsewhere:length"), 100)


def test_a_broken_format_pattern_is_refused():
    with pytest.raises(RewardError, match="not a regular expression"):
        Rewarder(config("format", format_pattern="(unclosed"), 100)


def test_names_are_the_keys_of_parts_in_order():
    cfg = config(f"{USER}:length", "accuracy", overlong=OverlongConfig(enabled=True, buffer_tokens=10))
    with Rewarder(cfg, 100) as rewarder:
        (result,) = rewarder.score([make_completion("18")])
        assert rewarder.names == tuple(result.parts) == ("length", "accuracy", "overlong")


def test_no_answers_give_no_scores():
    assert score(config("accuracy", f"{USER}:length")) == []


def test_plain_numbers_are_scored_in_process_and_fast():
    text = "She sells 16 - 3 - 4 = 9 duck eggs a day for $2 each and makes 9 * 2 = $18. " * 12
    completions = [make_completion(f"{text}The answer is {number}.") for number in range(256)]
    with Rewarder(config("accuracy"), 100) as rewarder:
        times = []
        for _ in range(5):
            began = time.process_time()
            results = rewarder.score(completions)
            times.append(time.process_time() - began)
        assert not rewarder._accuracy._pool._live
    assert [number for number, result in enumerate(results) if result.outcome is Outcome.CORRECT] == [18]
    assert min(times) < 0.020
