import pytest

from qerl.reward.math_answer import answer_key, is_symbolic, quick_equal, reference_value


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("18", "18"),
        ("18.", "18"),
        ("9 * 2 = <<9*2=18>>18.\n#### 18", "18"),
        ("Hence \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("  x  ", "x"),
    ],
)
def test_reference_value(answer, value):
    assert reference_value(answer) == value


@pytest.mark.parametrize("reference", ["18", "\\text{even}", "(C)", "5:30", "October", "7:4"])
def test_numbers_words_and_options_never_need_algebra(reference):
    assert not is_symbolic(reference)
    assert quick_equal(reference, reference) is True
    assert quick_equal(reference, "nothing of the kind") is False


@pytest.mark.parametrize("reference", ["2\\sqrt{3}", "x^2", "(1,2)", "\\frac{\\pi}{2}", "p - q", "4!"])
def test_expressions_are_left_to_algebra_unless_equal_as_written(reference):
    assert is_symbolic(reference)
    assert quick_equal(reference, f" {reference} ") is True
    assert quick_equal(reference, "1 + 1") is None


def test_a_plain_reference_needs_no_algebra_for_a_wordy_answer():
    assert quick_equal("18", "no idea") is False
    assert quick_equal("18", "she has 18 left") is True
    assert quick_equal("18", "9+9") is None


def test_votes_for_the_same_answer_share_a_key():
    assert answer_key("$1,000") == answer_key("1000.0") == answer_key("x = 1000") == answer_key("1000 apples")
    assert answer_key("50%") == answer_key("1/2")
    assert answer_key("\\text{Even}") == answer_key("even")
    assert answer_key("(1, 2)") == answer_key("(1,2)")
    assert len({answer_key("1"), answer_key("2"), answer_key("x"), answer_key("even"), answer_key("odd")}) == 5
