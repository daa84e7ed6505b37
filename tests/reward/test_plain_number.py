from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl.reward.plain_number import last_number, number_tokens, parse_plain, single_number


@given(st.integers(-(10**15), 10**15))
def test_every_way_to_write_an_integer_is_the_same_number(value):
    grouped = f"{value:,}"
    forms = [str(value), grouped, f"{value}.", f"{value}.00", f"${grouped}$", f"**{value}**", f"\\({value}\\)"]
    forms += [grouped.replace(",", "{,}"), grouped.replace(",", "\\,"), f"{value} apples", f" {value} ", f"{value}e0"]
    for form in forms:
        number = parse_plain(form)
        assert number is not None, form
        assert number.value == value, form


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**6))
def test_fractions_are_exact(numerator, denominator):
    for form in (f"{numerator}/{denominator}", f"\\frac{{{numerator}}}{{{denominator}}}"):
        number = parse_plain(form)
        assert number is not None
        assert number.value == Fraction(numerator, denominator)


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**6), max_value=10**6, places=6))
def test_decimals_are_exact(value):
    number = parse_plain(f"{value:f}")
    assert number is not None
    assert number.value == Fraction(value)


@given(st.text(alphabet="0123456789.,-/%$ex {}\\^frac()", max_size=40))
def test_no_text_makes_the_reader_fail(text):
    parse_plain(text)
    single_number(text)
    assert all(token in text for token in number_tokens(text))


@given(st.text(alphabet="0123456789., ab-$\n", max_size=300))
def test_last_number_is_the_last_of_all_numbers(text):
    tokens = number_tokens(text)
    found = last_number(text)
    assert (found[1] if found else None) == (tokens[-1] if tokens else None)
    if found:
        assert text.startswith(found[1], found[0])


@pytest.mark.parametrize(
    "text",
    ["", "x", "5x", "2\\sqrt{3}", "1,2", "(1,2)", "1,23", "1234,567", "5 + 3", "18-20", "3/0", "1.5.2", "5 pi", "4!"],
)
def test_what_is_not_one_plain_number_is_refused(text):
    assert parse_plain(text) is None


@pytest.mark.parametrize("text", ["1e999999999", "9" * 5000, "1" + "0" * 400, "1.2 \\times 10^{99999}"])
def test_absurd_numbers_cost_nothing(text):
    assert parse_plain(text) is None


def test_percent_is_read_either_way_but_only_once():
    percent, quarter, number = parse_plain("25%"), parse_plain("0.25"), parse_plain("25")
    assert percent.equals(quarter)
    assert percent.equals(number)
    assert quarter.equals(percent)
    assert not quarter.equals(number)
    assert not parse_plain("0.25%").equals(percent)
    assert parse_plain("50%").equals(parse_plain("50 percent"))


@pytest.mark.parametrize(
    ("phrase", "value"),
    [
        ("She earns $18 a day", 18),
        ("Rs. 500", 500),
        ("about 5 million people", 5),
        ("18 and a half", None),
        ("3 or 4", None),
        ("f(18)", None),
        ("18 n", None),
    ],
)
def test_single_number_takes_words_and_nothing_that_changes_the_value(phrase, value):
    number = single_number(phrase)
    assert (number and number.value) == value
