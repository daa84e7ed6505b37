"""The benchmark of prefill passes, in toy shapes, and what it makes of a profile."""

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def prefill(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.prefill")


def test_passes_are_timed_and_functions_of_the_host_counted(prefill, tmp_path, monkeypatch, capsys):
    out = tmp_path / "prefill.json"
    monkeypatch.setattr(prefill, "REPEATS", 2)
    monkeypatch.setattr(prefill, "PROFILED", 2)
    options = ["--tiny", "--sizes", "0.5B", "--shapes", "3x10,1x4", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["prefill.py", *options])
    prefill.main()
    assert capsys.readouterr().out.count("0.5B ") == 2
    rows = json.loads(out.read_text())["rows"]
    row = rows["0.5B 3x10"]
    assert (row["rows"], row["tokens"], row["passes"]) == (21, 6 + 14 + 8, 1)
    assert row["clock_ms"][0] >= row["host_ms"][0] > 0
    assert row["device"] is None and row["behind"] is None
    host = row["host"]
    assert len(host["own_us_and_calls"]) == len(host["whole_us_and_calls"]) == 25
    assert host["whole_us_and_calls"][0][1] == pytest.approx(host["us"], rel=0.1)
    names = {name for name, *_ in host["whole_us_and_calls"]}
    assert any(name.startswith("qerl/rollout/prefill.py:") and name.endswith(":_compute") for name in names)
    assert "/home/" not in out.read_text() and str(tmp_path) not in out.read_text()


def test_what_is_not_reached_is_said(prefill, tmp_path, monkeypatch):
    out = tmp_path / "prefill.json"
    options = ["--tiny", "--sizes", "0.5B,7B", "--seconds", "0", "--shapes", "1x4", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["prefill.py", *options])
    prefill.main()
    rows = json.loads(out.read_text())["rows"]
    assert {name: list(row) for name, row in rows.items()} == {"0.5B 1x4": ["skipped"], "7B 1x4": ["skipped"]}


def test_a_profile_is_summed_and_an_empty_one_is_none(prefill):
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [
        SimpleNamespace(name="_product", device_type=cuda, device_time=3.0),
        SimpleNamespace(name="_product", device_type=cuda, device_time=2.0),
        SimpleNamespace(name="Memcpy HtoD (Pinned -> Device)", device_type=cuda, device_time=9.0),
        SimpleNamespace(name="cudaLaunchKernelExC", device_type=cpu, device_time=0.0),
        SimpleNamespace(name="cudaStreamSynchronize", device_type=cpu, device_time=0.0),
        SimpleNamespace(name="aten::empty", device_type=cpu, device_time=0.0),
    ]
    found = prefill.summed(events)
    assert found["kernel_ms"] == pytest.approx(0.005) and found["kernels"] == 2 and found["waits"] == 1
    assert found["copies"] == {"Memcpy HtoD (Pinned -> Device)": 1}
    assert found["calls"] == {"cudaLaunchKernelExC": 1, "cudaStreamSynchronize": 1}
    assert found["most_us"] == {"_product": [5.0, 2]}
    assert prefill.summed(events[:1])["waits"] is None
    assert prefill.summed(None) is None and prefill.summed(events[3:]) is None


def test_shapes_and_places_are_read(prefill):
    assert prefill.parse_shapes("5x80,1x16") == [(5, 80), (1, 16)]
    for wrong in ("5", "0x4", "ax3", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            prefill.parse_shapes(wrong)
    assert prefill.place_of(str(ROOT / "qerl" / "units.py"), 3, "gb") == "qerl/units.py:3:gb"
    assert prefill.place_of("/opt/x/site-packages/torch/nn/a.py", 4, "f") == "torch/nn/a.py:4:f"
    assert prefill.place_of("/opt/python/lib/dataclasses.py", 4, "f") == "dataclasses.py:4:f"
    assert prefill.place_of("~", 0, "<built-in>") == "<built-in>"


def test_settings_without_a_model_are_refused(prefill, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["prefill.py", "--tiny", "lora.rank=4"])
    with pytest.raises(SystemExit, match="2"):
        prefill.main()
    assert "a setting of --model" in capsys.readouterr().err
