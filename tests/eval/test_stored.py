"""Evaluations on disk and against each other."""

import json
from types import SimpleNamespace

import pyarrow.parquet
import pytest

from qerl.errors import DataError
from qerl.eval.compare import compare_stored, pair_up
from qerl.eval.evaluate import EvalResult
from qerl.eval.files import Measurement, StoredEvaluation, read_evaluations, write_evaluations
from qerl.eval.table import table_lines
from qerl.metrics.run_dir import RunDir

POLICY = {"temperature": 0.0, "top_p": 1.0, "samples": 1, "max_new_tokens": 64, "seed": 3, "noise": None}


def row(name, accuracy, parsed="18", question=None):
    answers = [
        {
            "text": f"is {parsed}",
            "parsed": parsed,
            "outcome": "correct",
            "tokens": 4,
            "stop_reason": "stop",
            "note": None,
        }
    ]
    return {"id": name, "question": question or f"{name}?", "answer": "18", "accuracy": accuracy, "answers": answers}


def measurement(suite, policy, rows, **changes):
    result = EvalResult(
        accuracy=sum(r["accuracy"] or 0 for r in rows) / len(rows),
        low=0.1,
        high=0.9,
        confidence=0.95,
        interval="wilson",
        count=len(rows),
        answers=len(rows),
        truncated=0.25,
        unparsable=0.0,
        unscorable=0.0,
        mean_length=4.0,
        pass_at_k={1: 0.5},
        maj_at_k=0.5,
        pass_at_k_interval={1: (0.1, 0.9)},
        maj_at_k_interval=(0.1, 0.9),
        by_outcome={"correct": 1},
        policy=POLICY | changes,
        rows=tuple(rows),
    )
    return Measurement(suite=suite, policy=policy, location=f"{suite}.jsonl", result=result)


def stored(rows, suite="s", policy="p", **protocol):
    return StoredEvaluation(suite=suite, policy=policy, protocol=protocol, rows=rows)


def test_a_folder_reads_back_as_it_was_written_and_each_file_by_itself(tmp_path):
    base = measurement("math/500", "base", [row("a", 1.0), row("b", None)])
    tuned = measurement("gsm8k", "checkpoint-5", [row("c", 0.5)], temperature=0.7)
    path = write_evaluations(tmp_path / "out", [base, tuned], {"target": "runs/x"})
    saved = json.loads(path.read_text())
    assert saved["target"] == "runs/x"
    assert [entry["file"] for entry in saved["results"]] == ["500--base.parquet", "gsm8k--checkpoint-5.parquet"]
    for found, made in zip(read_evaluations(tmp_path / "out"), (base, tuned), strict=True):
        assert (found.suite, found.policy) == (made.suite, made.policy)
        assert found.rows == [dict(r) for r in made.result.rows]
    alone = read_evaluations(tmp_path / "out" / "gsm8k--checkpoint-5.parquet")
    assert [(one.suite, one.protocol["temperature"]) for one in alone] == [("gsm8k", 0.7)]
    assert pyarrow.parquet.read_table(tmp_path / "out" / "500--base.parquet")["accuracy"].to_pylist() == [1.0, None]


def test_a_run_folder_gives_its_newest_evaluation_or_the_one_asked_for(tmp_path):
    run = RunDir(tmp_path / "run")
    for step, right in ((0, 0.0), (20, 1.0)):
        run.write_evaluation(step, [row("a", right)])
    run.write_json(run.summary_path, {"evaluations": {"after": {"step": 20, "policy": POLICY}}})
    assert read_evaluations(tmp_path / "run")[0].rows[0]["accuracy"] == 1.0
    assert read_evaluations(tmp_path / "run")[0].protocol["seed"] == 3
    assert read_evaluations(f"{tmp_path / 'run'}:0")[0].rows[0]["accuracy"] == 0.0
    assert read_evaluations(run.evaluations_dir / "step-000020.jsonl")[0].rows[0]["accuracy"] == 1.0
    with pytest.raises(DataError, match="RUN:STEP with a step of 0, 20"):
        read_evaluations(f"{tmp_path / 'run'}:7")


def test_other_parquet_files_and_empty_places_are_refused(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"id": ["a"]}), tmp_path / "x.parquet")
    (tmp_path / "broken.parquet").write_text("no parquet")
    for place, message in (
        ("x.parquet", "not an evaluation"),
        ("broken.parquet", "cannot be read"),
        (".", "no evaluation"),
    ):
        with pytest.raises(DataError, match=message):
            read_evaluations(tmp_path / place)


def test_comparison_aligns_by_id_and_lists_what_changed_sides():
    first = stored([row("a", 1.0), row("b", 0.0, "7"), row("c", 1.0), row("d", None)], policy="base")
    second = stored([row("d", 1.0), row("c", 0.0, "9"), row("b", 1.0), row("a", 1.0)], policy="tuned")
    found = compare_stored(first, second)
    assert (found.gained, found.lost, found.count, found.difference) == (1, 1, 3, 0.0)
    assert (found.first_accuracy, found.second_accuracy) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert [(q.id, q.first, q.second, q.gained) for q in found.discordant] == [
        ("b", "7", "18", True),
        ("c", "18", "9", False),
    ]
    assert found.p_value == 1.0
    text = "\n".join(found.lines())
    assert "+ b: 7 -> 18, reference 18" in text
    assert "- c: 18 -> 9, reference 18" in text
    assert "… and 1 more" in "\n".join(found.lines(most=1))
    assert json.loads(json.dumps(found.to_dict()))["discordant"][0]["id"] == "b"


def test_comparison_refuses_other_questions_and_says_when_protocols_differ():
    with pytest.raises(DataError, match="same questions; got 1 and 2"):
        compare_stored(stored([row("a", 1.0)]), stored([row("a", 1.0), row("b", 1.0)]))
    with pytest.raises(DataError, match="another text"):
        compare_stored(stored([row("a", 1.0)]), stored([row("a", 1.0, question="other?")]))
    found = compare_stored(
        stored([row("a", 1.0)], temperature=0.0, seed=1), stored([row("a", 1.0)], temperature=1.0, seed=1)
    )
    assert found.protocol_differences == ("temperature differs: 0.0 and 1.0",)


def test_evaluations_pair_up_by_suite_and_policy():
    def names(pairs):
        return [(a.policy, b.policy) for a, b in pairs]

    one, other = stored([], "x", "p"), stored([], "y", "q")
    assert names(pair_up([one], [other])) == [("p", "q")]
    assert names(pair_up([one, other], [stored([], "y", "r")])) == [("q", "r")]
    twice = [stored([], "x", "base"), stored([], "x", "tuned")]
    assert names(pair_up(twice, twice)) == [("base", "base"), ("tuned", "tuned")]
    with pytest.raises(DataError, match="belong together"):
        pair_up(twice, [one])


def test_the_table_has_a_line_for_each_suite_and_no_mean():
    lines = table_lines([measurement("gsm8k", "base", [row("a", 1.0)]), measurement("svamp", "base", [row("b", 0.0)])])
    assert len(lines) == 3
    assert lines[1].split()[:5] == ["gsm8k", "base", "100.0%", "[10.0%,", "90.0%]"]
    assert lines[2].split()[2] == "0.0%"
    assert "pass@" not in lines[0]
    several = measurement("gsm8k", "base", [row("a", 1.0)])
    result = SimpleNamespace(**{name: getattr(several.result, name) for name in several.result.__slots__})
    result.policy, result.pass_at_k = POLICY | {"samples": 4}, {1: 0.5, 4: 0.75}
    result.pass_at_k_interval = {1: (0.1, 0.9), 4: (0.25, 0.875)}
    heading, line = table_lines([SimpleNamespace(suite="gsm8k", policy="base", result=result)])
    assert heading.split()[2:7] == ["avg@4", "[95%", "interval]", "pass@4", "[interval]"]
    assert line.split()[5:11] == ["75.0%", "[25.0%,", "87.5%]", "50.0%", "[10.0%,", "90.0%]"]
