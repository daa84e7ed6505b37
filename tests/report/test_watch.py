"""Watching runs that end, go on, stop, or were left in the middle of a line."""

import io
import os
import random
import re
import signal
import subprocess
import sys

import pytest
from fake_run import evaluation_metrics, step_metrics, write_fake_run, write_summary
from rich.console import Console

from qerl.errors import RunFolderError
from qerl.metrics.run_lock import LOCK_NAME, RunLock
from qerl.report import watch as watching
from qerl.report.watch import watch


def console(terminal=False):
    return Console(
        file=io.StringIO(), width=110, height=40, force_terminal=terminal, highlight=False, color_system=None
    )


def text_of(shown):
    return shown.file.getvalue()


def never(_):
    raise AssertionError("an ended run is not waited for")


def age(run, seconds):
    """Make every file of the run as old as that."""
    for path in (run.path, *run.path.rglob("*")):
        stamp = path.stat().st_mtime - seconds
        os.utime(path, (stamp, stamp))


@pytest.mark.parametrize("terminal", [False, True])
def test_a_finished_run_is_shown_whole_and_left_at_once(tmp_path, terminal):
    run = write_fake_run(tmp_path / "run", steps=12)
    shown = console(terminal)
    assert watch(run.path, console=shown, sleep=never) == "finished"
    text = text_of(shown)
    assert "finished after step 12 of 12" in text
    assert "held-out, step 0" in text
    assert "LoRA rank 16" in text
    if terminal:
        assert "step 12/12" in text
        assert "\x1b[?25h" in text, "the cursor is given back"
    else:
        assert re.findall(r"^step +(\d+)/12", text, re.MULTILINE) == [str(step) for step in range(13)]
        assert "\x1b" not in text


def test_a_running_run_is_followed_to_its_end_line_by_line(tmp_path):
    run = write_fake_run(tmp_path / "run", steps=8, done=3, finished=False)
    rng, shown, looks = random.Random(1), console(), []
    lock = RunLock(run.path)
    lock.__enter__()

    def sleep(seconds):
        looks.append(seconds)
        step = 3 + len(looks)
        if step <= 8:
            run.append_metrics(step, step_metrics(step, 8, rng) | (evaluation_metrics(0.9, 500) if step == 8 else {}))
        else:
            write_summary(run, 8, 1000)
            lock.__exit__(None, None, None)

    assert watch(run.path, console=shown, sleep=sleep, every=0.5) == "finished"
    lines = [line for line in text_of(shown).splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == [f"{step}/8" for step in range(9)]
    assert looks == [0.5] * 6
    assert "90.0%" in lines[-1]


def test_a_run_whose_process_is_gone_is_said_to_have_stopped(tmp_path):
    run = write_fake_run(tmp_path / "run", steps=20, done=7, finished=False)
    shown = console()
    assert watch(run.path, console=shown, sleep=never) == "stopped"
    # What a killed process leaves behind is not locked.
    (run.path / LOCK_NAME).write_text("123\n")
    assert watch(run.path, console=shown, sleep=never) == "stopped"
    assert "its process is gone, at step 7 of 20" in text_of(shown)
    assert "it has no checkpoint to go on from" in text_of(shown) and "--resume" not in text_of(shown)
    run.checkpoint(5).mkdir(parents=True)
    assert watch(run.path, console=shown, sleep=never) == "stopped"
    assert "--resume" in text_of(shown)


def test_a_crashed_run_is_told_by_its_silence_where_there_are_no_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "is_held", lambda folder: None)
    run = write_fake_run(tmp_path / "run", steps=20, done=7, finished=False)
    age(run, 7200)
    shown = console(terminal=True)
    assert watch(run.path, console=shown, sleep=never) == "silent"
    assert "nothing written for 2h 00m, at step 7 of 20: taken for crashed" in text_of(shown)


def test_a_half_written_line_waits_for_its_end_and_a_resume_takes_lines_back(tmp_path):
    run = write_fake_run(tmp_path / "run", steps=20, done=6, finished=False)
    with run.metrics_path.open("a") as file:
        file.write('{"step": 7, "rewa')
    shown, looks = console(), []

    def sleep(_):
        looks.append(run.read_metrics()[-1]["step"])
        if len(looks) == 1:
            run.truncate_metrics(4)
        elif len(looks) == 2:
            run.append_metrics(5, {"reward": 0.125})
        else:
            raise KeyboardInterrupt

    with RunLock(run.path):
        assert watch(run.path, console=shown, sleep=sleep) == "left"
    assert looks == [6, 4, 5]
    assert "at step 5; the run is not touched" in text_of(shown)


def test_once_shows_what_there_is(tmp_path):
    run = write_fake_run(tmp_path / "run", steps=20, done=5, finished=False)
    shown = console()
    with RunLock(run.path):
        assert watch(run.path, once=True, console=shown, sleep=never) is None
    assert "running, at step 5 of 20" in text_of(shown)


@pytest.mark.parametrize(("evaluated", "what"), [(False, "the evaluation before step 1"), (True, "step 1")])
def test_a_run_without_a_finished_step_is_said_to_be_at_its_first(tmp_path, evaluated, what):
    run = write_fake_run(tmp_path / "run", steps=20, done=0, finished=False)
    if not evaluated:
        run.metrics_path.unlink()
    age(run, 590)
    looks = []

    def sleep(_):
        looks.append(text_of(shown))
        if len(looks) == 2:
            run.write_json(run.summary_path, {"status": "interrupted"})

    shown = console()
    with RunLock(run.path):
        assert watch(run.path, once=True, console=shown, sleep=never) is None
        assert re.search(rf"status +{what} is running, 9m 5\ds", text_of(shown))
        shown = console()
        assert watch(run.path, console=shown, sleep=sleep) == "interrupted"
    assert re.search(rf"now +{what} is running, 9m 5\ds", looks[0])
    shown = console()
    assert watch(run.path, once=True, console=shown, sleep=never) == "interrupted"
    assert "is running" not in text_of(shown)


def test_a_run_before_its_first_line_and_a_folder_without_a_run(tmp_path):
    run = write_fake_run(tmp_path / "run", steps=20, done=5, finished=False)
    run.metrics_path.unlink()
    with RunLock(run.path):
        assert watch(run.path, once=True, console=console(True), sleep=never) is None
    with pytest.raises(RunFolderError):
        watch(tmp_path / "nothing", console=console())


def test_an_alarm_is_told_once(tmp_path):
    run = write_fake_run(tmp_path / "run", steps=20, done=5, finished=False)
    shown, looks = console(), []

    def sleep(_):
        looks.append(1)
        if len(looks) == 4:
            raise KeyboardInterrupt
        run.append_metrics(5 + len(looks), {"reward": 0.5, "mean_abs_prob_difference": 0.02})

    with RunLock(run.path):
        watch(run.path, console=shown, sleep=sleep)
    assert text_of(shown).count("mean_abs_prob_difference was above 0.01") == 1


def test_ctrl_c_ends_the_command_well(tmp_path):
    write_fake_run(tmp_path / "run", steps=20, done=5, finished=False)
    with RunLock(tmp_path / "run"):
        _interrupt_a_watch(tmp_path / "run")


def _interrupt_a_watch(folder):
    process = subprocess.Popen(
        [sys.executable, "-m", "qerl", "watch", str(folder), "--every", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
        # A suite that was started in the background hands down that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in process.stdout:
        if line.startswith("step  5/20"):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "the run is not touched" in out
    assert "Traceback" not in err
