import errno
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qerl.errors import OutputError, RunFolderError
from qerl.metrics.behavior import read_behavior
from qerl.metrics.files import (
    check_writable,
    is_temporary,
    recover_folders,
    remove_leftovers,
    to_json,
    whole_file,
    whole_folder,
)
from qerl.metrics.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[2]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("file", ["config.resolved.yaml", "metrics.jsonl"])
def test_a_folder_that_holds_a_run_is_refused_with_the_ways_out(tmp_path, file):
    (tmp_path / file).write_text("")
    with pytest.raises(RunFolderError, match=r"Delete the folder.*no checkpoint.*run\.name") as caught:
        RunDir.create(tmp_path)
    assert "--resume" not in str(caught.value)
    RunDir(tmp_path).checkpoint(1).mkdir(parents=True)
    with pytest.raises(RunFolderError, match=r"--resume.*run\.name.*delete"):
        RunDir.create(tmp_path)


def test_a_folder_without_a_run_is_taken_and_a_missing_one_made(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    RunDir.create(tmp_path)
    assert RunDir.create(tmp_path / "runs" / "demo").path.is_dir()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_file_is_no_run_folder(tmp_path):
    (tmp_path / "demo").write_text("")
    with pytest.raises(RunFolderError, match="is a file"):
        RunDir.create(tmp_path / "demo")


def test_opening_what_is_not_there_names_the_nearest_run(tmp_path):
    run = RunDir.create(tmp_path / "gsm8k_aqn")
    run.append_metrics(1, {"reward": 0.5})
    with pytest.raises(RunFolderError, match=r"no such run folder.*gsm8k_aqn"):
        RunDir.open(tmp_path / "gsm8k_anq")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunFolderError, match="holds no run"):
        RunDir.open(tmp_path / "empty")
    assert RunDir.open(tmp_path / "gsm8k_aqn").path == run.path


def test_a_line_a_step_in_strict_json(tmp_path):
    run = RunDir.create(tmp_path)
    run.append_metrics(1, {"reward": 0.1 + 0.2, "step": 1, "policy_version": 4})
    run.append_metrics(2, {"reward": math.nan, "grad_norm": math.inf})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"step": 1, "reward": 0.1 + 0.2, "policy_version": 4}
    assert lines[1] == '{"step": 2, "reward": null, "grad_norm": null}'


@pytest.mark.parametrize("tail", ['{"step": 3, "rew', '{"step": 3, "reward": 0.5}', "\x00\x00"])
def test_a_line_without_its_end_is_not_read_and_makes_room_for_the_next(tmp_path, tail):
    run = RunDir.create(tmp_path)
    run.append_metrics(1, {"reward": 0.1})
    run.append_metrics(2, {"reward": 0.2})
    with run.metrics_path.open("a") as file:
        file.write(tail)
    assert [row["step"] for row in run.read_metrics()] == [1, 2]
    run.append_metrics(3, {"reward": 0.3})
    assert run.read_metrics() == [{"step": step, "reward": step / 10} for step in (1, 2, 3)]


def test_a_half_line_alone_in_the_file_leaves_nothing(tmp_path):
    run = RunDir.create(tmp_path)
    run.metrics_path.write_text('{"step"')
    assert run.read_metrics() == []
    run.append_metrics(1, {"reward": 1.0})
    assert run.read_metrics() == [{"step": 1, "reward": 1.0}]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    run = RunDir.create(tmp_path)
    run.metrics_path.write_text('{"step": 1}\nnot json\n{"step": 3}\n')
    with pytest.raises(RunFolderError, match="line 2"):
        run.read_metrics()


def test_rewind_leaves_the_folder_as_it_was_after_the_step(tmp_path):
    run = RunDir.create(tmp_path)
    for step in range(6):
        run.append_metrics(step, {"reward": step / 10})
    for step in range(1, 6):
        run.write_completions_text(step, "text")
        run.write_text(run.rollout_path(step - 1), "records")
        run.adapter_path(step - 1).mkdir(parents=True)
        run.checkpoint(step).mkdir(parents=True)
        run.write_evaluation(step, [{"id": "a", "accuracy": 1.0}])
        run.write_evaluation(step, [{"id": "a", "accuracy": 0.0}], draw=1)
    run.write_json("summary.json", {})
    run.write_text("report.html", "")
    leftover = run.checkpoints_dir / ".checkpoint-9.tmp-123"
    leftover.mkdir()

    run.rewind(3, rollout=3)

    assert [row["step"] for row in run.read_metrics()] == [0, 1, 2, 3]
    assert names(run.completions_dir) == {f"step-{step:06d}.txt" for step in (1, 2, 3)}
    kept = {f"step-{step:06d}{end}.jsonl" for step in (1, 2, 3) for end in ("", "-noise1")}
    assert names(run.evaluations_dir) == kept
    assert run.evaluation_steps() == [1, 2, 3]
    assert names(run.rollouts_dir) == {f"rollout-{index:06d}.parquet" for index in (0, 1, 2)}
    assert names(run.adapters_dir) == {f"rollout-{index:06d}" for index in (0, 1, 2)}
    assert names(run.checkpoints_dir) == {"checkpoint-1", "checkpoint-2", "checkpoint-3"}
    assert not run.summary_path.exists()
    assert not run.report_path.exists()


def test_the_latest_checkpoint_is_by_number_and_complete(tmp_path):
    run = RunDir.create(tmp_path)
    assert run.latest_checkpoint() is None
    for name in ("checkpoint-9", "checkpoint-10", ".checkpoint-11.tmp-77", "checkpoint-12.old", "best"):
        (run.checkpoints_dir / name).mkdir(parents=True)
    (run.checkpoints_dir / "checkpoint-13").write_text("a file, not a folder")
    assert run.latest_checkpoint() == run.checkpoints_dir / "checkpoint-10"
    assert [step for step, _ in run.checkpoints()] == [9, 10]


def write_half(path: Path, text: str) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(text)
        raise RuntimeError("half way")


def test_a_file_does_not_take_the_place_of_a_pipe_or_a_device(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, tmp_path / "link"):
        with pytest.raises(OutputError, match="is a device, a pipe or a socket"), whole_file(path):
            raise AssertionError("refused before anything is made")
        with pytest.raises(OutputError, match="is a device, a pipe or a socket"):
            check_writable(path)
    assert pipe.is_fifo() and (tmp_path / "link").is_symlink()


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    with pytest.raises(RuntimeError, match="half way"):
        write_half(path, "half")
    assert names(path.parent) == set()
    with whole_file(path) as temporary:
        temporary.write_text("first")
        assert not path.exists()
    with pytest.raises(RuntimeError, match="half way"):
        write_half(path, "second, but")
    assert path.read_text() == "first"
    assert names(path.parent) == {"file.txt"}


def fill_half(path: Path) -> None:
    with whole_folder(path) as temporary:
        (temporary / "adapter").write_text("half")
        raise RuntimeError("half way")


def test_a_folder_appears_whole_and_takes_the_place_of_an_older_one(tmp_path):
    path = tmp_path / "checkpoint-5"
    with pytest.raises(RuntimeError, match="half way"):
        fill_half(path)
    assert names(tmp_path) == set()
    for content in ("old", "new"):
        with whole_folder(path) as temporary:
            (temporary / content).write_text(content)
    assert names(path) == {"new"}
    assert names(tmp_path) == {"checkpoint-5"}


KILLED_WHILE_REPLACING = """
import os, pathlib, shutil, signal, sys
from qerl.metrics.files import whole_folder

def dies_before(call, count):
    def instead(*arguments, **keywords):
        nonlocal count
        count -= 1
        if count < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **keywords)
    return instead

path, moment = pathlib.Path(sys.argv[1]), int(sys.argv[2])
with whole_folder(path) as folder:
    (folder / "new").write_text("new")
    if moment < 2:
        pathlib.Path.rename = dies_before(pathlib.Path.rename, moment)
    else:
        shutil.rmtree = dies_before(shutil.rmtree, 0)
"""


@pytest.mark.parametrize(("moment", "kept"), [(0, "old"), (1, "old"), (2, "new")])
def test_a_process_that_is_killed_while_it_replaces_a_folder_leaves_one_of_the_two(tmp_path, moment, kept):
    """Before the older one is renamed; between the two names; before the older one is removed."""
    path = tmp_path / "checkpoint-5"
    path.mkdir()
    (path / "old").write_text("old")
    killed = subprocess.run([sys.executable, "-c", KILLED_WHILE_REPLACING, path, str(moment)], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    assert path.exists() == (moment != 1)
    recover_folders(tmp_path)
    assert names(path) == {kept}
    remove_leftovers(tmp_path)
    assert names(tmp_path) == {"checkpoint-5"}
    recover_folders(tmp_path / "none")


def test_a_folder_that_cannot_take_its_name_leaves_the_older_one(tmp_path, monkeypatch):
    """And what a killed process left aside is settled before the next one is."""
    path, real = tmp_path / "adapter", Path.rename

    def refuses(self, target):
        if is_temporary(self):
            raise OSError(errno.EIO, "input/output error")
        return real(self, target)

    (tmp_path / ".adapter.old").mkdir()
    (tmp_path / ".adapter.old" / "old").write_text("old")
    monkeypatch.setattr(Path, "rename", refuses)
    with pytest.raises(OutputError, match="adapter cannot be written"), whole_folder(path):
        pass
    monkeypatch.undo()
    assert names(path) == {"old"} and names(tmp_path) == {"adapter"}


def test_what_a_process_at_work_has_half_written_is_no_leftover(tmp_path):
    with whole_folder(tmp_path / "cell"), whole_file(tmp_path / "file") as temporary:
        temporary.write_text("half")
        (tmp_path / f".gone.tmp-{2**22 + 1}").write_text("of no process: numbers end at 2^22")
        remove_leftovers(tmp_path)
        assert len(names(tmp_path)) == 2


def test_two_writers_of_one_folder_do_not_get_in_each_others_way(tmp_path):
    """The second waits until the first has given its folder the name."""
    path = tmp_path / "cell"
    with ThreadPoolExecutor(1) as other, whole_folder(path) as first:
        (first / "first").write_text("")
        descriptor = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        waiting = other.submit(_write_elsewhere, path)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.2)
        os.close(descriptor)
        waiting.result()
    assert names(path) == {"first"} and names(tmp_path) == {"cell"}


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EBADF])
def test_a_file_system_that_does_not_lock_folders_has_whole_ones_too(tmp_path, monkeypatch, number):
    def refuses(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuses)
    for name in ("old", "new"):
        with whole_folder(tmp_path / "cell") as folder:
            (folder / name).write_text("")
    assert names(tmp_path / "cell") == {"new"} and names(tmp_path) == {"cell"}


def _write_elsewhere(path: Path) -> None:
    """As another process does: with a temporary name of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qerl.metrics.files.os.getpid", lambda: 1)
        with whole_folder(path) as folder:
            (folder / "second").write_text("")


def test_json_files_are_read_back_and_a_damaged_one_is_named(tmp_path):
    run = RunDir.create(tmp_path)
    assert run.read_json("summary.json") is None
    run.write_json(run.summary_path, {"path": tmp_path, "low": -math.inf, "sites": ("a", "b"), "é": True})
    assert run.read_json("summary.json") == {"path": str(tmp_path), "low": None, "sites": ["a", "b"], "é": True}
    for damage in (b"{", b"", b"\xff\xfe", b"[1, 2]", b"null", 5000 * b"["):
        run.summary_path.write_bytes(damage)
        with pytest.raises(RunFolderError, match=r"summary\.json: .*expected a JSON object"):
            run.read_json("summary.json")


def test_damaged_evaluations_and_records_are_named(tmp_path):
    """As a copy that was broken off leaves them."""
    run = RunDir.create(tmp_path)
    run.write_evaluation(3, [{"id": "a", "text": "one\u2028line"}])
    assert run.read_evaluation(3) == [{"id": "a", "text": "one\u2028line"}]
    path = run.evaluations_dir / "step-000003.jsonl"
    for damage in (b'{"id": "a"}\n{"id', b"null\n", b"\xff\xfe"):
        path.write_bytes(damage)
        with pytest.raises(RunFolderError, match=r"step-000003\.jsonl"):
            run.read_evaluation(3)
    record = tmp_path / "rollout-000000.parquet"
    for damage in (b"", b"PAR1" + 20 * b"x"):
        record.write_bytes(damage)
        with pytest.raises(RunFolderError, match=r"rollout-000000\.parquet: .*Copy it again"):
            read_behavior(record)


def test_values_without_a_json_form_are_refused():
    with pytest.raises(TypeError, match="set"):
        to_json({"a": {1, 2}})


def test_a_relative_run_folder_keeps_its_files_in_one_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunDir.create("runs/demo")
    run.write_text(run.config_path, "a: 1\n")
    run.write_json("summary.json", {"a": 1})
    run.write_completions_text(1, "text")
    assert run.read_json(run.summary_path) == run.read_json("summary.json") == {"a": 1}
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {
        "runs/demo/config.resolved.yaml",
        "runs/demo/summary.json",
        "runs/demo/completions/step-000001.txt",
    }


def test_a_damaged_evaluation_is_named(tmp_path):
    run = RunDir.create(tmp_path)
    run.write_evaluation(3, [{"id": "a"}]).write_text('{"id": "a"}\n{"id":')
    with pytest.raises(RunFolderError, match="step-000003"):
        run.read_evaluation(3)
