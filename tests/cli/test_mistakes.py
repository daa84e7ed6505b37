"""Mistakes that a user can make on the command line: one message, exit code 2, nothing written, no work done in vain."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_calls import SMALL, ok, qerl, refused

from qerl.data.synthetic import arithmetic_problems
from qerl.errors import DataError
from qerl.eval.files import read_evaluations
from qerl.model.checkpoint import resolve_model_path
from qerl.train import deployment

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def rows(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    problems = arithmetic_problems("train", 6)
    path.write_text("".join(json.dumps({"question": p.question, "answer": p.answer}) + "\n" for p in problems))
    return path


def small(rows: Path, tmp_path: Path, *more: str) -> list[str]:
    return [*SMALL, f"data.train={rows}", f"data.eval={rows}", f"run.dir={tmp_path / 'runs'}", *more]


def edited_model(tmp_path: Path, file: str, **changes: object) -> Path:
    """The packaged model with keys of one of its JSON files changed."""
    folder = tmp_path / "model"
    if not folder.exists():
        shutil.copytree(resolve_model_path("demo"), folder)
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


HIDING = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\nHello<|im_end|>\\n' }}{% endfor %}"


@pytest.mark.parametrize("verb", ["train", "train --dry-run", "eval", "rollout", "validate"])
@pytest.mark.parametrize("count", [6, 1])
def test_a_template_that_hides_the_question_is_refused_by_every_verb(tmp_path, rows, verb, count):
    rows.write_text("".join(line + "\n" for line in rows.read_text().splitlines()[:count]))
    model = edited_model(tmp_path, "tokenizer_config.json", chat_template=HIDING)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    settings = small(rows, tmp_path, f"model.path={model}")
    name, *flags = verb.split()
    target = {"eval": [model], "rollout": [model, "--out", tmp_path / "out"]}.get(name, [])
    if target:
        settings = [setting for setting in settings if not setting.startswith("model.path=")]
    text = refused(name, *target, *settings, *flags)
    assert "the chat template hides the question" in text
    assert not (tmp_path / "out").exists() and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["two", [2, "x"], 2.5, {"id": 2}, True, -1])
def test_an_end_token_that_is_no_number_is_named_with_its_file(tmp_path, rows, file, value):
    model = edited_model(tmp_path, file, eos_token_id=value)
    text = refused("train", *small(rows, tmp_path), f"model.path={model}")
    assert f"{file}: eos_token_id is unusable; got {value!r}" in text


@pytest.mark.parametrize(
    ("line", "piece"),
    [
        ('{"question": "half \\ud800?", "answer": "2"}', "holds half a character"),
        ('{"question": "1 + 1?", "answer": "2", "note": ["\\udc00"]}', "holds half a character"),
        ('{"question": "1 + 1?", "answer": "2", "question": "2 + 2?"}', "the key 'question' is there twice"),
        ('{"question": "1 + 1?", "answer": "2", "meta": {"a": 1, "a": 2}}', "the key 'a' is there twice"),
        ('{"question": "1 + 1?", "answer": ""}', "the answer in field 'answer' is empty"),
        ('{"question": "1 + 1?", "answer": " \\n"}', "the answer in field 'answer' is empty"),
    ],
)
def test_lines_that_cannot_be_meant_are_named(tmp_path, rows, line, piece):
    count = len(rows.read_text().splitlines())
    rows.write_text(rows.read_text() + line + "\n")
    text = refused("train", *small(rows, tmp_path))
    assert f"{rows}:{count + 1}" in text and piece in text


def test_whole_surrogate_pairs_are_fine(tmp_path, rows):
    rows.write_text('{"question": "How many \\ud83d\\ude00?", "answer": "2"}\n' + rows.read_text())
    ok("train", *small(rows, tmp_path), "--dry-run")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../up", "a\\b", " a", "a ", "a\nb", "/abs"])
def test_a_run_name_is_one_folder(tmp_path, rows, name):
    assert "is no name of a folder" in refused("train", *small(rows, tmp_path), f"run.name={name!r}")


@pytest.mark.parametrize(
    ("setting", "piece"),
    [
        ("quant.overrides.layers.9.*=bf16", "a pattern in quant.overrides matches no projection"),
        ("quant.overrides.layers.0.self_attn.q_proj=bf16", "projections that are held as one weight"),
        ("lora.targets=[]", "lora.targets matches nothing in the model"),
        ("log.backends=[jsonl,tensorbord]", "Did you mean tensorboard?"),
        ("diagnostics.probe=no-such-probe.json", "the probe set cannot be read"),
        ("data.train=no-such-data", "there is no data set 'no-such-data'"),
        ("data.eval=no-such-data", "there is no data set 'no-such-data'"),
        ("data.prompt_template=hello", "no place for the question"),
        ("reward.functions=[accurcy]", "there is no such reward function"),
        ("rollout.max_prompt_tokens=300", "exceeds the model's positions"),
        ("run.name=" + "n" * 300, "cannot be written; got File name too long"),
    ],
)
def test_a_dry_run_finds_what_needs_no_weights(tmp_path, rows, setting, piece, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    monkeypatch.setattr("qerl.model.checkpoint.load_model", lambda *_, **__: pytest.fail("weights were read"))
    assert piece in refused("train", *small(rows, tmp_path), setting, "--dry-run")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=["train", "dry run"])
@pytest.mark.parametrize(
    ("setting", "module", "piece"),
    [
        ("optim.name=adamw_8bit", "bitsandbytes.optim", "got no bitsandbytes. pip install bitsandbytes"),
        ("log.backends=[jsonl,wandb]", "wandb", "wandb"),
    ],
)
def test_a_missing_package_is_found_before_weights_are_read(
    tmp_path, rows, setting, module, piece, options, monkeypatch
):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    monkeypatch.setattr("qerl.train.session.load_model", lambda *_, **__: pytest.fail("weights were read"))
    text = refused("train", *small(rows, tmp_path), setting, *options)
    assert piece in text and "not installed" in text
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "piece"),
    [
        (("lora.rank=100000",), "lora.rank=100000 exceeds the model's width"),
        (("rollout.prompts_per_step=1000000",), "exceeds the 6 training prompts"),
        (("rollout.prompts_per_step=100000",), "A step samples 800,000 answers"),
        (("train.steps=10000000",), "passes over the 6 training prompts"),
        (("rollout.max_new_tokens=1",), "leaves room for a word or two"),
    ],
)
def test_absurd_sizes_are_remarked_on(tmp_path, rows, settings, piece):
    assert piece in " ".join(ok("train", *small(rows, tmp_path, *settings), "--dry-run").split())


def test_sensible_sizes_are_not_remarked_on(tmp_path, rows):
    text = ok("train", *small(rows, tmp_path, "rollout.prompts_per_step=4"), "--dry-run")
    assert "warning" not in text and "training prompts" in text


def test_outputs_are_checked_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr("qerl.train.deployment.choose_targets", lambda *_, **__: pytest.fail("work began"))
    monkeypatch.setattr("qerl.report.html.write_report", lambda *_, **__: pytest.fail("work began"))
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder.json").mkdir()
    for verb, target, name in (("eval", "demo", "out.json"), ("report", "runs/demo", "out.html")):
        for out, piece in (
            (tmp_path / "folder.json", "is a folder; expected the name of a file"),
            (tmp_path / "file" / name, "is not a folder. Choose a place"),
            (tmp_path / ("n" * 300 + ".json"), "cannot be written; got File name too long"),
            (Path("/proc/none") / name, "cannot be written"),
        ):
            assert piece in refused(verb, target, "--out", out), (verb, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.json"]


@pytest.mark.parametrize("verb", ["quantize", "export"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, verb):
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file" / "below", Path("/proc/none"), tmp_path / ("n" * 300)):
        assert "cannot be written" in refused(verb, "demo", "--out", out)


@pytest.mark.parametrize("out", [".", "..", ""])
def test_a_folder_without_a_name_of_its_own_is_there_already(tmp_path, monkeypatch, out):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "exists already; got ." in refused("quantize", "demo", "--out", out)
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


def test_only_a_plan_is_said_to_need_no_weights(tmp_path):
    nowhere = tmp_path / "runs" / "nope"
    alone = "its config.json alone is enough"
    assert alone in refused("plan", f"model.path={nowhere}", "--gpu", "24GB")
    assert alone not in refused("eval", nowhere)
    assert alone not in refused("train", f"model.path={nowhere}", "data.train=arithmetic")


def test_places_in_data_are_shown_as_they_are(tmp_path):
    """To rich, ``:100:`` and ``:train:`` are names of pictures."""
    data = tmp_path / "data.jsonl"
    data.write_text(99 * '{"question": "1+1", "answer": "2"}\n' + '{"question": "1+1"}\n')
    assert f"{data}:100: the row has no field 'answer'" in refused("eval", "demo", "--data", data)
    assert "arithmetic:train:1: the row has no field" in refused(
        "train", "model.path=demo", "data.train=arithmetic", "data.answer_key=x", f"run.dir={tmp_path}"
    )


@pytest.mark.parametrize("options", [(), ("--merge",)])
def test_export_of_what_is_no_run_and_no_adapter_says_what_it_takes(tmp_path, options):
    for source in (tmp_path, tmp_path / "nothing", "demo"):
        text = refused("export", source, "--out", tmp_path / "out", *options)
        assert f"there is no run and no adapter here; got {source}" in text and "the folder of a run, such as" in text


def test_a_folder_for_samples_is_checked_before_any_work(tmp_path, rows, monkeypatch):
    monkeypatch.setattr("qerl.train.standalone.open_target", lambda *_: pytest.fail("work began"))
    out = tmp_path / "samples"
    out.write_text("x")
    assert "is a file; expected the name of a folder" in refused("rollout", "demo", "--data", rows, "--out", out)
    out.unlink()
    out.mkdir()
    (out / "config.resolved.yaml").write_text("")
    text = refused("rollout", "demo", "--data", rows, "--out", out)
    assert "already holds a run" in text and "Choose another --out" in text and "--resume" not in text


def test_a_finished_and_an_unfinished_run_have_remedies_of_their_own(tmp_path, rows):
    run = tmp_path / "runs" / "run"
    (run / "checkpoints" / "checkpoint-5").mkdir(parents=True)
    (run / "config.resolved.yaml").write_text("")
    assert "Continue it with --resume, choose another run.name" in refused("train", *small(rows, tmp_path))
    (run / "summary.json").write_text('{"status": "finished"}')
    assert "make it longer with --resume and a larger train.steps" in refused("train", *small(rows, tmp_path))
    (run / "summary.json").write_text('{"status": "interrupted"}')
    assert "Continue it with --resume, choose another run.name" in refused("train", *small(rows, tmp_path))


def test_options_that_contradict_or_do_nothing_are_refused(tmp_path):
    text = refused("rollout", "demo", "--base", "--checkpoint", "3", "--out", tmp_path / "x")
    assert "--base leaves the adapter out, and --checkpoint chooses one; got --base --checkpoint 3" in text
    out = tmp_path / "packed"
    for more in (("--method", "rtn"), ()):
        text = refused("quantize", "demo", "--out", out, "--calibration", "arithmetic", *more)
        assert "--calibration does nothing for the method rtn" in text and "awq" in text
    assert not out.exists()


def test_messages_about_data_name_the_built_in_set(tmp_path):
    for text in (
        refused("eval", "demo"),
        refused("rollout", "demo", "--out", tmp_path / "x"),
        refused("train", "model.path=demo"),
    ):
        assert "arithmetic" in text


def test_a_model_with_few_positions_is_evaluated_without_length_settings(rows):
    result = qerl("eval", "demo", "--data", rows, "--limit", "2", "model.dtype=float32")
    assert result.exit_code == 0, result.output
    notes = " ".join(result.stderr.split())
    assert (
        "The model has 256 positions: rollout.max_prompt_tokens=85 (default 512) and rollout.max_new_tokens=171"
        in notes
    )
    assert "taken unquantized (bf16), as it is stored; add quant.format=nvfp4" in notes
    assert "(bf16 base)" in result.stdout
    text = refused("eval", "demo", "--data", rows, "rollout.max_new_tokens=300")
    assert "exceeds the model's positions; got 301" in text or "exceeds the model's positions" in text
    quantized = qerl("eval", "demo", "--data", rows, "--limit", "2", "model.dtype=float32", "quant.format=nvfp4")
    assert "unquantized" not in quantized.stderr and "(nvfp4 base)" in quantized.stdout


def test_what_has_been_measured_is_there_when_a_later_suite_fails(tmp_path, rows, monkeypatch):
    real, made = deployment.evaluate, []

    def evaluate(*arguments, **keywords):
        if made:
            raise DataError("the second suite fails")
        made.append(real(*arguments, **keywords))
        return made[0]

    monkeypatch.setattr(deployment, "evaluate", evaluate)
    other = tmp_path / "other.jsonl"
    other.write_text(rows.read_text())
    result = qerl(
        "eval", "demo", "--data", f"{rows},{other}", "--limit", "2", "--out", tmp_path / "out", "model.dtype=float32"
    )
    assert result.exit_code == 2 and f"{rows.stem}, base: accuracy" in " ".join(result.stderr.split())
    (stored,) = read_evaluations(tmp_path / "out" / f"{rows.stem}--base.parquet")
    assert [row["id"] for row in stored.rows] == [row["id"] for row in made[0].rows]


def test_lengths_that_are_set_stay_and_the_others_take_what_is_left(tmp_path, rows):
    base = ["model.path=demo", "model.dtype=float32", f"data.train={rows}", f"run.dir={tmp_path}"]
    text = ok("train", *base, "rollout.max_new_tokens=200", "--dry-run")
    assert "max_prompt_tokens: 56" in text and "max_new_tokens: 200" in text
    text = ok("train", *base, "rollout.max_prompt_tokens=100", "--dry-run")
    assert "max_prompt_tokens: 100" in text and "max_new_tokens: 156" in text
    text = ok("train", *base, "eval.max_new_tokens=220", "--dry-run")
    assert "max_prompt_tokens: 36" in text and "max_new_tokens: 220" in text
    text = refused("train", *base, "reward.overlong.enabled=true", "--dry-run")
    assert "reward.overlong.buffer_tokens must be smaller" in text


def test_rollouts_take_the_group_size_unless_told_otherwise(tmp_path, rows):
    arguments = ("rollout", "demo", *SMALL[1:], "--data", rows, "--limit", "2", "rollout.group_size=3")
    assert "6, accuracy" in ok(*arguments, "--out", tmp_path / "a")
    assert "4, accuracy" in ok(*arguments, "--out", tmp_path / "b", "--n", "2")


def test_env_says_what_a_configuration_would_use(monkeypatch):
    monkeypatch.chdir(ROOT)
    text = ok("env", "configs/demo.yaml", "model.device=cpu", "quant.format=nf4")
    assert "would_use: " in text and "device cpu" in text and "base nf4" in text and "demo (qwen2, " in text
    facts = json.loads(ok("env", "model.path=demo", "--json"))["would_use"]
    assert facts["dtype"] == "bfloat16" and "fp4_linear=" in facts["kernels"] and facts["train data"] is None
    assert "would_use" not in json.loads(ok("env", "--json"))
    assert "no-such-model" in refused("env", "model.path=no-such-model")


def test_report_takes_the_configuration_of_a_run(tmp_path):
    for arguments in (
        (f"run.dir={tmp_path}", "run.name=x"),
        ("configs/demo.yaml", f"run.dir={tmp_path}", "run.name=x"),
    ):
        if arguments[0].endswith(".yaml"):
            arguments = (str(ROOT / arguments[0]), *arguments[1:])
        assert f"there is no such run folder; got {tmp_path}/x" in refused("report", *arguments)
    assert "no settings" in refused("report", tmp_path, "run.name=x")
