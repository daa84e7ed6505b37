import json
from contextlib import contextmanager
from dataclasses import asdict

import pytest
from rollout_builders import EOS_IDS, write_checkpoint
from typer.testing import CliRunner

from qerl import memory
from qerl.cli import app
from qerl.config.load import load_config
from qerl.data.synthetic import arithmetic_problems
from qerl.errors import ConfigError
from qerl.train import validate as checking
from qerl.train.session import open_session
from qerl.train.validate import validate


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("".join(json.dumps(asdict(problem)) + "\n" for problem in arithmetic_problems("train", 8)))
    return path


def settings(data, *more):
    return [
        "model.path=demo",
        "model.dtype=float32",
        "rollout.max_prompt_tokens=96",
        "rollout.max_new_tokens=48",
        f"data.train={data}",
        *more,
    ]


def checks(*arguments):
    return {check.name: check for check in validate(load_config(None, settings(*arguments)))}


def test_the_packaged_model_passes_and_shows_what_was_seen(data):
    result = CliRunner().invoke(app, ["validate", *settings(data)])
    assert result.exit_code == 0, result.output
    assert "8 prompts of" in result.stdout and "<|im_start|>user" in result.stdout
    assert "2: '<|im_end|>'" in result.stdout
    assert "8 of 8 reference answers are correct" in result.stdout
    assert "0 of 8 wrong answers are correct" in result.stdout
    assert "FAIL" not in result.stdout


def test_the_checks_keep_to_the_memory_budget_as_training_does(data, monkeypatch):
    within, seen = [], []

    @contextmanager
    def budget(config, device):
        within.append(config.train.memory_budget)
        yield
        within.pop()

    monkeypatch.setattr(memory, "within_budget", budget)
    monkeypatch.setattr(checking, "open_session", lambda *a, **k: seen.append(list(within)) or open_session(*a, **k))
    for _ in validate(load_config(None, settings(data, "train.memory_budget=0.5"))):
        seen.append(list(within))
    assert seen == [[0.5]] * 5 and not within, "from the first weight to the last check"


def test_an_answer_limit_that_cuts_every_answer_fails(data):
    found = checks(data, "rollout.max_new_tokens=2")
    assert not found["stopping"].passed and "0 of 3 greedy answers" in found["stopping"].lines[0]
    result = CliRunner().invoke(app, ["validate", *settings(data, "rollout.max_new_tokens=2")])
    assert result.exit_code == 1 and "FAIL  stopping" in result.stdout
    assert "raise rollout.max_new_tokens (now 2)" in result.stdout


def test_references_that_cannot_score_fail(data, tmp_path):
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(json.dumps({**row, "answer": "-987654321"}) + "\n" for row in rows))
    check = checks(path)["rewards"]
    assert not check.passed
    assert "8 of 8 wrong answers are correct" in check.lines[1]


def test_a_template_that_adds_nothing_fails_and_every_eos_id_is_listed(data, tmp_path):
    folder = write_checkpoint(tmp_path / "tiny", "qwen2")
    words = tmp_path / "words.jsonl"  # in the vocabulary of the tiny model, so that its prompts differ
    words.write_text("".join(json.dumps({"question": f"w{i} w{i + 1}", "answer": "7"}) + "\n" for i in range(3, 8)))
    found = checks(words, f"model.path={folder}", "rollout.max_prompt_tokens=40", "rollout.max_new_tokens=8")
    assert not found["prompts"].passed
    assert any("without a chat template" in line for line in found["prompts"].lines)
    listed = [int(line.split(":")[0]) for line in found["tokens that end an answer"].lines]
    assert listed == list(EOS_IDS)


def test_what_training_refuses_is_refused(data):
    with pytest.raises(ConfigError, match="temperature"):
        checks(data, "rollout.temperature=0")
