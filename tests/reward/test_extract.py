import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl.reward.extract import MAX_LENGTH, boxed, find_answer, right_side


@given(st.integers(0, 6), st.text(alphabet="x+1{}", max_size=8).filter(lambda text: text.count("{") == text.count("}")))
def test_box_content_is_found_at_any_depth(depth, prefix):
    content = "\\frac{" * depth + "1" + "}" * depth
    text = prefix.replace("{", "").replace("}", "") + "\\boxed{" + content + "} end"
    assert boxed(text) == (text.index(" end"), content)


def test_escaped_braces_do_not_close_a_box():
    assert find_answer("\\boxed{\\{1, 2\\}}") == "\\{1, 2\\}"


@given(st.text(max_size=200))
def test_any_text_gives_an_answer_that_stands_in_it_or_none(text):
    found = find_answer(text)
    assert found is None or found.replace("**", "") in text.replace("**", "") or found.endswith("%")


@pytest.mark.parametrize(
    "unit",
    [
        "x2 ",
        "x2",
        "1 ",
        "\\boxed{",
        "<answer>",
        "answer: ",
        "$",
        "\\[ ",
        "\\boxed{1",
        "1,111,",
        "{",
        "answer is \\( ",
        "\\frac{1}{",
        "-",
        "9",
    ],
)
def test_degenerate_repetition_is_read_in_linear_time(unit):
    text = unit * (200_000 // len(unit))
    began = time.process_time()
    find_answer(text)
    assert time.process_time() - began < 1.0


def test_an_answer_longer_than_the_limit_is_none():
    assert boxed("\\boxed{" + "1" * (MAX_LENGTH + 1) + "}") is None


@pytest.mark.parametrize(
    ("value", "side"), [("x = 5", "5"), ("a = b = 5", "5"), ("x \\le 5", "x \\le 5"), ("5 =", "5 =")]
)
def test_right_side(value, side):
    assert right_side(value) == side
