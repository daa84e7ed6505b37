"""Signals end a command with their exit code, also where compiled code drops what a handler raises."""

from __future__ import annotations

import fcntl
import gc
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
from cli_calls import qerl

from qerl.errors import CheckpointError
from qerl.experiments.manifest import Manifest
from qerl.experiments.watch import watch_matrix
from qerl.metrics.run_dir import RunDir
from qerl.metrics.run_lock import RunLock
from qerl.report.watch import watch as follow
from qerl.signals import Signalled, Signals

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def no_collection():
    """Python drops what a signal handler raises inside a collector's callback."""
    gc.disable()
    yield
    gc.enable()


class SignalledWhileMeasured:
    """A sequence whose first element torch asks for while a signal comes; torch clears what its handler raised."""

    def __init__(self, number: int):
        self.number = number

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        signal.raise_signal(self.number)
        raise AssertionError("the handler raises")


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGHUP, 129, "the terminal closed"),
    ],
)
def test_a_signal_that_torch_makes_an_error_of_is_still_a_signal(monkeypatch, number, code, word):
    with Signals(), pytest.raises(ValueError, match="could not determine the shape"):
        torch.tensor(SignalledWhileMeasured(number))
    monkeypatch.setattr("qerl.train.run.train", lambda *_, **__: torch.tensor(SignalledWhileMeasured(number)))
    result = qerl("train", ROOT / "configs" / "demo.yaml")
    assert result.exit_code == code
    assert f"{word} before the first step; nothing was changed" in result.stderr


def test_a_fault_in_the_clearing_up_after_a_signal_is_told(monkeypatch):
    def stopped(*_, **__):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            raise CheckpointError("the half-written file cannot be removed")

    monkeypatch.setattr("qerl.train.run.train", stopped)
    result = qerl("train", ROOT / "configs" / "demo.yaml")
    assert result.exit_code == 2
    assert "the half-written file cannot be removed" in result.stderr


def test_a_fault_of_ours_without_a_signal_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("qerl.train.run.train", lambda *_, **__: torch.tensor(object()))
    assert isinstance(qerl("train", ROOT / "configs" / "demo.yaml").exception, RuntimeError)


@pytest.mark.parametrize("ignored", [signal.SIGINT, signal.SIGHUP])
def test_handlers_go_back_and_ignored_signals_stay_ignored(ignored):
    """A job in the background ignores Ctrl-C, and one under nohup the end of its terminal."""
    before = signal.getsignal(signal.SIGTERM), signal.signal(ignored, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signal.raise_signal(ignored)
            assert signals.signal_number is None
            with pytest.raises(Signalled):
                signal.raise_signal(signal.SIGTERM)
        assert signals.signal_number == signal.SIGTERM
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(ignored)) == (before[0], signal.SIG_IGN)
    finally:
        signal.signal(ignored, before[1])


def open_run(folder: Path) -> RunDir:
    """A run that another process seems to be at work on, as long as its lock is held."""
    run = RunDir.create(folder)
    run.append_metrics(1, {"reward": 0.25})
    return run


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("matrix", [False, True])
def test_ctrl_c_leaves_a_watch_and_other_signals_end_it(tmp_path, monkeypatch, number, code, matrix):
    run = open_run(tmp_path / "cell")
    if matrix:
        Manifest(tmp_path).set_state("cell", "running")
    # Where the tests run in the background, a shell has told them to ignore Ctrl-C.
    before = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for function in (follow, watch_matrix):
        monkeypatch.setitem(function.__kwdefaults__, "sleep", lambda seconds: signal.raise_signal(number))
    try:
        with RunLock(run.path):
            result = qerl("watch", tmp_path if matrix else run.path, "--plain")
    finally:
        signal.signal(number, before)
    assert result.exit_code == code, result.output
    assert ("the terminal closed" in result.stderr) == (code == 129)


def test_a_terminal_that_closes_ends_a_command_with_its_exit_code(tmp_path):
    """Whatever it prints fails from then on, its last words too: that must not become another end."""
    run = open_run(tmp_path / "run")
    master, slave = pty.openpty()
    with RunLock(run.path):
        with os.fdopen(slave) as terminal:
            process = subprocess.Popen(
                [sys.executable, "-m", "qerl", "watch", str(run.path), "--every", "60"],
                stdin=terminal,
                stdout=terminal,
                stderr=terminal,
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
                cwd=ROOT,
            )
        shown = b""
        while b"0.250" not in shown:
            shown += os.read(master, 4096)
        os.close(master)
        assert process.wait(timeout=60) == 129
