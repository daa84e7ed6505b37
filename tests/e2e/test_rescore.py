"""Records scored again: equal when nothing changed, beyond tolerance or refused when something did."""

import json
import shutil
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from qerl.cli import app
from qerl.config.load import load_config
from qerl.data.synthetic import arithmetic_problems
from qerl.errors import ConfigError, RunFolderError
from qerl.metrics.behavior import read_behavior, read_run_facts, write_behavior
from qerl.metrics.run_dir import RunDir
from qerl.train.rescore import rescore
from qerl.train.run import train

SETTINGS = (
    "model.path=demo",
    "model.dtype=float32",
    "rollout.prompts_per_step=2",
    "rollout.group_size=3",
    "rollout.max_prompt_tokens=96",
    "rollout.max_new_tokens=24",
    "lora.rank=4",
    "optim.lr=1e-3",
    "optim.warmup_ratio=0",
    "train.steps=3",
    "aqn.num_stages=2",
    "aqn.scope=response",
    "eval.before=false",
    "eval.after=false",
    "diagnostics.every=0",
    "log.progress=off",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("".join(json.dumps(asdict(problem)) + "\n" for problem in arithmetic_problems("train", 16)))
    return path


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A run of three steps, noisy from the second half on, whose adapters were kept."""
    folder = tmp_path_factory.mktemp("runs")
    settings = [*SETTINGS, f"data.train={data}", f"run.dir={folder}", "run.name=r"]
    return RunDir.open(train(load_config(None, settings)))


@pytest.fixture
def changed(run, tmp_path):
    """A copy of the run that a test may damage."""
    return RunDir.open(shutil.copytree(run.path, tmp_path / "copy"))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_every_rollout_of_a_run_scores_as_recorded(run, index):
    result = rescore(run.path, rollout=index)
    assert result.within and result.largest <= 1e-4
    assert result.rows == 6
    assert result.tokens == sum(len(row["token_ids"]) for row in read_behavior(run.rollout_path(index)))
    assert ("sigma 0.05" in result.noise) == (index == 2), result.noise


def test_step_n_is_rollout_n_minus_one_and_the_newest_is_the_default(run):
    assert rescore(run.path, step=2).rollout == 1
    assert rescore(run.path).rollout == 2
    with pytest.raises(ConfigError, match="both"):
        rescore(run.path, step=1, rollout=0)
    with pytest.raises(ConfigError, match="counted from 1"):
        rescore(run.path, step=0)


def test_rows_choose_answers(run):
    records = read_behavior(run.rollout_path(2))
    result = rescore(run.path, rows="0,3-4")
    assert result.rows == 3
    assert result.tokens == sum(len(records[i]["token_ids"]) for i in (0, 3, 4))


@pytest.mark.parametrize("rows", ["6", "a", "3-1", "", "0,,1"])
def test_rows_that_do_not_exist_are_refused(run, rows):
    with pytest.raises(ConfigError, match="numbers from 0 to 5"):
        rescore(run.path, rows=rows)


def test_a_changed_log_prob_is_found_with_its_place(changed):
    path = changed.rollout_path(2)
    records, facts = read_behavior(path), read_run_facts(path)
    records[4]["behavior_logprobs"][1] -= 0.01
    write_behavior(path, records, facts)
    result = rescore(changed.path)
    assert not result.within
    assert result.largest == pytest.approx(0.01, abs=1e-4)
    assert result.worst.startswith(f"prompt {records[4]['prompt_id']}, sample {records[4]['sample_key']}, token 1 of")
    printed = CliRunner().invoke(app, ["rescore", str(changed.path)])
    assert printed.exit_code == 1 and "BEYOND TOLERANCE" in printed.stdout


def test_rounded_keys_and_values_have_a_tolerance_of_their_own(data, tmp_path):
    """In float32 too: the run goes on past its canary, and its record is beyond what the compute type alone would allow."""
    settings = [*SETTINGS, f"data.train={data}", f"run.dir={tmp_path}", "run.name=r", "rollout.kv_format=fp8"]
    folder = train(load_config(None, [*settings, "train.steps=1"]))
    result = rescore(folder)
    assert result.within and result.mean > 1e-5
    assert not rescore(folder, ["rollout.kv_format=compute"]).within
    printed = CliRunner().invoke(app, ["rescore", str(folder)])
    assert printed.exit_code == 0 and "float32, rollout.kv_format=fp8" in printed.stdout


def test_another_noise_key_is_found(changed):
    path = changed.rollout_path(2)
    records, facts = read_behavior(path), read_run_facts(path)
    for record in records:
        record["noise"]["rollout"] = 7
    write_behavior(path, records, facts)
    assert rescore(changed.path).largest > 1e-3


def test_a_rollout_without_its_adapter_is_refused(changed):
    shutil.rmtree(changed.adapter_path(2))
    with pytest.raises(RunFolderError, match=r"was not kept.*one of the rollouts 0, 1"):
        rescore(changed.path, rollout=2)
    assert rescore(changed.path).rollout == 1


def test_another_adapter_is_refused(changed):
    shutil.rmtree(changed.adapter_path(2))
    shutil.copytree(changed.adapter_path(1), changed.adapter_path(2))
    with pytest.raises(ConfigError, match="adapter is not what the record was made with"):
        rescore(changed.path, rollout=2)


def test_another_base_is_refused(run):
    with pytest.raises(ConfigError, match="base weights are not what the record was made with"):
        rescore(run.path, ["quant.format=bf16"])


def test_a_rollout_that_was_not_recorded_is_refused(run):
    with pytest.raises(RunFolderError, match=r"no record of rollout 3; .*one of the rollouts 0, 1, 2"):
        rescore(run.path, rollout=3)
    with pytest.raises(RunFolderError, match=r"no record of step 4; .*one of the steps 1, 2, 3"):
        rescore(run.path, step=4)


def test_the_command_prints_a_verdict(run):
    printed = CliRunner().invoke(app, ["rescore", str(run.path), "--step", "3", "--rows", "0-1"])
    assert printed.exit_code == 0, printed.output
    for word in ("rollout    2 (step 3), 2 answers", "scope response", "tolerance  largest 0.0001", "within tolerance"):
        assert word in printed.stdout


def test_answers_of_the_plain_base_need_no_adapter(data, tmp_path):
    out = tmp_path / "samples"
    arguments = ["rollout", "demo", f"--data={data}", "--n=2", "--limit=3", f"--out={out}", "model.dtype=float32"]
    result = CliRunner().invoke(app, [*arguments, "rollout.max_prompt_tokens=96", "rollout.max_new_tokens=16"])
    assert result.exit_code == 0, result.output
    found = rescore(out)
    assert found.within and found.rows == 6 and found.noise == "none"
