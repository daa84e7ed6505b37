"""The report of several runs: what it says, what it keeps apart, and that text of files stays text."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
from fake_cells import settings_of, write_fake_matrix
from fake_run import write_fake_run
from page_parser import Page
from typer.testing import CliRunner

from qerl.cli import app
from qerl.errors import RunFolderError
from qerl.experiments.compare import compare_cells
from qerl.experiments.folders import Collection, read_cells
from qerl.experiments.pairs import spread
from qerl.experiments.table import markdown
from qerl.report.arms import cards, render_arms, seeds_text, target_text
from qerl.report.comparison import Difference, TargetRow
from qerl.report.plots_arms import arm_panels


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return write_fake_matrix(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def comparison(results):
    (found,) = compare_cells(read_cells([results]))
    return found


@pytest.fixture(scope="module")
def page(comparison):
    return Page(render_arms([comparison]))


def test_the_page_is_one_file_that_asks_nothing_of_a_network(comparison):
    html = render_arms([comparison])
    for tag, attributes in Page(html).attributes:
        assert "src" not in attributes, tag
        if tag in ("a", "link"):
            assert attributes["href"].startswith(("#", "data:"))
    assert len(re.findall(r"plotly\.js v\d", html)) == 1
    ids = {attributes["id"] for _, attributes in Page(html).attributes if attributes.get("id")}
    links = {attributes["href"][1:] for tag, attributes in Page(html).attributes if tag == "a"}
    assert links <= ids


def test_the_questions_that_were_asked_come_first_with_their_verdicts(page, comparison):
    first, second, third = comparison.pairs
    assert (first.second, first.first) == ("NVFP4 + AQN, absolute 5e-2 to 5e-4", "NVFP4 LoRA")
    assert len(first.over_seeds.values) == 5 and len(second.over_seeds.values) == 3
    words = page.text
    assert words.index("What was asked") < words.index("Are fewer bytes moved")
    assert "not distinguishable NVFP4 LoRA against BF16 LoRA" in words
    assert third.verdict == "not distinguishable" and first.detectable == 0.02
    assert "stated to be detectable: 2.0" in words


def test_every_seed_is_drawn_and_each_figure_has_its_place(page, comparison):
    places = [attributes["data-figure"] for _, attributes in page.attributes if "data-figure" in attributes]
    assert sorted(places) == sorted(page.figures)
    assert {
        "t0-accuracy",
        "t0-differences",
        "t0-course",
        "t0-seconds",
        "t0-front",
        "t0-stages",
        "t0-groups-mixed",
    } <= set(places)
    traces = page.figures["t0-accuracy"]["data"]
    dots = [trace for trace in traces if trace.get("marker", {}).get("symbol") == "circle"]
    assert [len(trace["x"]) for trace in dots] == [3, 5, 5, 3, 1]
    lines = [trace for trace in page.figures["t0-course"]["data"] if "mean" not in trace["hovertemplate"]]
    assert len(lines) == 18


def test_censored_times_are_bounds_and_reached_ones_are_medians(comparison):
    by_label = {arm.label: arm for arm in comparison.arms}
    slow = by_label["NVFP4, temperature matched to NVFP4 + AQN"].target["device_seconds"]
    assert slow.value is None and slow.reached == 0 and slow.above > 100
    fast = by_label["NVFP4 + AQN, absolute 5e-2 to 5e-4"].target["device_seconds"]
    assert fast.reached == 5 and 80 < fast.value < 110
    assert target_text(slow, "device_seconds").startswith("> 2 min")
    for reached, words in ((0, "not reached (0 of 2)"), (1, "reached (1 of 2)")):
        assert target_text(TargetRow(value=None, above=None, reached=reached, count=2), "tokens") == words


def test_failed_and_missing_cells_are_shown_and_counted(page, comparison):
    nf4 = next(arm for arm in comparison.arms if arm.label == "NF4 LoRA")
    assert [row.state for row in nf4.seeds] == ["finished", "failed", "waiting"]
    assert (nf4.collapsed, nf4.judged) == (1, 2)
    assert nf4.after.values == (nf4.seeds[0].after,)
    assert "nf4-s1 failed: TrainingError" in page.text
    assert "Not finished, and so without a result: nf4-s2." in page.text
    assert "not bit-exact: nvfp4-s2" in page.text


def test_settings_that_differ_are_listed_by_arm(comparison):
    changed = {row.key: row.values for row in comparison.changed}
    assert changed["quant.format"] == ("bf16", "nvfp4", "nvfp4", "nvfp4", "nf4")
    assert changed["rollout.temperature"] == (1.0, 1.0, 1.0, 1.21, 1.0)
    assert "train.seed" not in changed and "run.name" not in changed


def test_an_arm_that_has_not_begun_differs_in_no_setting_and_has_one_dash_for_its_figures(tmp_path):
    results = write_fake_matrix(tmp_path)
    for name in ("nf4-s0", "nf4-s1", "bf16-s0"):
        shutil.rmtree(results / name)
    (found,) = compare_cells(read_cells([results]))
    changed = {row.key: row.values for row in found.changed}
    assert changed["quant.format"] == ("bf16", "nvfp4", "nvfp4", "nvfp4", "–")
    assert set(changed) == {"quant.format", "aqn.enabled", "rollout.temperature"}
    assert dict(cards(found)[0].rows)["NF4 LoRA"] == "–"


def test_noise_is_drawn_in_steps_and_what_is_measured_is_not(comparison):
    shapes = {
        panel.id: {trace.line.shape for trace in panel.figure.data}
        for panel in arm_panels(comparison, "m-")
        if panel.id in ("m-aqn-sigma", "m-reward")
    }
    assert shapes == {"m-aqn-sigma": {"hv"}, "m-reward": {"linear"}}


def test_many_runs_are_drawn_as_means_of_arms(comparison):
    """37 jagged lines in one figure could not be told apart."""
    extra = tuple(replace(curve, seed=curve.seed + 10) for curve in comparison.curves["reward"])
    crowded = replace(comparison, curves=comparison.curves | {"reward": comparison.curves["reward"] + extra})
    plain, full = (
        next(panel for panel in arm_panels(c, "m-") if panel.id == "m-reward") for c in (comparison, crowded)
    )
    assert len(full.figure.data) == len(comparison.arms) < len(plain.figure.data)
    assert "runs by themselves are left out" in full.caption and "left out" not in plain.caption
    own = [curve.values for curve in comparison.curves["reward"] if curve.arm == "bf16"]
    middle = [sum(values[30 + shift] for values in own) / len(own) for shift in range(-2, 3)]
    assert full.figure.data[0].y[30] == pytest.approx(sum(middle) / 5, rel=1e-5)


def test_an_interval_of_two_seeds_does_not_squeeze_the_others(comparison):
    first, *others = comparison.pairs
    wide = replace(first, over_seeds=replace(first.over_seeds, low=-0.6, high=0.6))
    panels = [
        next(panel for panel in arm_panels(replace(comparison, pairs=pairs), "m-") if panel.id == "m-differences")
        for pairs in (comparison.pairs, (wide, *others))
    ]
    assert "leaves the picture" not in panels[0].caption and "leaves the picture" in panels[1].caption
    low, high = panels[1].figure.layout.xaxis.range
    marks = [100 * value for row in comparison.pairs for value in row.over_seeds.values]
    assert -60 < low < min(marks) and max(marks) < high < 60


def test_differences_without_a_figure_are_listed_in_one_line(comparison):
    """A matrix whose first arm had not ended was fifteen lines of nothing, and figures with room for what is not there."""
    nothing = {"over_seeds": None, "pooled": None, "before": None, "question_difference": None, "tests": ()}
    first, second, third = comparison.pairs
    before = Difference(mean=0.006, low=-0.016, high=0.029)
    pairs = (first, replace(second, **nothing), replace(third, **(nothing | {"before": before})))
    open_arm = replace(comparison.arms[4], after=None)
    partial = replace(comparison, pairs=pairs, arms=(*comparison.arms[:4], open_arm))
    page = Page(render_arms([partial]))
    assert f"Not yet against {second.first}: {second.second}." in page.text
    assert "nothing after training; before it +0.6 (−1.6 to +2.9) points" in page.text
    assert f"* Not yet against {second.first}: {second.second}." in markdown([partial])
    rows = {panel.id: panel.rows for panel in arm_panels(partial, "m-")}
    assert (rows["m-accuracy"], rows["m-differences"]) == (4, 1)
    long = replace(first, second="a name of many words that " * 4)
    rows = {panel.id: panel.rows for panel in arm_panels(replace(partial, pairs=(long,) * 4), "m-")}
    assert rows["m-differences"] > 4


def test_more_arms_than_colors_are_told_apart(comparison):
    arms = tuple(replace(comparison.arms[0], key=f"a{n}", label=f"arm {n}") for n in range(11))
    many = replace(comparison, arms=arms, pairs=())
    figure = next(panel.figure for panel in arm_panels(many, "m-") if panel.id == "m-accuracy")
    looks = [(t.marker.symbol, t.marker.color) for t in figure.data if t.mode == "markers" and t.marker.size == 9]
    seeds = [look for look in looks if look[0].startswith("circle")]
    assert len(set(seeds)) == 11
    assert render_arms([many]).count("key hollow") == 6 + len(arms[0].seeds), "three cards, three tables, runs"


def test_the_front_is_marked(comparison):
    assert [arm.on_front for arm in comparison.arms] == [False, True, True, False, False]


def test_two_protocols_never_share_a_table(results):
    cells = read_cells([results]).cells
    tuned = [
        cell | {"matrix": "tuned", "protocol": "best_recipe", "phase": phase}
        for cell in cells
        for phase in ("tune", "final")
    ]
    comparisons = compare_cells(Collection(cells=(*cells, *tuned), plans={}))
    assert [(c.title, c.phase) for c in comparisons] == [("tuned", "final"), ("example", "run"), ("tuned", "tune")]
    page = Page(render_arms(comparisons))
    tables = [attributes for _, attributes in page.attributes if attributes.get("data-table") == "arms"]
    assert len(tables) == 3
    assert "tuned: best recipe, trials" in page.text


HOSTILE = " </script><script>alert(1)</script> {{ 7 * 7 }} <img src=x onerror=alert(2)> &"


def test_names_and_messages_of_files_stay_text(tmp_path):
    results = write_fake_matrix(tmp_path, hostile=HOSTILE)
    page = Page(render_arms(compare_cells(read_cells([results]))))
    assert len(page.scripts) == 3
    assert not [tag for tag, _ in page.attributes if tag == "img"]
    assert "{{ 7 * 7 }}" in page.text
    labels = json.dumps(page.figures, ensure_ascii=False)
    assert "<img" not in labels and "<script" not in labels


def test_runs_that_belong_to_no_matrix_are_arms_by_their_settings(tmp_path):
    for seed in (0, 1):
        run = write_fake_run(tmp_path / f"a{seed}", steps=10, seed=seed)
        text = run.config_path.read_text().replace("seed: 0", f"seed: {seed}")
        run.write_text(run.config_path, text)
    other = write_fake_run(tmp_path / "b", steps=10)
    other.write_text(other.config_path, other.config_path.read_text().replace("lr: 0.0003", "lr: 0.001"))
    crashed = write_fake_run(tmp_path / "c", steps=10, done=4, finished=False)
    crashed.write_text(crashed.config_path, crashed.config_path.read_text().replace("lr: 0.0003", "lr: 0.01"))
    out = tmp_path / "all.html"
    names = [str(tmp_path / name) for name in ("a0", "a1", "b", "c")]
    result = CliRunner().invoke(app, ["report", *names, "--out", str(out), "--target", "0.8"])
    assert result.exit_code == 0, result.output
    (found,) = compare_cells(read_cells([tmp_path / name for name in ("a0", "a1", "b", "c")]), target=0.8)
    assert [[row.name for row in arm.seeds] for arm in found.arms] == [["a0", "a1"], ["b"], ["c"]]
    assert {row.key for row in found.changed} == {"optim.lr"}
    assert found.arms[0].target["samples"].reached == 2
    assert found.arms[2].seeds[0].state == "running" and found.arms[2].after is None
    assert "Runs side by side" in Page(out.read_text()).text


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    for number, rate in enumerate(("0.0003", "0.001")):
        run = write_fake_run(tmp_path / f"try{number}" / "demo", steps=4)
        run.write_text(run.config_path, run.config_path.read_text().replace("lr: 0.0003", f"lr: {rate}"))
    other = write_fake_run(tmp_path / "other", steps=4)
    (found,) = compare_cells(read_cells([tmp_path / "try0" / "demo", tmp_path / "try1" / "demo", other.path]))
    assert [[row.name for row in arm.seeds] for arm in found.arms] == [["try0/demo", "other"], ["try1/demo"]]
    assert [arm.label for arm in found.arms] == ["try0/demo", "try1/demo"]


def test_runs_of_one_seed_are_told_of(tmp_path):
    """They count, each as a seed, but none is another draw. Runs of other settings, and of other seeds, are no repetition."""
    for name, old, new in (
        ("a", "seed: 0", "seed: 0"),
        ("again", "seed: 0", "seed: 0"),
        ("next", "seed: 0", "seed: 1"),
        ("other", "lr: 0.0003", "lr: 0.001"),
    ):
        run = write_fake_run(tmp_path / name, steps=4)
        run.write_text(run.config_path, run.config_path.read_text().replace(old, new))
    (found,) = compare_cells(read_cells([tmp_path / name for name in ("a", "again", "next", "other")]))
    said = (
        "Of the same settings and the same seed: a, again (seed 0). "
        "Each counts as a seed of its own, so intervals over seeds are too narrow."
    )
    assert said in found.notes and said in Page(render_arms([found])).text
    (found,) = compare_cells(read_cells([tmp_path / name for name in ("a", "next", "other")]))
    assert not any("the same seed" in note for note in found.notes)


def test_a_folder_of_runs_stands_for_each_of_them(tmp_path):
    for name in ("one", "two", "three"):
        write_fake_run(tmp_path / "runs" / name, steps=4)
    (found,) = compare_cells(read_cells([tmp_path / "runs"]))
    assert sorted(row.name for arm in found.arms for row in arm.seeds) == ["one", "three", "two"]
    with pytest.raises(RunFolderError, match=r"would count twice; got .*/runs/one in "):
        read_cells([tmp_path / "runs", tmp_path / "runs" / "one"])


def test_a_folder_of_matrices_names_one_to_give(results):
    with pytest.raises(RunFolderError, match=f"holds matrices, and no cells of its own.*Give one .* such as {results}"):
        read_cells([results.parent])


def test_a_run_that_is_given_twice_is_refused(tmp_path, results):
    run = write_fake_run(tmp_path / "one", steps=4).path
    (tmp_path / "link").symlink_to(run)
    for twice in ([results, results], [results, results / "nvfp4-s0"], [run, tmp_path / "link"]):
        result = CliRunner().invoke(app, ["report", *map(str, twice), "--out", str(tmp_path / "twice.html")])
        assert result.exit_code == 2 and "one run would count twice" in " ".join(result.stderr.split())
        assert not (tmp_path / "twice.html").exists()


def test_the_command_knows_runs_from_matrices(tmp_path, results):
    run = write_fake_run(tmp_path / "one", steps=4)
    for arguments, name in (
        (["report", str(run.path)], run.report_path),
        (["report", str(results)], results / "report.html"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert name.exists()
    for arguments, words in (
        (["report", str(run.path), str(results)], "needs a place"),
        (["report", str(run.path), "--against", "example/nvfp4"], "--against is for the report of several"),
        (["report", str(results), "--against", "example/nvfp4"], "no other matrix to compare"),
        (["report", str(run.path), "optim.lr=1"], "take no settings"),
        (["report", str(tmp_path / "none")], "no such run folder"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2 and words in " ".join(result.stderr.split())


def test_what_is_stored_of_a_cell_is_enough(results):
    stored = settings_of(results, "nvfp4-s0")
    assert len(stored["questions"]["after"]["right"]) == 400


def test_seeds_that_scatter_more_than_stated_are_told(results):
    collection = read_cells([results])
    (first,) = compare_cells(collection)
    plan = collection.plans["example"]
    detect = plan["plan"]["detect"] | {"sd": 0.001}
    tight = Collection(cells=collection.cells, plans={"example": plan | {"plan": plan["plan"] | {"detect": detect}}})
    (second,) = compare_cells(tight)
    assert not any("scatter" in note for note in first.notes)
    assert any("more than the 0.1 stated beforehand" in note for note in second.notes)


def test_intervals_of_shares_end_at_nothing_and_at_all():
    found = spread([0.9, 0.99], share=True)
    assert found.high == 1.0 and 0.0 < found.low < 0.9
    assert spread([0.9, 0.99]).high > 1.0
    assert spread([0.0, 0.05], share=True).low == 0.0


def test_runs_without_a_result_are_told_from_those_with_one(comparison):
    arm = comparison.arms[0]
    assert seeds_text(arm) == str(len(arm.seeds))
    open_seed = replace(arm.seeds[0], after=None)
    assert seeds_text(replace(arm, seeds=(open_seed, *arm.seeds[1:]))) == f"{len(arm.seeds) - 1} of {len(arm.seeds)}"
