import pytest

from qerl.report import text


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "–"), (512, "512"), (9_999, "9,999"), (12_345, "12.3k"), (3_412_000, "3.41M"), (2e9, "2G")],
)
def test_count(value, expected):
    assert text.count(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(0.423, "0.42 s"), (71.3, "71 s"), (725, "12 min 05 s"), (18_725, "5 h 12 min")]
)
def test_seconds(value, expected):
    assert text.seconds(value) == expected


def test_decimals_have_a_minus_sign_and_no_negative_zero():
    assert [text.decimals(value, 2) for value in (-0.494, -0.004, 0.0, 1.5)] == ["−0.49", "0.00", "0.00", "1.50"]


def test_differences_carry_a_sign():
    assert [text.points(value) for value in (0.4521, -0.031, -0.0001)] == ["+45.2", "−3.1", "0.0"]


def test_flatten_keeps_empty_mappings():
    assert text.flatten({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}


def test_plain_values():
    assert (
        text.plain({"lr": 1e-5, "on": True, "sites": ["a", "b"], "none": None})
        == "lr 1e-05, on true, sites a, b, none none"
    )


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "OutOfMemoryError: CUDA out of memory. Tried to allocate " + "404 MiB. " * 40,
            "OutOfMemoryError: CUDA out of memory",
        ),
        (
            "AcceleratorError: CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'\n",
            "AcceleratorError: CUDA error: out of memory",
        ),
        ("no such file; got a. b", "no such file; got a. b"),
        ("", ""),
    ],
)
def test_a_message_in_brief_is_what_failed(message, expected):
    assert text.brief(message) == expected
