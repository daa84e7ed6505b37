"""The benchmark of whole steps: what it sums up, and that a second run beside the first loses nothing of it."""

import importlib
import json
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from qerl.errors import RunStopped


@pytest.fixture
def loop(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1]))
    return importlib.import_module("benchmarks.loop")


def test_clean_and_noisy_steps_of_a_loop_are_told_apart_without_those_that_begin_a_stage(loop):
    rows = [
        {name: 0.0 for name in loop.SUMMED_UP if name != "mean_abs_prob_difference"}
        | {"step": step, "aqn/sigma": sigma, "time/step": seconds}
        for step, sigma, seconds in ((1, 0.0, 9.0), (2, 0.0, 1.0), (3, 0.0, 1.5), (4, 0.1, 9.0), (5, 0.1, 2.0), (6, 0.1, 4.0), (7, 0.1, 3.0))
    ]  # fmt: skip
    rows[2]["mean_abs_prob_difference"] = 0.5
    found = loop.summarize(rows)
    assert found["clean"]["steps"] == [2, 3] and found["clean"]["sigma"] == [0.0]
    assert found["noisy"]["steps"] == [5, 6, 7] and found["noisy"]["sigma"] == [0.1]
    assert found["noisy"]["time/step"] == {"median": 3.0, "least": 2.0, "most": 4.0}
    assert found["clean"]["time/step"]["median"] == 1.25
    assert (
        found["clean"]["mean_abs_prob_difference"]["most"] == 0.5 and "mean_abs_prob_difference" not in found["noisy"]
    )


@pytest.mark.parametrize("ends", ["whole", "interrupted", "beside fails"])
def test_what_the_first_run_of_a_loop_gave_is_kept_before_one_beside_it_begins(loop, monkeypatch, tmp_path, ends):
    out = tmp_path / "loop.json"
    begun = []

    def train(config, deadline):
        begun.append((config.run.name, config.model.stream_dtype, config.rollout.group_size, config.optim.lr))
        if len(begun) == 2:
            assert json.loads(out.read_text())["steps"] == ["gsm8k_05b_nvfp4_aqn"]
            if ends == "beside fails":
                raise ZeroDivisionError
        elif ends == "interrupted":
            raise RunStopped("stopped", signal.SIGINT)

    monkeypatch.setattr(loop, "train", train)
    monkeypatch.setattr(loop, "result", lambda run: {"plan": {}, "settled": {}, "steps": [run.path.name]})
    monkeypatch.setattr(loop.RunDir, "open", classmethod(lambda cls, path: cls(path)))
    command = ["loop.py", "--tiny", "--model", "demo", "--out", str(out), "--beside", "model.stream_dtype=compute"]
    monkeypatch.setattr(sys, "argv", [*command, "--beside", "rollout.group_size=2", "optim.lr=1e-3"])
    with pytest.raises(ZeroDivisionError) if ends == "beside fails" else nullcontext():
        loop.main()
    assert begun[0][:2] == ("gsm8k_05b_nvfp4_aqn", "float32") and {run[3] for run in begun} == {1e-3}
    assert begun[1:] == ([] if ends == "interrupted" else [("beside", "compute", 2, 1e-3)])
    assert json.loads(out.read_text()).get("beside") == (
        {
            "settings": ["model.stream_dtype=compute", "rollout.group_size=2"],
            "plan": {},
            "settled": {},
            "steps": ["beside"],
        }
        if ends == "whole"
        else None
    )
