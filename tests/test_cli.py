"""The command line: what each verb prints and writes, and how mistakes end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_calls import SMALL, ok, qerl, refused

from qerl.data.synthetic import arithmetic_problems
from qerl.errors import RunStopped
from qerl.metrics.behavior import read_behavior
from qerl.metrics.run_dir import RunDir
from qerl.model.checkpoint import resolve_model_path

VERBS = ("train", "eval", "rollout", "quantize", "report", "watch", "export", "validate", "rescore", "env")
ROOT = Path(__file__).resolve().parents[1]
TINY_RUN = (
    *SMALL,
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "lora.rank=2",
    "train.steps=2",
    "train.save_every=1",
    "run.name=tiny",
)


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory) -> tuple[str, ...]:
    """Settings of a run of seconds: few rows, so that little is rendered and tokenized."""
    folder = tmp_path_factory.mktemp("runs")
    rows = [{"question": problem.question, "answer": problem.answer} for problem in arithmetic_problems("train", 16)]
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (*TINY_RUN, f"data.train={data}", f"run.dir={folder}")


@pytest.fixture(scope="module")
def run_folder(tiny_run) -> Path:
    """The folder of one finished run."""
    ok("train", *tiny_run)
    return Path(tiny_run[-1].removeprefix("run.dir=")) / "tiny"


def test_help_lists_the_verbs_and_each_verb_has_examples():
    text = ok("--help")
    for verb in VERBS:
        assert verb in text
        shown = ok(verb, "--help")
        assert verb == "env" or f"qerl {verb} " in shown


def test_a_mistake_ends_in_a_message_on_stderr_and_exit_code_2():
    result = subprocess.run(
        [sys.executable, "-m", "qerl", "train", "configs/demo.yaml", "rollout.tempurature=1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        "error: unknown key rollout.tempurature (command line); got value 1. Did you mean rollout.temperature?\n"
    )


@pytest.mark.parametrize(
    ("arguments", "pieces"),
    [
        (("train", "configs/demo.yam"), ("configs/demo.yam does not exist", "Did you mean configs/demo.yaml?")),
        (("train", "configs/demo.yaml", "other.yaml"), ("more than one configuration file", "other.yaml")),
        (("train",), ("data.train is not set",)),
        (("train", "data.train=arithmetic"), ("model.path is not set",)),
        (("train", "model.path=demo", "rollout.temperature=0", "data.train=arithmetic"), ("rollout.temperature=0",)),
        (("train", *SMALL, "rollout.prompts_per_step=6", "optim.updates_per_rollout=4"), ("6", "multiple of 4")),
        (("train", *SMALL, "model.path=no-such-model"), ("no-such-model",)),
        (("train", *SMALL, "data.train=arithmetik"), ("arithmetik", "arithmetic")),
        (("train", *SMALL, "model.device=tpu"), ("model.device is not a device; got tpu",)),
        (("eval", "demo", *SMALL[1:], "data.eval=null"), ("there is no evaluation data", "--data")),
        (("eval", "demo", *SMALL[1:], "--samples", "2"), ("eval.samples=2", "eval.temperature above 0")),
        (("eval", "demo", *SMALL[1:], "--checkpoint", "3"), ("--checkpoint and --base belong to a run folder",)),
        (("eval", "demo", *SMALL[1:], "eval.noise=true"), ("no policy here was trained with any", "--sigma 0.01")),
        (("eval", "demo", *SMALL[1:], "--sigma", "0.1"), ("--sigma sets the level of --noise",)),
        (
            ("eval", "demo", *SMALL[1:], "--noise", "1", "--sigma", "inf"),
            ("no level of noise; got inf; expected a finite",),
        ),
        (("eval", "--compare", "demo"), ("--compare takes two evaluations",)),
        (("eval", "--compare", "a", "b", "--limit", "3", "--base"), ("made already; got --base --limit",)),
        (("export", "runs", "--out", "new", "--weights", "trained"), ("what --merge adds the adapter to",)),
        (("export", "runs", "--out", "new", "--merge", "--base-name", "a/b"), ("a merged model has no base",)),
        (("export", "runs", "--out", "new", "--base", "demo"), ("what --merge starts from",)),
        (("eval", "--compare", "demo", "demo"), ("there is no evaluation here", "qerl eval --out")),
        (("report", "no/such/run"), ("no/such/run",)),
        (("quantize", "demo", "--out", "x", "--format", "nvpf4"), ("got 'nvpf4'", "Did you mean nvfp4?")),
        (("train", "configs/demo.yaml", "--optim.lr=1e-4"), ("got --optim.lr", "Write optim.lr=VALUE")),
        (("train", "configs/demo.yaml", "--learning-rate", "1e-4"), ("got --learning-rate", "Write optim.lr=VALUE")),
        (("train", "--quant.overrides.layers.0.*=bf16"), ("Write quant.overrides.layers.0.*=VALUE",)),
        (("train", "configs/demo.yaml", "run.name=\udcff"), ("run.name holds what is no text", "UTF-8")),
        (("train", 300 * "x" + ".yaml"), ("a path is too long", "305 characters")),
        (("plan", "/dev/null"), ("/dev/null is no regular file",)),
        (("help",), ("there is no such command; got help", "qerl --help")),
        (("train", "configs/demo.yaml", "--name", "a"), ("got --name", "optim.name=VALUE or run.name=VALUE")),
        (("matrix", "configs/matrix/ranks.yaml", "--seed", "1"), ("got --seed", "Write train.seed=VALUE")),
        (("eval", "demo", "--rollout.temprature", "1"), ("--rollout.temprature", "Write rollout.temperature=VALUE")),
        (("trian", "configs/demo.yaml"), ("there is no such command; got trian", "validate", "Did you mean train?")),
        (("chat", "runs/demo"), ("there is no such command; got chat", "qerl export")),
    ],
)
def test_mistakes_are_refused_in_words(arguments, pieces, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "datasets", None)  # where it is installed, an unknown name is asked for on the hub
    text = refused(*arguments)
    for piece in pieces:
        assert piece in text


def test_data_mistakes_name_file_and_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "2"}\n{"question": \n')
    assert f"{file}:2" in refused("train", *SMALL, f"data.train={file}", f"run.dir={tmp_path}")
    file.write_text("")
    assert "empty data set" in refused("train", *SMALL, f"data.train={file}", f"run.dir={tmp_path}")
    file.write_text('{"query": "1 + 1?", "answer": "2"}\n')
    assert "no field 'question'" in refused("train", *SMALL, f"data.train={file}", f"run.dir={tmp_path}")
    assert not (tmp_path / "run").exists(), "nothing is written before everything is known good"


def test_a_truncated_weight_file_is_named(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(resolve_model_path("demo"), model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    text = refused("train", *SMALL, f"model.path={model}", f"run.dir={tmp_path}")
    assert "model.safetensors" in text


def test_dry_run_prints_the_plan_and_writes_nothing(tiny_run, tmp_path):
    text = ok("train", *tiny_run, f"run.dir={tmp_path}", "--dry-run")
    # What is looked for stands last, where a terminal shows it.
    assert text.index("denominator: behavior") < text.index("training prompts") < text.index("base_weights")
    assert list(tmp_path.iterdir()) == []


def test_train_writes_the_run_folder_and_refuses_it_the_second_time(run_folder, tiny_run):
    run = RunDir.open(run_folder)
    assert [row["step"] for row in run.read_metrics()] == [0, 1, 2]
    assert [step for step, _ in run.checkpoints()] == [1, 2]
    for path in (run.config_path, run.env_path, run.summary_path, run.memory_path, run.report_path):
        assert path.is_file(), path
    assert "already holds a run" in refused("train", *tiny_run)
    assert "the run is complete" in refused("train", *tiny_run, "--resume")
    changed = refused("train", *tiny_run, "optim.lr=1e-3", "--resume")
    assert "optim.lr" in changed


def test_the_demo_recipe_runs_from_a_relative_folder(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = next(setting for setting in tiny_run if setting.startswith("data.train="))
    small = ("train.steps=1", "rollout.prompts_per_step=2", "rollout.group_size=2", "data.eval_limit=4", data)
    ok("train", ROOT / "configs" / "demo.yaml", *small, "log.progress=plain")
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
    assert (tmp_path / "runs" / "demo" / "config.resolved.yaml").is_file()
    assert not (tmp_path / "runs" / "demo" / "runs").exists()


def test_eval_of_a_run_uses_its_newest_checkpoint_and_agrees_with_the_run(run_folder, tmp_path):
    out = tmp_path / "eval.json"
    text = ok("eval", run_folder, "--out", out)
    assert "checkpoint-2" in text
    assert "95% interval" in text
    saved = json.loads(out.read_text())
    after = RunDir.open(run_folder).read_json("summary.json")["evaluation"]["after"]
    assert saved["accuracy"] == after["accuracy"]
    assert saved["mean_length"] == after["mean_length"]
    assert len(saved["rows"]) == saved["count"] == 8


def test_eval_of_the_base_agrees_with_the_run_before_training(run_folder, tmp_path):
    out = tmp_path / "eval.json"
    arguments = ("eval", run_folder, "--base", "--out", out)
    assert "base without adapter" in ok(*arguments)
    before = RunDir.open(run_folder).read_json("summary.json")["evaluation"]["before"]
    saved = out.read_text()
    assert json.loads(saved)["accuracy"] == before["accuracy"]
    assert "the file to write exists already" in refused(*arguments)
    assert out.read_text() == saved


def test_eval_takes_a_checkpoint_as_adapter_of_a_model(run_folder, tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    adapter = RunDir(run_folder).checkpoint(1)
    ok("eval", "demo", *SMALL[1:], "quant.format=nvfp4", "--adapter", adapter, "--out", first)
    ok("eval", run_folder, "--checkpoint", "1", "--out", second)
    same = ("accuracy", "mean_length", "rows")
    assert [json.loads(first.read_text())[key] for key in same] == [json.loads(second.read_text())[key] for key in same]


def test_eval_of_a_run_refuses_what_does_not_go_with_it(run_folder):
    text = refused("eval", run_folder, "--checkpoint", "7")
    assert "a step of 1, 2" in text
    assert "brings its own configuration" in refused("eval", run_folder, "configs/demo.yaml")


def test_eval_measures_suites_and_checkpoints_in_one_go_and_compares_what_it_wrote(run_folder, tiny_run, tmp_path):
    train = [setting for setting in tiny_run if setting.startswith("data.train=")][-1].partition("=")[2]
    text = ok(
        "eval", run_folder, "--base", "--checkpoint", "all", "--data", f"arithmetic,{train}", "--out", tmp_path / "e"
    )
    rows = [line.split()[:2] for line in text.splitlines() if line.startswith(("arithmetic ", "train "))]
    assert rows == [
        [suite, policy] for policy in ("base", "checkpoint-1", "checkpoint-2") for suite in ("arithmetic", "train")
    ]
    assert "mean" not in text
    assert text.count("McNemar") == 4
    files = sorted(path.name for path in (tmp_path / "e").glob("*.parquet"))
    assert len(files) == 6
    text = ok(
        *("eval", "--compare", tmp_path / "e" / "train--base.parquet", tmp_path / "e" / "train--checkpoint-2.parquet"),
        *("--out", tmp_path / "difference.json"),
    )
    assert "train: checkpoint-2 against base" in text
    (found,) = json.loads((tmp_path / "difference.json").read_text())
    assert found["low"] <= found["difference"] <= found["high"]
    assert "after step 2 against" in ok("eval", "--compare", f"{run_folder}:0", run_folder)
    assert "same questions" in refused("eval", "--compare", run_folder, tmp_path / "e" / "train--base.parquet")
    # Nothing of it is replaced by another evaluation, nor, were it cut short, by the same one.
    for again in (("demo",), ("--compare", f"{run_folder}:0", run_folder)):
        out = tmp_path / "e" / ("evaluation.json" if "--compare" in again else "")
        assert "lready" in refused("eval", *again, "--out", out)
    (tmp_path / "e" / "evaluation.json").unlink()
    assert "already holds an evaluation" in refused("eval", "demo", "--out", tmp_path / "e")


def test_watch_shows_a_finished_run(run_folder):
    text = ok("watch", run_folder)
    assert "step 2/2" in text
    assert "finished after step 2 of 2" in text
    assert "no such run folder" in refused("watch", run_folder.parent / "nothing")


def test_export_writes_an_adapter_or_a_whole_model(run_folder, tmp_path):
    result = qerl("export", run_folder, "--out", tmp_path / "adapter", "--checkpoint", "1")
    assert result.exit_code == 0
    assert "vLLM refuses" in result.stderr
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    result = qerl("export", run_folder, "--merge", "--out", tmp_path / "plain")
    assert "another policy" in result.stderr
    assert "into the plain weights" in result.stdout
    text = ok("export", run_folder, "--merge", "--weights", "trained", "--out", tmp_path / "model")
    assert "14 projections, 4 norms into the dequantized nvfp4 weights" in text
    assert "(bf16 base)" in ok("eval", tmp_path / "model", *SMALL[1:], "--limit", "2")
    assert "into the plain weights" in ok(
        "export", tmp_path / "adapter", "--merge", "--base", "demo", "--out", tmp_path / "again"
    )
    assert "exists already" in refused("export", run_folder, "--out", tmp_path / "model")
    assert "Give the run folder" in refused(
        *("export", tmp_path / "adapter", "--merge", "--weights", "trained", "--base", "demo", "--out", tmp_path / "x")
    )


def test_a_bare_model_is_taken_as_it_is_stored():
    assert "(bf16 base)" in ok("eval", "demo", *SMALL[1:], "--limit", "2")


def test_rollout_writes_one_record_an_answer(tmp_path):
    out = tmp_path / "samples"
    arguments = ("rollout", "demo", *SMALL[1:], "--n", "3", "--limit", "2", "--data", "arithmetic:test", "--out", out)
    text = ok(*arguments)
    assert "tokens/s" in text
    rows = read_behavior(RunDir(out).rollout_path(0))
    assert [row["sample_key"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert len({row["prompt_id"] for row in rows}) == 2
    assert all(row["noise"] is None and row["sampling"]["stream"] == "standalone" for row in rows)
    assert "already holds a run" in refused(*arguments)


def test_quantize_writes_a_checkpoint_that_evaluates_as_the_quantized_model(tmp_path):
    ok("quantize", "demo", "--out", tmp_path / "packed")
    at_load, stored = tmp_path / "a.json", tmp_path / "b.json"
    ok("eval", "demo", *SMALL[1:], "quant.format=nvfp4", "--out", at_load)
    assert "(nvfp4 base)" in ok("eval", tmp_path / "packed", *SMALL[1:], "--out", stored)
    assert json.loads(at_load.read_text())["rows"] == json.loads(stored.read_text())["rows"]


def test_report_can_be_made_again_elsewhere(run_folder, tmp_path):
    out = tmp_path / "page.html"
    assert str(out) in ok("report", run_folder, "--out", out)
    assert "<html" in out.read_text()


def test_env_is_text_or_json():
    assert "torch 2" in ok("env")
    facts = json.loads(ok("env", "--json"))
    assert facts["versions"]["torch"]
    assert facts["cpu"]["usable"] >= 1


def test_train_hands_over_configuration_and_resume(monkeypatch):
    seen = {}
    monkeypatch.setattr("qerl.train.run.train", lambda config, *, resume: seen.update(config=config, resume=resume))
    ok("train", ROOT / "configs" / "demo.yaml", "optim.lr=1e-4", "--resume")
    assert seen["config"].optim.lr == 1e-4
    assert seen["config"].run.name == "demo"
    assert seen["resume"] is True


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        (KeyboardInterrupt(), 130, "interrupted before the first step; nothing was changed"),
        (RunStopped("stopped; --resume goes on", signal.SIGINT), 130, "stopped; --resume goes on"),
        (RunStopped("stopped; --resume goes on", signal.SIGTERM), 143, "stopped; --resume goes on"),
    ],
)
def test_a_stop_has_an_exit_code_of_its_own_and_says_how_to_go_on(monkeypatch, raised, code, text):
    def stopped(config, *, resume):
        raise raised

    monkeypatch.setattr("qerl.train.run.train", stopped)
    result = qerl("train", ROOT / "configs" / "demo.yaml")
    assert result.exit_code == code
    assert text in result.stderr


@pytest.mark.parametrize("cc", [None, "false"])
def test_a_machine_without_a_c_compiler_is_told_what_to_install(monkeypatch, cc):
    build = pytest.importorskip("triton.runtime.build")
    monkeypatch.setenv("PATH", "/nowhere" if cc is None else os.environ["PATH"])
    monkeypatch.delenv("CC", raising=False)
    if cc is not None:
        monkeypatch.setenv("CC", cc)

    def compiles(*_, **__):
        build.compile_module_from_src(f"/* {cc} is never in a cache: {time.time()} */", "launcher")

    monkeypatch.setattr("qerl.train.run.train", compiles)
    text = refused("train", *SMALL, "model.path=demo")
    assert "exit code 1 of false" in text if cc else "no gcc or clang" in text
    assert "apt install gcc python3-dev" in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_results_that_cannot_be_printed_end_in_a_message():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "qerl", "env"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert "the output cannot be written" in done.stderr and "Traceback" not in done.stderr


def test_a_command_without_outputs_does_its_work(run_folder):
    """As services start it: Python has None in place of what is closed, and the next file would get its number."""
    say = "import sys; sys.exit(0 if sys.stdout is None else 3)"
    command = f'"{sys.executable}" -c "{say}" >&- && exec "{sys.executable}" -m qerl watch "{run_folder}" --once >&-'
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_configuration_file_behind_an_option_is_told_of():
    text = refused("train", "--config", "configs/demo.yaml")
    assert "the configuration file has no option before it; got --config. Write its path alone" in text


def test_an_option_that_is_no_setting_either_is_left_to_the_parser():
    # Verbs that take no settings are told of none.
    no_settings = (("results", "runs/demo", "--name", "x"), ("export", "runs/demo", "--output-dir", "x"))
    for arguments in (
        ("eval", "demo", "--limt", "3"),
        ("eval", "demo", "--temperature"),
        ("train", "demo.yaml", "--optim.foo", "3"),
        *no_settings,
    ):
        result = qerl(*arguments)
        assert result.exit_code == 2 and "VALUE" not in result.output and arguments[2] in result.output


def test_a_run_that_is_not_there_is_called_a_run_too():
    assert "there is no such run, and no such model; got runs/nope" in refused("eval", "runs/nope")


def test_help_of_the_benchmarks_lists_them():
    result = qerl("bench", "--help")
    assert result.exit_code == 0 and "kernels, rollout, step" in " ".join(result.output.split())
