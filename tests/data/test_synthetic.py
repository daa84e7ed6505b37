"""The arithmetic task: reproducible, really held out, and right by an evaluator that shares no code with it."""

import random
import re

import pytest

from qerl.data.synthetic import MAX_VALUE, Problem, arithmetic_problems

STEP = re.compile(r"(?:First|Then) (\d+)([-+*])(\d+)=(\d+)\.")


def steps_of(problem: Problem) -> list[tuple[int, str, int, int]]:
    """The worked steps read back from the text: (left, operator, right, written result)."""
    return [(int(x), op, int(y), int(result)) for x, op, y, result in STEP.findall(problem.solution)]


def test_same_arguments_give_the_same_problems():
    assert arithmetic_problems("train", 300, seed=3) == arithmetic_problems("train", 300, seed=3)


def test_known_first_problem_pins_the_stream():
    problem = arithmetic_problems("test", 1)[0]
    assert problem == Problem(
        id="test-1ca4cc8684840782",
        question="Mia has 36 eggs. She buys 68 more and gives 42 to Ben. How many eggs does she have left?",
        answer="62",
        solution="First 36+68=104. Then 104-42=62. The answer is 62.",
    )


def test_seeds_give_different_lists_and_a_longer_list_begins_with_the_shorter():
    assert arithmetic_problems("train", 50, seed=1) != arithmetic_problems("train", 50, seed=2)
    assert arithmetic_problems("test", 80)[:50] == arithmetic_problems("test", 50)


def test_global_random_state_is_neither_read_nor_changed():
    random.seed(1)
    before, first = random.getstate(), arithmetic_problems("train", 20)
    assert random.getstate() == before
    random.seed(2)
    assert arithmetic_problems("train", 20) == first


@pytest.mark.parametrize(("split", "count"), [("train", 20_000), ("test", 2_000)])
def test_counts_and_no_duplicates(split, count):
    problems = arithmetic_problems(split, count)
    assert len(problems) == count
    assert len({p.question for p in problems}) == count
    assert len({p.id for p in problems}) == count


def test_no_question_and_no_calculation_is_in_both_splits_whatever_the_seed():
    train = [p for seed in (0, 1) for p in arithmetic_problems("train", 20_000, seed)]
    test = [p for seed in (0, 7) for p in arithmetic_problems("test", 2_000, seed)]
    assert not {p.question for p in train} & {p.question for p in test}
    assert not {p.solution for p in train} & {p.solution for p in test}


@pytest.mark.parametrize("split", ["train", "test"])
def test_solution_steps_are_right_and_lead_from_the_question_to_the_answer(split):
    for problem in arithmetic_problems(split, 2_000, seed=11):
        steps = steps_of(problem)
        known = [int(number) for number in re.findall(r"\d+", problem.question)]
        assert len(steps) in (2, 3)
        for left, operator, right, result in steps:
            assert left in known and right in known, problem
            assert result == {"+": left + right, "-": left - right, "*": left * right}[operator], problem
            assert 1 <= result <= MAX_VALUE
            known.append(result)
        assert problem.answer == str(steps[-1][3])
        assert problem.solution.endswith(f"The answer is {problem.answer}.")
        assert problem.direct_solution == f"The answer is {problem.answer}."


def test_two_step_problems_are_the_majority():
    lengths = [len(steps_of(p)) for p in arithmetic_problems("test", 2_000)]
    assert 0.6 < lengths.count(2) / len(lengths) < 0.9


def test_what_cannot_be_supplied_is_refused():
    assert arithmetic_problems("train", 0) == []
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        arithmetic_problems("dev", 1)
    with pytest.raises(ValueError, match="count is -1"):
        arithmetic_problems("train", -1)
