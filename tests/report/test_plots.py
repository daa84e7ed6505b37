from dataclasses import replace

import pytest
from fake_run import write_fake_run

from qerl.metrics.run_dir import RunDir
from qerl.report.collect import read_run
from qerl.report.plot_parts import binned, log_axis, running_mean
from qerl.report.plots import accuracy_panel, groups_panel, panels, reward_panel, sigma_panel
from qerl.report.plots_diagnostics import causes_panel, information_panel, perturbation_panel, probe_panel
from qerl.report.plots_machine import MOST_BARS, probability_panel, speed_panel, stages_panel


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_run(write_fake_run(tmp_path_factory.mktemp("runs") / "demo", steps=20).path)


def trace(panel, name):
    return next(part for part in panel.figure.data if part.name == name)


def test_held_out_points_carry_their_intervals(run):
    points = trace(accuracy_panel(run), "held-out questions")
    assert list(points.x) == [0, 10, 20]
    for index, evaluation in enumerate(run.evaluations):
        assert points.y[index] + points.error_y.array[index] == pytest.approx(evaluation.high)
        assert points.y[index] - points.error_y.arrayminus[index] == pytest.approx(evaluation.low)


def test_the_reward_band_is_one_standard_deviation_either_side(run):
    low, high, mean = reward_panel(run).figure.data
    for index, row in enumerate(run.metrics):
        assert mean.y[index] == pytest.approx(row["reward"], rel=1e-5)
        assert high.y[index] - mean.y[index] == pytest.approx(row["reward_std"], abs=1e-5)
        assert mean.y[index] - low.y[index] == pytest.approx(row["reward_std"], abs=1e-5)


def test_sigma_is_drawn_in_steps_and_names_its_stage(run):
    (sigma,) = sigma_panel(run).figure.data
    assert sigma.line.shape == "hv"
    assert list(sigma.customdata) == [row["aqn/stage"] for row in run.metrics]
    assert sigma.y[0] == 0.0


def test_the_schedule_and_an_accumulated_sum_are_drawn_beside_sigma_and_named(run):
    for key, name, setting, words in (
        ("aqn/controller/sigma_schedule", "schedule", {"controller": {"enabled": True}}, "the fixed schedule"),
        ("aqn/displacement", "accumulated displacement", {"mode": "accumulate"}, "mode accumulate"),
    ):
        rows = [{**row, key: 0.5} for row in run.metrics]
        panel = sigma_panel(replace(run, metrics=rows, config={**run.config, "aqn": {**run.config["aqn"], **setting}}))
        assert set(trace(panel, name).y) == {0.5}
        assert words in panel.caption


def test_answers_that_were_computed_again_are_said_beside_the_speed_where_there_were_any(run):
    assert "put back" not in speed_panel(run).caption
    rows = [{**row, "rollout/preemptions": 60.0} for row in run.metrics]
    assert "put back 1,200 times" in speed_panel(replace(run, metrics=rows)).caption


def test_group_kinds_are_stacked_to_one_and_absent_kinds_left_out(run):
    parts = groups_panel(run).figure.data
    assert [part.name for part in parts] == ["mixed", "all right", "all wrong", "all truncated"]
    assert {part.stackgroup for part in parts} == {"all"}
    for step in range(20):
        assert sum(part.y[step] for part in parts) == pytest.approx(1.0, abs=1e-4)


def test_alarm_lines_are_drawn_at_their_levels_inside_the_axis(run):
    figure = probability_panel(run).figure
    assert sorted(shape.y0 for shape in figure.layout.shapes) == [0.005, 0.01]
    low, high = figure.layout.yaxis.range
    assert low <= -6
    assert high >= -1


def test_causes_of_mismatch_have_a_line_each_and_the_alarm_lines_are_the_kernels(run):
    figure = causes_panel(run).figure
    assert [part.name for part in figure.data] == ["noise", "updates of the step", "kernels and formats"]
    assert [shape.label.text for shape in figure.layout.shapes] == ["warning (kernels)", "fault (kernels)"]
    assert list(figure.data[2].x) == [1, 6, 11, 16]
    assert list(figure.data[0].x) == [6, 11, 16], "the first stage has no noise"


def test_probe_entropies_and_what_noise_adds_to_them(run):
    mixture, conditional, clean = probe_panel(run).figure.data
    assert "H(O)" in mixture.name and "H(O|z)" in conditional.name and clean.name == "without noise"
    (information,) = information_panel(run).figure.data
    for index, value in enumerate(information.y):
        assert mixture.y[index] - conditional.y[index] == pytest.approx(value, abs=1e-6)


def test_a_run_without_noise_has_no_figure_of_information_or_perturbations(tmp_path):
    run = RunDir.create(tmp_path / "run")
    run.append_metrics(1, {"probe/entropy_tempered/by_token": 0.4, "probe/information/by_token": 0.0})
    assert {panel.id for panel in panels(read_run(run.path))} == {"probe"}


def test_dependence_of_the_projections_is_said_in_words(run):
    assert "q–k 0.50" in perturbation_panel(run).caption


def test_long_runs_are_averaged_into_few_bars_that_keep_the_mean(tmp_path):
    run = RunDir.create(tmp_path / "long")
    for step in range(1, 1001):
        run.append_metrics(step, {"time/rollout": step / 1000, "time/evaluate": 0.0})
    (bars,) = stages_panel(read_run(run.path)).figure.data
    assert bars.name == "rollout"
    assert len(bars.x) <= MOST_BARS
    assert sum(bars.y[:-1]) / (len(bars.y) - 1) == pytest.approx(0.5, abs=0.01)


def test_null_values_are_gaps_and_not_zeros(tmp_path):
    run = RunDir.create(tmp_path / "run")
    for step, entropy in ((1, 0.5), (2, None), (3, 0.3)):
        run.append_metrics(step, {"entropy": entropy})
    (panel,) = panels(read_run(run.path))
    assert list(panel.figure.data[0].x) == [1, 3]


def test_running_mean_narrows_at_the_ends():
    assert running_mean([1.0, 2.0, 3.0, 10.0], 3) == [1.5, 2.0, 5.0, 6.5]


def test_bins_are_means_of_neighbors():
    assert binned([(1, 1.0), (2, 3.0), (3, 8.0)], most=2) == ([1.5, 3.0], [2.0, 8.0])
    assert binned([], most=2) == ([], [])


@pytest.mark.parametrize(("values", "expected"), [([2e-6, 3e-3], [-6, -2]), ([0.0], [0, 1]), ([0.01], [-2, -1])])
def test_log_axis_holds_all_values(values, expected):
    assert log_axis("x", values)["range"] == expected


def test_a_run_of_one_step_shows_its_points(tmp_path):
    run = read_run(write_fake_run(tmp_path / "one", steps=1).path)
    shown = panels(run)
    assert {"reward", "sigma", "groups", "outcomes", "length", "gradient"} <= {panel.id for panel in shown}
    for panel in shown:
        for part in panel.figure.data:
            if part.type == "scatter" and len(part.x) == 1:
                assert "markers" in part.mode, (panel.id, part.name)
    band = trace(reward_panel(run), "± 1 standard deviation")
    (row,) = run.metrics
    assert band.line.width > 0
    assert sorted(band.y) == pytest.approx(
        [row["reward"] - row["reward_std"], row["reward"] + row["reward_std"]], rel=1e-5
    )


def test_lines_of_several_steps_have_no_markers(run):
    assert trace(reward_panel(run), "reward").mode == "lines"


def test_a_figure_of_nothing_but_zeros_is_left_out(run):
    clipped = [{**row, "clip_ratio/high_mean": 0.01 * (row["step"] > 3)} for row in run.metrics]
    for rows, wanted in (
        (clipped, True),
        ([{**row, "clip_ratio/high_mean": 0.0, "clip_ratio/low_mean": 0.0} for row in clipped], False),
    ):
        assert ("clip" in {panel.id for panel in panels(replace(run, metrics=rows))}) is wanted


def test_shares_of_one_step_are_stacked_bars(tmp_path):
    run = read_run(write_fake_run(tmp_path / "run", steps=5, done=1, finished=False).path)
    figures = {panel.id: panel.figure for panel in panels(run)}
    for name in ("groups", "outcomes"):
        assert {trace.type for trace in figures[name].data} == {"bar"}
        assert figures[name].layout.barmode == "stack"
        assert sum(trace.y[0] for trace in figures[name].data) == pytest.approx(1.0, abs=1e-5)
        assert figures[name].layout.xaxis.dtick == 1
