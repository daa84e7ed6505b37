import time
from dataclasses import replace

import pytest
from builders import completion

from qerl.metrics.catalogue import lookup
from qerl.records import Group, Outcome, Score
from qerl.train.diagnostics.answers import answer_metrics, correlation, solution_path


@pytest.mark.parametrize(
    "text",
    [
        "First 4*6=24. Then 23+24=47. The answer is 47.",
        "He has $4 \\times 6 = 24$ apples, and 24 + 23 = 47.",
        "<<4*6=24>>24 apples, <<24+23=47.00>> in all",
        "\\(6 \\cdot 4 = 24\\); 23 + 24 = 47",
        "6 x 4 = 24, then 6 x 4 = 24 once more; 23+24=47",
    ],
)
def test_one_way_to_a_result_is_one_path_however_it_is_written(text):
    assert solution_path(text) == ("4*6=24", "23+24=47")


def test_other_steps_or_another_order_are_another_path():
    paths = {
        solution_path(text)
        for text in ("4*6=24. 23+24=47", "23+24=47. 4*6=24", "24/6=4. 23+24=47", "23+4*6=47", "23+24=47", "47-24=23")
    }
    assert len(paths) == 6


def test_differences_and_quotients_keep_the_order_of_their_operands():
    assert solution_path("9-4=5") != solution_path("4-9=5")
    assert solution_path("1,200/4=300") == solution_path("1200 / 4 = 300") == ("1200/4=300",)
    assert solution_path("\\frac{1}{2} * 10 = 5") == ("1/2*10=5",)


def test_a_text_without_equations_gives_its_numbers():
    assert solution_path("There are 12 eggs, 5 break, so 7 are left. 7.") == ("12", "5", "7")
    assert solution_path("no idea") == ()


@pytest.mark.parametrize("unit", ["1", "1,", "1+", "1 ", "1 x ", "(", "-1", "1.1.", "\\frac{1}", "="])
def test_degenerate_texts_cost_little(unit):
    start = time.process_time()
    solution_path(unit * 8000)
    assert time.process_time() - start < 1.0


def answer(text, outcome, *, parsed=None, length=3, reward=None):
    value = {Outcome.CORRECT: 1.0, Outcome.UNSCORABLE: None}.get(outcome, 0.0) if reward is None else reward
    return replace(completion(2, [-0.5] * length), text=text), Score(
        reward=value, parts={"accuracy": value}, outcome=outcome, parsed=parsed
    )


def group(*answers):
    return Group(
        prompt=answers[0][0].prompt, completions=tuple(a for a, _ in answers), scores=tuple(s for _, s in answers)
    )


def test_distinct_answers_and_paths_of_two_groups():
    first = group(
        answer("2+3=5", Outcome.CORRECT, parsed="5"),
        answer("3 + 2 = 5", Outcome.CORRECT, parsed="5.0"),
        answer("10-5=5", Outcome.CORRECT, parsed="$5"),
        answer("2*3=6", Outcome.WRONG, parsed="6"),
        answer("well", Outcome.UNPARSABLE),
    )
    second = group(answer("1+1=3", Outcome.WRONG, parsed="3"), answer("1+1=4", Outcome.WRONG, parsed="4"))
    found = answer_metrics([first, second])
    assert found["answers/distinct"] == (2 + 2) / 2
    assert found["paths/distinct_correct"] == 2.0
    assert found["paths/distinct_correct_share"] == pytest.approx(2 / 3)


def test_length_correlates_with_reward_within_groups_apart_from_between_them():
    """Easy prompts have short answers; within a prompt the longer answer is the right one."""
    easy = group(
        answer("", Outcome.CORRECT, length=4),
        answer("", Outcome.CORRECT, length=4),
        answer("", Outcome.WRONG, length=2),
    )
    hard = group(
        answer("", Outcome.CORRECT, length=22),
        answer("", Outcome.WRONG, length=20),
        answer("", Outcome.WRONG, length=20),
    )
    found = answer_metrics([easy, hard])
    assert found["reward_length/correlation"] < 0 < found["reward_length/within_group"]
    assert found["reward_length/within_group"] == pytest.approx(1.0)
    assert found["completions/mean_length_correct"] == 10.0
    assert found["completions/mean_length_incorrect"] == 14.0


def test_what_is_not_defined_is_left_out():
    same = group(answer("", Outcome.WRONG), answer("", Outcome.WRONG))
    unscorable = group(answer("", Outcome.UNSCORABLE), answer("", Outcome.UNSCORABLE))
    assert answer_metrics([same]).keys() == {"completions/mean_length_incorrect"}
    assert answer_metrics([unscorable]) == {}


def test_correlation_of_known_pairs():
    assert correlation([(0.0, 1.0), (1.0, 3.0)]) == pytest.approx(1.0)
    assert correlation([(0.0, 1.0), (1.0, 2.0), (2.0, 0.0)]) == pytest.approx(-0.5)
    assert correlation([(1.0, 1.0), (1.0, 2.0)]) is None
    assert correlation([(1.0, 1.0)]) is None


def test_every_key_is_in_the_catalogue():
    both = group(answer("1+1=2", Outcome.CORRECT, parsed="2"), answer("", Outcome.WRONG, parsed="3", length=5))
    for key in answer_metrics([both]):
        lookup(key)
