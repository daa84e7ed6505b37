"""The temperature search, on distributions with known entropies."""

import math

import pytest

from qerl.errors import ConfigError
from qerl.experiments.schema import MatchConfig
from qerl.experiments.temperature import match_temperature


def two_way(temperature):
    """Entropy of softmax((1, 0) / T)."""
    p = 1 / (1 + math.exp(-1 / temperature))
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def test_the_temperature_whose_entropy_is_known_is_found():
    found = match_temperature(two_way, two_way(1.37), own=1.0, match=MatchConfig(arm="x", tolerance=1e-6))
    assert found.temperature == pytest.approx(1.37, abs=1e-4)
    assert found.entropy == pytest.approx(found.target, rel=1e-6)
    assert found.at_own == two_way(1.0)


def test_a_model_that_has_the_entropy_already_keeps_its_temperature():
    found = match_temperature(two_way, two_way(1.0) * 1.0005, own=1.0, match=MatchConfig(arm="x"))
    assert (found.temperature, found.steps) == (1.0, 3)


def test_lower_entropy_gives_a_lower_temperature():
    found = match_temperature(two_way, two_way(0.6), own=1.0, match=MatchConfig(arm="x"))
    assert found.temperature == pytest.approx(0.6, abs=0.01)


@pytest.mark.parametrize("target", [two_way(0.4), two_way(2.5)])
def test_an_entropy_out_of_range_is_refused_and_not_approached(target):
    with pytest.raises(ConfigError, match="no temperature in range"):
        match_temperature(two_way, target, own=1.0, match=MatchConfig(arm="x"))
