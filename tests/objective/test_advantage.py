import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl.objective.advantage import advantages

REWARDS = st.floats(-10, 10, allow_nan=False)


def test_one_right_of_four_gives_the_known_answer():
    (group,) = advantages([[1.0, 0.0, 0.0, 0.0]])
    assert group == pytest.approx([1.7320, -0.5773, -0.5773, -0.5773], abs=1e-4)


@pytest.mark.parametrize("kind", ["group", "none", "batch", "leave_one_out"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -0.3])
def test_equal_rewards_give_exactly_zero(kind, value):
    group, _ = advantages([[value] * 7, [0.0, 1.0]], kind)
    assert group == [0.0] * 7


def test_mean_only_does_not_divide():
    assert advantages([[1.0, 0.0, 0.0, 0.0]], "none") == [[0.75, -0.25, -0.25, -0.25]]


def test_leave_one_out_subtracts_the_mean_of_the_others():
    (group,) = advantages([[1.0, 0.5, 0.0]], "leave_one_out")
    assert group == pytest.approx([1.0 - 0.25, 0.5 - 0.5, 0.0 - 0.75])


def test_batch_divides_by_the_deviation_over_all_answers():
    rewards = [[1.0, 0.0], [1.0, 1.0]]
    deviation = math.sqrt(3) / 4
    first, second = advantages(rewards, "batch")
    assert first == pytest.approx([0.5 / deviation, -0.5 / deviation], rel=1e-5)
    assert second == [0.0, 0.0]


def test_unscorable_answers_leave_the_statistics():
    (group,) = advantages([[1.0, None, 0.0]])
    assert group == pytest.approx([1.0, 0.0, -1.0], abs=1e-5)
    assert advantages([[None, None], [1.0, None]]) == [[0.0, 0.0], [0.0, 0.0]]


@given(st.lists(REWARDS, min_size=2, max_size=16))
def test_group_advantages_sum_to_zero(rewards):
    (group,) = advantages([rewards])
    assert abs(sum(group)) < 1e-6 * max(1.0, max(map(abs, group)) * len(group))


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=16), st.floats(0.5, 4), st.floats(-3, 3))
def test_group_advantages_do_not_change_with_scale_and_shift(rewards, scale, shift):
    (plain,) = advantages([rewards])
    (moved,) = advantages([[reward * scale + shift for reward in rewards]])
    assert moved == pytest.approx(plain, abs=1e-4)
