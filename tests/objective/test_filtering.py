import pytest
from builders import group

from qerl.objective.filtering import GroupKind, group_kind, kind_fractions
from qerl.records import Outcome

C, W, T, P, N = Outcome.CORRECT, Outcome.WRONG, Outcome.TRUNCATED, Outcome.UNPARSABLE, Outcome.UNSCORABLE


@pytest.mark.parametrize(
    ("outcomes", "kind"),
    [
        ([C, W, W], GroupKind.MIXED),
        ([C, T, N], GroupKind.MIXED),
        ([C, C, C], GroupKind.ALL_CORRECT),
        ([C, N, C], GroupKind.ALL_CORRECT),
        ([W, P, T], GroupKind.ALL_WRONG),
        ([T, T, N], GroupKind.ALL_TRUNCATED),
        ([N, N], GroupKind.UNSCORABLE),
    ],
)
def test_kind_goes_by_outcome(outcomes, kind):
    assert group_kind(group(outcomes)) is kind


def test_fractions_cover_all_groups():
    fractions = kind_fractions([group([C, W]), group([C, C]), group([W, W]), group([W, P])])
    assert fractions[GroupKind.MIXED] == 0.25
    assert fractions[GroupKind.ALL_WRONG] == 0.5
    assert sum(fractions.values()) == 1.0
