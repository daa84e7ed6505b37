"""What the page says of the three questions, and which held-out questions it shows."""

import json

import pytest
from fake_run import question_rows, write_fake_run, write_summary

from qerl.errors import RunFolderError
from qerl.experiments.summary import load_summary
from qerl.metrics.run_dir import RunDir
from qerl.report.collect import read_run
from qerl.report.html import render
from qerl.report.questions import PAGE_CHARACTERS, SHORTEST, read_questions
from qerl.report.samples import OUTCOMES
from qerl.report.three_questions import generation_share, three_questions


def cards(run, target=None):
    return {card.id: card for card in three_questions(read_run(run.path), target)}


def row(name, accuracy, text="t", samples=1):
    answers = [
        {
            "text": text,
            "parsed": "1",
            "outcome": "correct" if i < (accuracy or 0) * samples else "wrong",
            "tokens": 3,
            "stop_reason": "stop",
            "note": None,
        }
        for i in range(samples)
    ]
    return {"id": name, "question": f"{name}?", "answer": "1", "accuracy": accuracy, "answers": answers}


def test_questions_are_sorted_by_how_they_moved(tmp_path):
    run = RunDir.create(tmp_path / "run")
    run.write_evaluation(0, [row("a", 0.0), row("b", 1.0), row("c", 1.0), row("d", 0.0), row("e", None)])
    run.write_evaluation(5, [row("a", 1.0), row("b", 0.0), row("c", 1.0), row("d", 0.0), row("e", 1.0)])
    run.write_evaluation(
        9, [row("a", 1.0), row("b", 0.25, samples=4), row("c", 0.5, samples=4), row("d", 0.0), row("e", 1.0)]
    )
    found = read_questions(run, OUTCOMES)
    assert found.steps == (0, 9)
    assert [r["change"] for r in found.rows] == ["gained", "lost", "right", "wrong", "gained"]
    assert found.counts == {"gained": 2, "lost": 1, "right": 1, "wrong": 1}
    assert [(s["right"], s["samples"]) for s in found.rows[1]["sides"]] == [(1, 1), (1, 4)]
    assert found.outcomes == ("correct", "wrong")


def test_one_evaluation_or_other_questions_show_one_side(tmp_path):
    run = RunDir.create(tmp_path / "run")
    assert read_questions(run, OUTCOMES) is None
    run.write_evaluation(0, [row("a", 0.0), row("b", 1.0)])
    assert [r["change"] for r in read_questions(run, OUTCOMES).rows] == ["wrong", "right"]
    run.write_evaluation(4, [row("c", 1.0)])
    found = read_questions(run, OUTCOMES)
    assert (found.steps, len(found.rows), len(found.rows[0]["sides"])) == ((4,), 1, 1)


def test_answers_are_cut_so_that_the_page_stays_readable_and_its_data_cannot_end_the_script(tmp_path):
    run = RunDir.create(tmp_path / "run")
    run.write_evaluation(0, [row(f"q{i}", 1.0, "</script>\u2028" + "x" * 9000) for i in range(3000)])
    found = read_questions(run, OUTCOMES)
    assert found.rows[0]["sides"][0]["cut"] > 5000
    assert SHORTEST <= len(found.rows[0]["sides"][0]["text"]) <= PAGE_CHARACTERS // 3000
    text = found.json()
    assert "</script" not in text
    assert "\u2028" not in text
    assert json.loads(text)[0]["sides"][0]["text"].startswith("</script>\u2028")


def test_bytes_are_no_fewer_where_dense_copies_are_read(tmp_path):
    run = write_fake_run(tmp_path / "run")
    assert cards(run)["bytes"].answer == "No: dense copies are read here."
    memory = run.read_json(run.memory_path)
    del memory["measured"]["dense_cache"]
    run.write_json(run.memory_path, memory)
    card = cards(run)["bytes"]
    assert card.answer in ("3.56× fewer bytes of weights.", "No: weights are dequantized for every product.")
    weights = memory["measured"]["base_weights"] / 1000
    assert f"{weights:.0f} kB as NVFP4, {weights * 32 / 9:.0f} kB in BF16" in card.lines[0]
    share = generation_share(read_run(run.path))
    assert f"{1 / (1 - share / 2):.2f}×" in card.lines[-1]


def test_generation_is_a_share_of_the_steps_alone(tmp_path):
    run = write_fake_run(tmp_path / "run", steps=8, done=0, finished=False)
    run.append_metrics(
        1, {"time/rollout": 3.0, "time/backward": 1.0, "time/evaluate": 40.0, "time/step": 4.0, "time/elapsed": 50.0}
    )
    assert generation_share(read_run(run.path)) == pytest.approx(0.75)


@pytest.mark.parametrize(("target", "words"), [(0.6, "60.0% reached at step "), (0.99, "99.0% not reached at step 40")])
def test_a_target_is_reached_or_censored(tmp_path, target, words):
    run = write_fake_run(tmp_path / "run")
    card = cards(run, target)["quality"]
    assert card.answer.startswith(words)
    assert ("censored" in card.answer) == (target == 0.99)
    reached = next((p for p in read_run(run.path).evaluations if p.accuracy >= target), None)
    if reached:
        steps = [line["time/step"] for line in run.read_metrics() if 0 < line["step"] <= reached.step]
        assert reached.seconds == pytest.approx(sum(steps))
        assert reached.tokens == run.read_metrics()[reached.step]["num_tokens"]
    assert "No target" in cards(run)["quality"].unknown


def test_a_run_that_has_just_begun_has_cards_that_say_so(tmp_path):
    run = RunDir.create(tmp_path / "run")
    run.write_text(run.config_path, "")
    found = cards(run)
    assert found["signal"].answer == "Not recorded yet."
    assert found["quality"].answer == "Not evaluated yet."
    assert "three" in render(read_run(run.path))


def test_the_page_holds_every_question(tmp_path):
    run = write_fake_run(tmp_path / "run", steps=10)
    page = render(read_run(run.path))
    data = page.partition('id="question-data">')[2].partition("</script>")[0]
    assert [r["id"] for r in json.loads(data)] == [r["id"] for r in question_rows(0.5)]
    write_summary(run, 10, 100)


@pytest.mark.parametrize("damage", [{"id": None}, {"accuracy": "x"}, {"answers": []}, {"answers": ["x"]}])
def test_rows_that_are_no_questions_are_one_message(tmp_path, damage):
    run = write_fake_run(tmp_path / "run", steps=4)
    rows = run.read_evaluation(4)
    rows[3] = {key: value for key, value in (rows[3] | damage).items() if value is not None}
    run.write_evaluation(4, rows)
    with pytest.raises(RunFolderError, match=r"evaluations.*questions with their answers"):
        read_questions(run, OUTCOMES)
    if "answers" not in damage:
        with pytest.raises(RunFolderError, match=r"step-000004\.jsonl: .*an id and an accuracy"):
            load_summary(run.path)
