"""The sigma schedules: stages, ends, shapes."""

import itertools
import math

import pytest

from qerl.errors import ConfigError
from qerl.model.aqn import sigma_for_stage, stage_at

SCHEDULES = ("exponential", "linear", "cosine", "logarithmic", "constant")
RANGES = ((5e-2, 5e-4), (1e-2, 5e-4), (1e-2, 1e-4), (0.1, 0.3))


def sigmas(schedule, start, end, num_stages):
    return [
        sigma_for_stage(k, schedule=schedule, sigma_start=start, sigma_end=end, num_stages=num_stages)
        for k in range(num_stages)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("start", "end"), RANGES)
@pytest.mark.parametrize("num_stages", [3, 4, 10, 31])
def test_stage_zero_is_silent_and_both_ends_are_exact(schedule, start, end, num_stages):
    values = sigmas(schedule, start, end, num_stages)
    assert values[0] == 0.0
    assert values[1] == start
    assert values[-1] == (start if schedule == "constant" else end)


@pytest.mark.parametrize("schedule", SCHEDULES[:-1])
def test_falling_schedules_fall_at_every_stage(schedule):
    values = sigmas(schedule, 5e-2, 5e-4, 12)[1:]
    assert all(a > b for a, b in itertools.pairwise(values))


def test_the_ten_stage_exponential_schedule_has_a_constant_ratio():
    values = sigmas("exponential", 0.01, 0.0005, 10)[1:]
    assert len(values) == 9
    for a, b in itertools.pairwise(values):
        assert b / a == pytest.approx(0.05 ** (1 / 8), rel=1e-12)


def test_inner_stages_by_hand():
    assert sigmas("linear", 1.0, 0.2, 6)[2:5] == pytest.approx([0.8, 0.6, 0.4])
    assert sigmas("cosine", 1.0, 0.0, 6)[2:5] == pytest.approx(
        [(1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]
    )
    # ln 2 / ln 4 = 1/2 and ln 3 / ln 4.
    assert sigmas("logarithmic", 1.0, 0.0, 5)[2:4] == pytest.approx([0.5, 1 - math.log(3, 4)])
    assert sigmas("exponential", 1.0, 1e-4, 6)[2:5] == pytest.approx([1e-1, 1e-2, 1e-3])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages_have_one_noisy_stage_at_the_start_value(schedule):
    assert sigmas(schedule, 0.05, 0.0, 2) == [0.0, 0.05]


def test_impossible_schedules_are_refused():
    with pytest.raises(ConfigError, match="num_stages"):
        sigma_for_stage(0, schedule="linear", sigma_start=0.1, sigma_end=0.01, num_stages=1)
    with pytest.raises(ConfigError, match="exponential schedule cannot reach 0"):
        sigma_for_stage(1, schedule="exponential", sigma_start=0.1, sigma_end=0.0, num_stages=3)
    with pytest.raises(ConfigError, match="schedule is unknown"):
        sigma_for_stage(1, schedule="steps", sigma_start=0.1, sigma_end=0.01, num_stages=3)


def test_stages_split_the_planned_updates_evenly():
    stages = [stage_at(done, 20, 10) for done in range(20)]
    assert stages == [done // 2 for done in range(20)]
    assert stage_at(20, 20, 10) == 9
    assert stage_at(99, 20, 10) == 9
    # floor(K * completed / planned) in integers: 0.1 * 30 would be 3.0000000000000004 / 2.9999999999999996.
    assert [stage_at(done, 30, 10) for done in (2, 3, 5, 6)] == [0, 1, 1, 2]
