"""Signals end a command with their exit code, also where compiled code drops what a handler raises."""

from __future__ import annotations

import gc
import signal
from pathlib import Path

import pytest
import torch
from cli_calls import qerl

from qerl.errors import CheckpointError
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
    ("number", "code", "word"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
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


def test_handlers_go_back_and_ignored_signals_stay_ignored():
    before = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signal.raise_signal(signal.SIGINT)
            assert signals.number is None
            with pytest.raises(Signalled):
                signal.raise_signal(signal.SIGTERM)
        assert signals.number == signal.SIGTERM
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == (before[0], signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGINT, before[1])
