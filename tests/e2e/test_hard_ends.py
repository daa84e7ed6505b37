"""Runs that end early or start twice: what is kept, what is refused, and which exit code tells of it."""

import gc
import json
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qerl.config.load import load_config
from qerl.data.synthetic import arithmetic_problems
from qerl.errors import CheckpointError, DataError, OutputError, RunFolderError, RunStopped, TrainingError
from qerl.metrics.catalogue import is_reproducible
from qerl.metrics.run_dir import RunDir
from qerl.metrics.run_lock import RunLock
from qerl.train import loop
from qerl.train.optimizer import make_optimizer
from qerl.train.resume import load_checkpoint
from qerl.train.run import lost, train
from qerl.train.session import open_session

pytestmark = pytest.mark.usefixtures("blank_reports")

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    "model.path=demo",
    "model.dtype=float32",
    "data.eval_limit=8",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.max_prompt_tokens=96",
    "rollout.max_new_tokens=24",
    "lora.rank=2",
    "train.steps=3",
    "train.save_every=1",
    "eval.every=0",
    "eval.before=false",
    "log.progress=off",
    "diagnostics.every=0",
    "diagnostics.canary=false",
)


HOLD = """
import sys, pathlib
from qerl.metrics.run_lock import RunLock
with RunLock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "test"):
        write_rows(folder / f"{split}.jsonl", [asdict(problem) for problem in arithmetic_problems(split, 16)])
    return folder


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def arguments(tmp_path, data, *settings, name="run"):
    return [*SETTINGS, f"data.train={data}", f"data.eval={data}", f"run.dir={tmp_path}", f"run.name={name}", *settings]


@pytest.fixture
def run(tmp_path, data):
    def start(*settings, resume=False, stop_after=None, name="run"):
        config = load_config(None, arguments(tmp_path, data, *settings, name=name))
        return RunDir.open(train(config, resume=resume, stop_after=stop_after))

    return start


def process(tmp_path, data, *more, stdout=subprocess.PIPE):
    command = [sys.executable, "-m", "qerl", "train", *arguments(tmp_path, data), *more]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def wait_for(condition, running):
    deadline = time.monotonic() + 120
    while not condition():
        assert running.poll() is None and time.monotonic() < deadline, running.stderr.read()
        time.sleep(0.02)


def test_a_second_process_in_the_folder_is_refused_and_names_the_first(run, tmp_path):
    run(stop_after=1)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            HOLD,
            str(tmp_path / "run"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(RunFolderError, match=f"another process is writing.*process {holder.pid};"):
        run(resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    holder.kill()
    holder.wait()
    assert RunDir(tmp_path / "run").checkpoints()[-1][0] == 1
    assert [row["step"] for row in run(resume=True).read_metrics()] == [1, 2, 3], "a crash leaves no lock"


def test_a_start_in_a_locked_folder_leaves_it_as_it_is(run, tmp_path):
    with RunLock(tmp_path / "run"), pytest.raises(RunFolderError, match=f"process {os.getpid()};"):
        run()
    assert not (tmp_path / "run").exists(), "a folder that was made for the lock alone goes with it"


@pytest.mark.parametrize("fault", ["answer", "question", "eval answer"])
def test_data_that_changed_between_stop_and_resume_is_noticed(run, data, fault):
    run(stop_after=1)
    path = data / ("test.jsonl" if fault.startswith("eval") else "train.jsonl")
    rows = read_rows(path)
    changed = [dict(row) for row in rows]
    if fault.endswith("answer"):
        changed[2]["answer"] = "1" if changed[2]["answer"] != "1" else "2"
    else:
        changed[2]["question"] += " Please."
    write_rows(path, changed)
    with pytest.raises(DataError, match="prompts") as caught:
        run(resume=True)
    assert "Resume with the same data" in str(caught.value) or "Bring back the file" in str(caught.value)
    write_rows(path, rows)
    assert [row["step"] for row in run(resume=True).read_metrics()] == [1, 2, 3]


def test_one_signal_ends_the_run_after_its_step_with_an_exit_code_of_its_own(tmp_path, data):
    running = process(tmp_path, data, "train.steps=500")
    folder = RunDir(tmp_path / "run")
    wait_for(folder.metrics_path.exists, running)
    running.send_signal(signal.SIGTERM)
    _, told = running.communicate(timeout=120)
    assert running.returncode == 143, told
    last = folder.read_metrics()[-1]["step"]
    assert "SIGTERM: stopping after this step, which will be saved; a second signal stops at once and loses " in told
    assert f"stopped by SIGTERM after step {last} of 500, which is saved" in told and "--resume" in told
    assert folder.checkpoints()[-1][0] == last
    assert folder.read_json("summary.json")["status"] == "interrupted" and folder.report_path.exists()


def interrupt_twice() -> None:
    """Ctrl-C and again."""
    gc.disable()  # Python drops what a signal handler raises inside a collector's callback
    try:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    finally:
        gc.enable()


def test_a_second_signal_ends_the_run_at_once_and_says_what_is_lost(run, monkeypatch, capfd):
    real, calls = loop.Trainer.step, []

    def step(self):
        calls.append(1)
        if len(calls) == 2:
            interrupt_twice()
        return real(self)

    monkeypatch.setattr(loop.Trainer, "step", step)
    with pytest.raises(RunStopped, match=r"the running step is lost.*--resume goes on from checkpoint-1") as caught:
        run()
    assert caught.value.exit_code == 130
    told = capfd.readouterr().err
    assert "a second signal stops at once and loses the running step\nSIGINT again: stopping at once" in told
    calls[:] = [1]
    with pytest.raises(RunStopped, match=r"no checkpoint had been written. Delete .*other"):
        run("train.save_every=0", name="other")
    assert "loses the whole run, which has no checkpoint yet" in capfd.readouterr().err
    with pytest.raises(RunFolderError, match="no checkpoint") as caught:
        run("train.save_every=0", name="other")
    assert "--resume" not in str(caught.value) and "Delete" in str(caught.value)


def test_what_stopping_at_once_loses_goes_back_to_the_newest_checkpoint(tmp_path):
    folder = RunDir(tmp_path)
    folder.checkpoint(25).mkdir(parents=True)
    assert (lost(folder, 25), lost(folder, 31)) == ("the running step", "what came after checkpoint-25")


def test_a_second_signal_that_compiled_code_makes_an_error_of_ends_the_run_likewise(run, monkeypatch):
    class Measured:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            interrupt_twice()

    monkeypatch.setattr(loop.Trainer, "step", lambda self: torch.tensor(Measured()))
    with pytest.raises(RunStopped, match="no checkpoint had been written"):
        run()


def test_an_interrupt_before_the_first_step_leaves_nothing_behind(run, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("qerl.train.run.MetricsWriter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(KeyboardInterrupt):
        run()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_a_step_that_takes_long_tells_of_its_rollout_and_its_updates(run, monkeypatch, capsys):
    monkeypatch.setattr("qerl.metrics.console.QUIET_SECONDS", 0.0)
    run("log.progress=plain", "train.steps=1")
    said = capsys.readouterr().out
    assert re.search(r"^step 1, \d+s: \d of 4 answers have ended, \d+ tokens of at most 96$", said, re.MULTILINE)
    assert re.search(r"^step 1, \d+s: update 1 of 1, micro-batch 1 of 1$", said, re.MULTILINE)
    assert re.search(r"^evaluation after, \d+s: \d of 8 answers have ended", said, re.MULTILINE)
    assert said.index("of 4 answers") < said.index("micro-batch 1") < said.index("step 1/1")


def test_training_goes_on_when_nobody_reads_its_output(tmp_path, data):
    reader, writer = os.pipe()
    os.close(reader)
    running = process(tmp_path, data, "log.progress=plain", "train.steps=1", stdout=writer)
    os.close(writer)
    _, told = running.communicate(timeout=180)
    assert running.returncode == 0, told
    assert "Traceback" not in told and "Exception" not in told
    assert RunDir(tmp_path / "run").read_json("summary.json")["status"] == "finished"


def test_a_disk_that_fills_during_a_checkpoint_ends_the_run_in_words_and_leaves_it_whole(run, tmp_path, data):
    whole = run(name="whole")
    sizes = {path.name: path.stat().st_size for path in whole.checkpoint(1).iterdir()}
    largest_other = max(
        path.stat().st_size
        for path in whole.path.rglob("*")
        if path.is_file() and path.name != "optimizer.pt" and path != whole.report_path
    )
    assert sizes["optimizer.pt"] > largest_other, sizes
    run(stop_after=1)
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes["optimizer.pt"] - 1000, previous[1]))
    try:
        with pytest.raises(OutputError, match=r"checkpoint-2 cannot be written.*nothing half-written"):
            run(resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)
    folder = RunDir(tmp_path / "run")
    assert [step for step, _ in folder.checkpoints()] == [1]
    assert not [path for path in folder.path.rglob("*") if ".tmp-" in path.name or path.name.endswith(".part")]
    resumed = [{k: v for k, v in row.items() if is_reproducible(k)} for row in run(resume=True).read_metrics()]
    assert resumed == [{k: v for k, v in row.items() if is_reproducible(k)} for row in whole.read_metrics()]


def test_a_finished_run_can_be_made_longer(run):
    first = run("eval.after=true")
    short = first.read_json("summary.json")
    with pytest.raises(RunFolderError, match=r"--resume train\.steps=N, N above 3"):
        run("eval.after=true", resume=True)
    longer = run("eval.after=true", "train.steps=5", resume=True)
    summary = longer.read_json("summary.json")
    assert [row["step"] for row in longer.read_metrics()] == [1, 2, 3, 4, 5]
    assert (summary["status"], summary["steps"]) == ("finished", 5)
    assert summary["evaluations"]["step 3"] == short["evaluations"]["after"]
    assert summary["evaluations"]["after"]["step"] == 5
    assert any("planned for 3 steps and now goes on to 5" in text for text in summary["warnings"])
    assert load_config(longer.config_path).train.steps == 5
    # The learning rate is that of a run of five steps: warm-up over round(.1 * 5) = 0 updates, then a cosine.
    rates = [row["learning_rate"] for row in longer.read_metrics()]
    whole = [row["learning_rate"] for row in run("train.steps=5", name="whole").read_metrics()]
    assert rates[3:] == whole[3:] and rates[2] != whole[2]


def test_a_run_in_which_nothing_can_be_scored_ends_with_the_reason(run, tmp_path):
    (tmp_path / "rewards.py").write_text("def broken(completions):\n    raise ZeroDivisionError('no divisor')\n")
    broken = f"reward.functions=[{tmp_path}/rewards.py:broken]"
    with pytest.raises(TrainingError, match=r"no answer of the last 2 steps.*ZeroDivisionError: no divisor"):
        run(broken, "reward.max_unscored_steps=2")
    assert [row["step"] for row in RunDir(tmp_path / "run").read_metrics()] == [1, 2]
    with pytest.raises(TrainingError, match="no answer of the last 1 steps"):
        run(broken, "train.steps=1", name="short")
    assert len(run(broken, "reward.max_unscored_steps=0", name="on").read_metrics()) == 3


def test_rewards_of_any_size_do_not_end_a_run(run, tmp_path):
    (tmp_path / "rewards.py").write_text(
        "def huge(completions):\n    return [(-1) ** i * 1e308 for i in range(len(completions))]\n"
        "def large(completions):\n    return [(-1) ** i * 1e30 for i in range(len(completions))]\n"
    )
    rows = run(
        f"reward.functions=[accuracy, '{tmp_path}/rewards.py:huge']",
        "reward.weights=[1, 1]",
        "reward.max_unscored_steps=0",
    ).read_metrics()
    assert all(row["outcomes/unscorable"] == 1.0 for row in rows)
    run(f"reward.functions=['{tmp_path}/rewards.py:large']", name="large")


def test_the_workers_of_rewards_end_with_the_run(run, tmp_path):
    (tmp_path / "rewards.py").write_text(
        f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "def zero(completions):\n    return [0.0] * len(completions)\n"
    )
    run(f"reward.functions=['{tmp_path}/rewards.py:zero']", "train.steps=1")
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_evaluations_during_a_run_resume_to_the_bit(run):
    settings = ("eval.every=1", "eval.before=true", "eval.after=true")
    whole = run(*settings, name="whole")
    run(*settings, stop_after=2, name="parts")
    parts = run(*settings, resume=True, name="parts")
    held_out = [(row["step"], row["eval/accuracy"], row["eval/mean_length"]) for row in whole.read_metrics()]
    assert [step for step, *_ in held_out] == [0, 1, 2, 3]
    assert held_out == [(row["step"], row["eval/accuracy"], row["eval/mean_length"]) for row in parts.read_metrics()]
    evaluations = [run_dir.read_json("summary.json")["evaluations"] for run_dir in (whole, parts)]
    assert evaluations[0] == evaluations[1] and set(evaluations[0]) == {"before", "step 1", "step 2", "after"}
    for step in range(4):
        assert whole.read_evaluation(step) == parts.read_evaluation(step)


def test_garbage_in_the_optimizer_state_is_named(run, tmp_path, data):
    checkpoint = run(stop_after=1).checkpoint(1)
    config = load_config(None, arguments(tmp_path, data))
    model = open_session(config).model
    path = checkpoint / "optimizer.pt"
    good = path.read_bytes()
    broken = [b"", b"garbage", b"\x80\x02ctorch", bytes(range(256)) * 16, good[:-50], good[:300]]
    for wrong in ([1, 2], {"state": {}}, {"state": 3, "param_groups": [{"params": "x"}]}):
        torch.save(wrong, path)
        broken.append(path.read_bytes())
    for content in broken:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"the optimizer state cannot be read; got .*optimizer\.pt"):
            load_checkpoint(checkpoint, model, make_optimizer(model.trainable_parameters(), config.optim))


@pytest.mark.parametrize(
    "error", [struct.error("unpack requires a buffer of 4 bytes"), IndexError("pop from empty list")]
)
def test_whatever_a_damaged_pickle_raises_is_one_message(tmp_path, monkeypatch, error):
    def damaged(*_, **__):
        raise error

    monkeypatch.setattr("qerl.train.resume.read_state", lambda folder: None)
    monkeypatch.setattr("qerl.train.resume.load_adapter", lambda model, folder: None)
    monkeypatch.setattr("torch.load", damaged)
    with pytest.raises(CheckpointError, match=str(error)):
        load_checkpoint(tmp_path, SimpleNamespace(full=False), None)


def test_a_run_folder_that_cannot_be_written_is_refused_before_the_model_is_read(tmp_path, data, monkeypatch):
    monkeypatch.setattr("qerl.train.run.open_session", lambda *_, **__: pytest.fail("the model was read"))
    (tmp_path / "file").write_text("x")
    for setting in (
        f"run.dir={tmp_path}/file",
        f"run.dir={tmp_path}/file/below",
        f"run.name={'n' * 300}",
        "run.dir=/proc/none",
    ):
        with pytest.raises((OutputError, RunFolderError)):
            train(load_config(None, arguments(tmp_path, data, setting)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "file"]
