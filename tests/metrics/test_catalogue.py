from pathlib import Path

import pytest

from qerl.metrics.catalogue import ALARMS, METRICS, is_reproducible, lookup, to_markdown

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_documentation_is_what_the_catalogue_prints():
    assert DOCS.read_text(encoding="utf-8") == to_markdown(), "run: python -m qerl.metrics.catalogue > docs/metrics.md"


def test_every_metric_has_a_unit_a_meaning_and_a_name_of_its_own():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.unit, metric.name
        assert metric.meaning.endswith("."), metric.name
        assert metric.section, metric.name
        assert lookup(metric.name) is metric


@pytest.mark.parametrize("function", ["accuracy", "format", "my_rewards:shorter", "rewards/own.py:shorter"])
def test_a_family_matches_every_reward_function(function):
    assert lookup(f"rewards/{function}/mean").name == "rewards/{function}/mean"
    assert lookup(f"rewards/{function}/std").name == "rewards/{function}/std"


@pytest.mark.parametrize("key", ["rewards//mean", "rewards/accuracy/median", "Reward", "time/"])
def test_keys_outside_the_catalogue_are_refused(key):
    with pytest.raises(KeyError, match=r"not in qerl/metrics/catalogue\.py"):
        lookup(key)


def test_a_misspelled_key_names_its_nearest():
    with pytest.raises(KeyError, match="completions/mean_length"):
        lookup("completion/mean_length")


def test_times_throughput_and_memory_are_not_reproducible_and_the_rest_is():
    machine = {metric.name for metric in METRICS if not is_reproducible(metric.name)}
    expected = {m.name for m in METRICS if m.name.startswith(("time/", "memory/")) or "tokens_per_second" in m.name}
    # How many pages there are is the machine's.
    expected.add("rollout/preemptions")
    assert machine == expected
    assert is_reproducible("rewards/accuracy/mean")


def test_alarm_lines_name_metrics_and_rise_from_warning_to_fault():
    levels = {alarm.severity: alarm.level for alarm in ALARMS if alarm.metric == "mean_abs_prob_difference"}
    assert levels == {"warning": 0.005, "fault": 0.01}
    for alarm in ALARMS:
        lookup(alarm.metric)
