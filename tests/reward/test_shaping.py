import pytest

from qerl.reward.shaping import pattern_found, soft_overlong


def test_soft_overlong_is_equation_13_of_dapo():
    # L_max = 20480 and L_cache = 4096, as in the paper.
    def punish(length: int) -> float:
        return soft_overlong(length, max_new_tokens=20480, buffer_tokens=4096)

    assert punish(0) == punish(16384) == 0.0
    assert punish(16385) == pytest.approx((16384 - 16385) / 4096)
    assert punish(18432) == -0.5
    assert punish(20480) == punish(30000) == -1.0


def test_soft_overlong_scales_with_the_penalty_and_never_rises():
    values = [soft_overlong(n, max_new_tokens=10, buffer_tokens=4, penalty=0.5) for n in range(12)]
    assert values[6:11] == [0.0, -0.125, -0.25, -0.375, -0.5]
    assert values == sorted(values, reverse=True)


def test_dot_matches_newline_in_the_format_pattern():
    assert pattern_found(["\\boxed{1\n2}", "boxed{1}", "\\boxed{}"], r"\\boxed\{.+\}") == [1.0, 0.0, 0.0]
