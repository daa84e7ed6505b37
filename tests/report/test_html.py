import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from fake_run import behavior_row, question_rows, write_fake_run
from page_parser import Page

from qerl.errors import MissingDependencyError, RunFolderError
from qerl.metrics.run_dir import RunDir
from qerl.report.collect import read_run
from qerl.report.html import on_policy_label, render, write_report


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return write_fake_run(tmp_path_factory.mktemp("runs") / "demo", steps=20)


@pytest.fixture(scope="module")
def page(finished):
    return Page(render(read_run(finished.path)))


def test_the_page_is_one_file_that_asks_nothing_of_a_network(finished):
    path = write_report(finished.path)
    assert path == finished.report_path
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    for tag, attributes in page.attributes:
        assert "src" not in attributes, tag
        if tag in ("a", "link"):
            assert attributes["href"].startswith(("#", "data:"))
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    assert "@import" not in style
    assert "url(" not in style
    assert html.count("Plotly, Inc.") >= 1
    assert len(re.findall(r"plotly\.js v\d", html)) == 1


def test_the_headline_is_accuracy_before_and_after_with_the_paired_difference(page):
    assert "44.2% → 91.2%" in page.text
    assert "+47.0 points (95% interval +42.4 to +51.6)" in page.text
    assert "247 questions gained, 12 lost, of 500" in page.text
    assert "39.9–48.6%" in page.text


def test_the_policy_and_what_the_intervals_are_over_are_stated(page):
    assert "greedy decoding (temperature 0), one answer a question, at most 64 tokens" in page.text
    assert "AQN noise off in evaluation" in page.text
    assert "95% Wilson intervals over questions, not over seeds" in page.text


def test_every_figure_has_its_place_and_its_data(page):
    places = [attributes["data-figure"] for _, attributes in page.attributes if "data-figure" in attributes]
    assert sorted(places) == sorted(page.figures)
    wanted = {
        "accuracy",
        "reward",
        "entropy",
        "sigma",
        "groups",
        "stages",
        "length",
        "probability",
        "logprob",
        "gradient",
    }
    assert wanted <= set(places)


def test_colors_of_figures_are_variables_that_the_style_defines(finished):
    html = render(read_run(finished.path))
    used = set(re.findall(r"var\((--[\w-]+)\)", json.dumps(Page(html).figures)))
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    light, dark = style.split("@media (prefers-color-scheme: dark)", 1)
    for name in used:
        assert f"{name}:" in light, name
        assert f"{name}:" in dark, name


def test_settings_memory_time_and_warnings_are_shown(page):
    for words in (
        "optim.lr 0.0003 1e-05",
        "kv cache 50.3 MB 41.0 MB +22.7 %",
        "norms 3.50 kB 3.50 kB +0.0 %",
        "training phase, predicted 215 MB",
        "rollout 26 s",
        "completion tokens",
        "versions.torch 2.13.0",
        "selects the worked mode",
    ):
        assert words in page.text, words


def test_peaks_of_a_gpu_stand_beside_their_prediction(tmp_path):
    run = write_fake_run(tmp_path / "demo", steps=4)
    memory = run.read_json("memory.json")
    peaks = {"backward": {"allocated": 19_871_000_000, "reserved": 24_577_000_000}}
    predicted = {"rollout": 3_760_000_000, "backward": 19_990_000_000}
    by_owner = {"backward, all else": {"predicted": 9e9, "measured": 10e9, "error": -0.1}}
    largest = {"tokens": 12_345, "backward, all else": {"predicted": 9.9e9, "measured": 10e9, "error": -0.01}}
    more = {"predicted_peaks": predicted, "measured_peaks": peaks, "by_owner": by_owner, "largest_pass": largest}
    run.write_json("memory.json", memory | more)
    page = Page(render(read_run(run.path)))
    for words in (
        "backward phase, predicted 20.0 GB",
        "backward, all else at its peak 9.00 GB 10.0 GB −10.0 %",
        "backward, all else, planned for its largest pass of 12,345 tokens 9.90 GB 10.0 GB −1.0 %",
        "backward phase, allocated 19.9 GB",
        "backward phase, reserved 24.6 GB",
    ):
        assert words in page.text, words


def test_answers_carry_their_outcome_for_the_filters(page):
    cards = [a for tag, a in page.attributes if tag == "article"]
    buttons = {a["data-value"] for tag, a in page.attributes if tag == "button" and a.get("data-kind") == "outcome"}
    assert {card["data-when"] for card in cards} == {"early", "late"}
    assert {card["data-outcome"] for card in cards} <= buttons
    assert "early" in {
        a["data-value"] for tag, a in page.attributes if tag == "button" and a.get("data-kind") == "when"
    }


def test_the_noisy_policy_is_held_against_the_clean_one(page):
    words = "sigma 0.0005, 2 draws): 90.2%, −1.0 points from the clean policy (95% interval −2.2 to +0.2, paired); 89.6% to 90.8%"
    assert words in page.text


HOSTILE = "</script><script>alert(1)</script> {{ 7 * 7 }} \u2028 <img src=x onerror=alert(2)> & \x00"


def test_text_of_models_and_data_stays_text(tmp_path):
    import random

    run = write_fake_run(tmp_path / "demo", steps=6)
    rows = [behavior_row(5, key, 3, 4, "wrong", random.Random(0)) for key in range(4)]
    rows[0] |= {"text": HOSTILE, "question": HOSTILE, "parsed": HOSTILE, "answer": HOSTILE}
    run.write_rollout_parquet(5, rows)
    questions = question_rows(0.9)
    questions[0] |= {"question": HOSTILE, "answer": HOSTILE}
    questions[0]["answers"][0] |= {"text": HOSTILE, "parsed": HOSTILE}
    run.write_evaluation(6, questions)
    summary = run.read_json("summary.json")
    run.write_json("summary.json", summary | {"warnings": [HOSTILE], "run": HOSTILE, "model": HOSTILE})
    page = Page(render(read_run(run.path)))
    # Questions, figures, plotly and the page's own.
    assert len(page.scripts) == 4
    assert not [tag for tag, _ in page.attributes if tag == "img"]
    assert page.text.count("{{ 7 * 7 }}") >= 5


def test_a_run_without_an_end_is_reported_as_far_as_it_went(tmp_path):
    run = write_fake_run(tmp_path / "crashed", steps=40, done=13, finished=False)
    with run.metrics_path.open("a") as file:
        file.write('{"step": 14, "rewa')
    run.memory_path.unlink()
    page = Page(write_report(run.path).read_text(encoding="utf-8"))
    assert "it is still going, or stopped at step 13 of 40" in page.text
    assert "44.2% → 58.1%" in page.text
    assert "memory" not in page.figures
    assert page.figures["reward"]["data"][-1]["x"] == list(range(1, 14))
    assert "paired" not in page.text


@pytest.mark.parametrize("kept", ["config.resolved.yaml", "metrics.jsonl"])
def test_a_folder_with_one_file_of_a_run_still_gives_a_page(tmp_path, kept):
    whole = write_fake_run(tmp_path / "whole", steps=4)
    part = RunDir(tmp_path / "part")
    part.write_text(kept, (whole.path / kept).read_text())
    page = Page(write_report(part.path).read_text(encoding="utf-8"))
    assert "no summary" in page.text
    assert bool(page.figures) == (kept == "metrics.jsonl")


def test_a_run_before_its_first_step_gives_a_page(tmp_path):
    run = RunDir.create(tmp_path / "new")
    run.append_metrics(
        0, {"eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6, "eval/count": 100}
    )
    page = Page(write_report(run.path).read_text(encoding="utf-8"))
    assert "50.0%" in page.text
    assert "There is no evaluation after training yet." in page.text


def test_a_run_without_evaluation_says_so(tmp_path):
    run = RunDir.create(tmp_path / "blind")
    run.append_metrics(1, {"reward": 0.5, "reward_std": None, "entropy": None})
    page = Page(write_report(run.path).read_text(encoding="utf-8"))
    assert "No held-out evaluation is recorded." in page.text
    assert set(page.figures) == {"reward"}


def test_another_place_can_be_named_and_a_folder_without_a_run_is_refused(finished, tmp_path):
    out = tmp_path / "site" / "demo.html"
    assert write_report(finished.path, out) == out
    assert out.stat().st_size > 100_000
    with pytest.raises(RunFolderError, match="no such run folder"):
        write_report(tmp_path / "nothing")


def test_without_plotly_the_remedy_is_named(finished, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingDependencyError, match="pip install plotly jinja2"):
        write_report(finished.path)


def test_the_report_needs_no_torch(finished, tmp_path):
    code = (
        "import sys; from qerl.report.html import write_report; "
        f"write_report({str(finished.path)!r}, {str(tmp_path / 'page.html')!r}); "
        "assert 'torch' not in sys.modules; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_page_says_whether_the_updates_were_on_policy(tmp_path):
    run = write_fake_run(tmp_path / "demo", steps=4)
    summary = run.read_json("summary.json")
    whole = {"on_policy": True, "on_policy_steps": 4, "steps": 4, "reasons": {}}
    partly = whole | {"on_policy": False, "on_policy_steps": 1, "reasons": {"noise_key": {}, "adapter_version": {}}}
    labels = []
    for verdict in (whole, partly):
        run.write_json("summary.json", summary | {"on_policy": verdict})
        labels.append(on_policy_label(read_run(run.path)))
        assert labels[-1] in Page(render(read_run(run.path))).text
    assert labels == ["on-policy", "on-policy in 1 of 4 steps (differs: noise key, adapter version)"]


def test_without_a_summary_the_metrics_say_it(tmp_path):
    run = write_fake_run(tmp_path / "demo", steps=4, done=2, finished=False)
    assert on_policy_label(read_run(run.path)) == ""
    run.append_metrics(3, {"on_policy": 1.0})
    run.append_metrics(4, {"on_policy": 0.0})
    assert on_policy_label(read_run(run.path)) == "on-policy in 1 of 2 steps"


def test_the_demo_says_what_its_gain_is_and_other_runs_do_not(finished):
    run = read_run(finished.path)
    assert "a gain here is a switch to the worked way" in Page(render(run)).text
    other = {**run.config, "model": {**run.config["model"], "path": "Qwen2.5-3B-Instruct"}}
    assert "a gain here is a switch" not in Page(render(replace(run, config=other))).text
