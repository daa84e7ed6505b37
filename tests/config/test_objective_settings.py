"""The objective section: what ``auto`` becomes, what is refused, and that a resolved file reads back."""

import pytest

from qerl.config.load import dump_config, load_config
from qerl.errors import ConfigError

RECOMPUTED = "objective.denominator=recomputed"


def objective(*settings):
    return load_config(
        None, [text if "." in text.partition("=")[0] else f"objective.{text}" for text in settings]
    ).objective


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [
        ("grpo", 0.2, 0.28), ("dapo", 0.2, 0.28), ("bnpo", 0.2, 0.28), ("dr_grpo", 0.2, 0.28),
        ("gspo", 3e-4, 4e-4), ("cispo", "off", 5.0),
    ],
)  # fmt: skip
def test_default_clips_go_by_type(kind, low, high):
    found = objective(f"type={kind}")
    assert (found.clip_low, found.clip_high) == (low, high)


def test_given_clips_stay():
    found = objective("type=gspo", "clip_low=0.01", "clip_high=0.02")
    assert (found.clip_low, found.clip_high) == (0.01, 0.02)
    assert objective("type=cispo", "clip_high=2").clip_high == 2.0
    assert objective("clip_low=off").clip_low == "off"


@pytest.mark.parametrize(
    ("settings", "denominator", "cap"),
    [
        ([], "behavior", "off"),
        (["noise=absent"], "recomputed", 2.0),
        (["denominator=recomputed"], "recomputed", 2.0),
        (["denominator=recomputed", "is_cap=off"], "recomputed", "off"),
        (["noise=absent", "denominator=behavior"], "behavior", "off"),
        (["noise=absent", "is_cap=unbounded", "is_level=sequence"], "recomputed", "unbounded"),
    ],
)
def test_denominator_and_weights_by_noise(settings, denominator, cap):
    found = objective(*settings)
    assert (found.denominator, found.is_cap) == (denominator, cap)


@pytest.mark.parametrize(
    ("settings", "pieces"),
    [
        (["type=cispo", "clip_low=0.2"], ["cispo", "clip_low"]),
        (["type=cispo", "dual_clip=3"], ["cispo", "dual_clip"]),
        (["type=cispo", "clip_high=0.28"], ["bound of the ratio itself", "at least 1"]),
        (["dual_clip=1.2"], ["dual_clip=1.2", "1.28"]),
        (["is_cap=2"], ["count it twice", "denominator=recomputed"]),
        (["noise=absent", "denominator=behavior", "is_cap=2"], ["count it twice"]),
        (["is_floor=0.5"], ["is_floor", "no meaning"]),
        (["is_level=sequence"], ["is_level", "no meaning"]),
        ([RECOMPUTED, "is_cap=off", "is_mode=mask"], ["is_mode", "no meaning"]),
        ([RECOMPUTED, "is_floor=2"], ["is_floor=2.0", "is_cap=2.0"]),
        ([RECOMPUTED, "is_cap=unbounded", "is_mode=mask"], ["needs a bound"]),
        (["kl_estimator=k1"], ["kl_estimator=k1", "kl_coef"]),
        (["dynamic_sampling_max_rounds=4"], ["dynamic_sampling_max_rounds", "dynamic_sampling=false"]),
        (["dynamic_sampling=true", "dynamic_sampling_max_rounds=1"], ["integer >= 2"]),
    ],
)
def test_what_would_be_ignored_or_counted_twice_is_refused(settings, pieces):
    with pytest.raises(ConfigError) as caught:
        objective(*settings)
    for piece in pieces:
        assert piece in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        ["type=gspo"],
        ["type=cispo", "kl_coef=0.1", "kl_estimator=k2"],
        [RECOMPUTED, "is_cap=unbounded", "is_floor=0.5", "is_mode=mask", "is_level=sequence"],
        ["dual_clip=3", "dynamic_sampling=true", "dynamic_sampling_max_rounds=3", "clip_low=off"],
    ],
)
def test_a_resolved_file_reads_back_equal(tmp_path, settings):
    config = load_config(None, [text if text == RECOMPUTED else f"objective.{text}" for text in settings])
    path = tmp_path / "config.resolved.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config
