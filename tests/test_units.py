import pytest

from qerl.config.load import load_config
from qerl.memory import PHASES
from qerl.train.fit import plan
from qerl.units import bytes_text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "–"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_940, "99.9 kB"),
        (99_960, "100 kB"),
        (999_400, "999 kB"),
        (999_600, "1.00 MB"),
        (33_326_000_000, "33.3 GB"),
        (2.5e15, "2500 TB"),
    ],
)
def test_bytes_have_three_digits_and_the_unit_that_fits(value, expected):
    assert bytes_text(value) == expected


def test_the_plan_of_a_small_model_shows_every_owner_in_the_unit_that_fits():
    """The demo has owners of kilobytes and a peak of hundreds of megabytes: each column adds up to its sum as it is printed."""
    text, fitting = plan(load_config("configs/demo.yaml"), width=200)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    owners = {row[0]: [_bytes(cell) for cell in row[1:]] for row in rows if len(row) == 1 + len(PHASES)}
    total = owners.pop("sum")
    assert fitting and min(min(filter(None, sizes)) for sizes in owners.values()) < 10_000
    for phase, whole in enumerate(total):
        assert whole == pytest.approx(sum(sizes[phase] for sizes in owners.values()), rel=0.005)


def _bytes(text: str) -> float:
    """What a size that is printed says; a dot is nothing."""
    if text == "·":
        return 0.0
    value, unit = text.split()
    return float(value) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
