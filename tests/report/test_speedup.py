"""Speed-up arithmetic: known answers, runs that did the same work, and runs that did not."""

import dataclasses

import pytest
from fake_run import write_fake_run
from typer.testing import CliRunner

from qerl.cli import app
from qerl.errors import RunFolderError
from qerl.report.collect import read_run
from qerl.report.speedup import break_even, compare_speed, comparison_rows, speed_up


@pytest.mark.parametrize(
    ("fraction", "stage", "overhead", "expected"), [(0.7, 1.5, 0.0, 1.30), (0.7, 1.5, 0.2, 1.03), (0.4, 1.5, 0.2, 0.94)]
)
def test_known_answers(fraction, stage, overhead, expected):
    assert speed_up(fraction, stage, overhead) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(("fraction", "stage"), [(0.7, 1.5), (0.4, 3.0), (1.0, 2.0), (0.5, 0.8)])
def test_at_break_even_nothing_is_gained(fraction, stage):
    assert speed_up(fraction, stage, break_even(fraction, stage)) == pytest.approx(1.0)


def steps(*rows):
    """Metrics of steps from (seconds, of them generating, prompt tokens, answer tokens[, of the seconds changing over]); the first is a
    warm-up."""
    keys = ("time/step", "time/rollout", "tokens/prompt", "tokens/completion", "time/switch")
    return [
        {"step": index + 1, **dict(zip(keys, row, strict=False))} for index, row in enumerate([(99, 90, 1, 1), *rows])
    ]


@pytest.fixture
def run(tmp_path):
    data = read_run(write_fake_run(tmp_path / "run", steps=2).path, samples=False)
    return dataclasses.replace(data, metrics=steps((8, 4, 100, 1000), (8, 4, 100, 1000)))


@pytest.fixture
def baseline(tmp_path):
    data = read_run(write_fake_run(tmp_path / "base", steps=2).path, samples=False)
    return dataclasses.replace(data, metrics=steps((10, 7, 100, 1000), (10, 7, 100, 1000)))


def test_fractions_of_two_runs_by_hand(run, baseline):
    found = compare_speed(run, baseline)
    assert (found.fraction, found.stage, found.overhead) == pytest.approx((0.7, 1.75, 0.1))
    assert found.measured == found.predicted == pytest.approx(1.25)
    assert found.same_work and found.steps == 2
    rows = dict(comparison_rows(found))
    assert rows["speed-up end to end, by the clock"] == "1.250"
    assert "0.300: it pays" in rows["break-even"]


def test_a_run_whose_overhead_ate_the_gain_does_not_pay(run, baseline):
    slow = dataclasses.replace(run, metrics=steps((11, 4, 100, 1000)))
    found = compare_speed(slow, baseline)
    assert found.measured < 1 and "does not pay" in dict(comparison_rows(found))["break-even"]


def test_changing_over_is_in_eta_once(run, baseline):
    """System arithmetic: f .7 and s 1.75; 1 s of 8 is changing over, which the baseline does not do."""
    found = compare_speed(dataclasses.replace(run, metrics=steps((8, 4, 100, 1000, 1))), baseline)
    assert (found.fraction, found.stage, found.overhead, found.switch) == pytest.approx((0.7, 1.75, 0.1, 0.1))
    assert found.measured == found.predicted == pytest.approx(1.25)
    assert ("of it, changing over between engine and trainer", "+0.100") in comparison_rows(found)
    # Without it the step would take 7 s, and eta be 0.
    quick = compare_speed(dataclasses.replace(run, metrics=steps((7, 4, 100, 1000, 0))), baseline)
    assert (quick.overhead, quick.switch, quick.predicted) == pytest.approx((0.0, 0.0, 10 / 7))
    # Half the tokens in half the time, but for changing over, which takes what it takes: at the baseline's tokens 4 + 3 + 1 s.
    short = compare_speed(dataclasses.replace(run, metrics=steps((4.5, 2, 50, 500, 1))), baseline)
    assert (short.stage, short.overhead) == pytest.approx((1.75, (2.5 - 1) * 2 / 10 + 0.1 - 0.3))
    assert short.predicted == pytest.approx(10 / 8)


def test_runs_with_other_token_workloads_have_no_speed_up_and_say_so(run, baseline):
    """Half the answer tokens in half the time: no faster, and not called so."""
    short = dataclasses.replace(run, metrics=steps((5.5, 3.5, 100, 500)))
    found = compare_speed(short, baseline)
    assert not found.same_work
    assert found.stage == pytest.approx(1.0)
    rows = comparison_rows(found)
    assert not any("by the clock" in name for name, _ in rows)
    assert ("speed-up end to end", "not stated: the runs did different work") in rows
    assert any("answer tokens a step: 500, baseline 1,000" in value for _, value in rows)


def test_settings_and_machines_that_differ_are_named(run, baseline):
    other = dataclasses.replace(
        baseline,
        config={**baseline.config, "rollout": {**baseline.config["rollout"], "group_size": 4}},
        env={"gpus": [{"name": "NVIDIA H200"}]},
    )
    text = " ".join(compare_speed(run, other).differences)
    assert "rollout.group_size: 8, baseline 4" in text
    assert "machine: Example CPU @ 2.60GHz, baseline NVIDIA H200" in text


def test_a_baseline_that_did_not_run_gives_no_speed_up(run, baseline):
    with pytest.raises(RunFolderError, match="not runnable"):
        compare_speed(run, dataclasses.replace(baseline, metrics=[]))


def test_the_command_states_it_and_the_page_shows_it(tmp_path):
    for name in ("a", "b"):
        write_fake_run(tmp_path / name, steps=6)
    result = CliRunner().invoke(app, ["report", str(tmp_path / "a"), "--baseline", str(tmp_path / "b")])
    assert result.exit_code == 0, result.output
    assert "speed-up end to end" in result.output and "break-even" in result.output
    assert "Speed against another run" in (tmp_path / "a" / "report.html").read_text()
    refused = CliRunner().invoke(app, ["report", str(tmp_path / "a"), "train.seed=1"])
    assert refused.exit_code == 2
