"""The benchmark of the training step in toy shapes: its rows, repeats and what it puts together."""

import importlib
import json
import re
import statistics
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from cli_calls import bench

from qerl.errors import KernelUnavailableError

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def module(monkeypatch):
    """Imports a file of benchmarks/."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_the_step_benchmark_runs_every_kind_of_case_in_toy_shapes(tmp_path):
    """Of 7B, 32B and 1.5B: in toy shapes all sizes are one, and every kind, format and cap is among theirs."""
    older = {
        "0.5B nvfp4": {"commit": "abc", "backward": {}},
        "7B nvfp4": {"backward": {}},
        "14B nvfp4": {"skipped": "x"},
    }
    facts = {"torch": "2.0", "device": "H200", "commit": "def"}
    (tmp_path / "older.json").write_text(
        json.dumps({"command": "earlier", "note": "N.", "facts": facts, "rows": older})
    )
    options = ["--tiny", "--sizes", "7B,32B,1.5B", "--whole-steps", "3", "--capped-steps", "2"]
    bench("step", *options, "--out", tmp_path / "step.json", "--add", tmp_path / "older.json")
    content = json.loads((tmp_path / "step.json").read_text())
    rows = content["rows"]
    assert content["command"] == (
        "python benchmarks/step.py --tiny --sizes 7B,32B,1.5B --whole-steps 3 --capped-steps 2 --out results/step.json --add results/older.json"
    )
    assert content["note"] == "N."
    added = {"command": "earlier", "commit": "def", "torch": "2.0", "device": "H200"}
    assert rows.pop("14B nvfp4") == added | {"skipped": "x"}
    assert rows.pop("0.5B nvfp4") == added | {"commit": "abc", "backward": {}}
    ours = {"command": content["command"], "commit": content["environment"]["commit"], "device": "cpu"}
    assert all(ours.items() <= row.items() for row in rows.values()), "a measured row takes the place of an added one"
    assert {"7B nvfp4", "7B bf16", "7B nf4", "32B nvfp4", "32B bf16", "1.5B bf16, all weights, adamw"} <= rows.keys()
    assert re.fullmatch("[0-9a-f]{40}", content["environment"]["commit"])
    offloaded = "7B nvfp4, layer inputs on the host", "7B nvfp4, layer inputs on the device"
    assert (
        rows[offloaded[0]]["memory"]["8192"]["backward"]["predicted"]
        < (rows[offloaded[1]]["memory"]["8192"]["backward"]["predicted"])
    )
    for name, repeats in (("7B nvfp4", 3), ("32B nf4", 3), ("1.5B bf16, all weights, adamw", 3), (offloaded[0], 5)):
        assert all(rows[name][stage]["repeats"] == repeats for stage in ("logprobs", "backward", "optimizer", "step"))
        passes = [rows[name][stage]["all"] for stage in ("logprobs", "backward", "optimizer")]
        shares = rows[name]["step"]["answers"] / 4, rows[name]["step"]["answers"] / 4, 1
        sums = [sum(s * t for s, t in zip(shares, times, strict=True)) for times in zip(*passes, strict=True)]
        assert rows[name]["step"]["all"] == pytest.approx(sums)
    for name, row in rows.items():
        assert "not runnable" not in row, name
        if "skipped" not in row:
            assert row["seconds"]["step"] > 0 if "step of" in name else row["backward"]["seconds"] > 0, name
    whole = rows["32B nvfp4 in 48 GB, step of 8 x 2048"]
    assert whole["tokens"]["sampled"] == 24 and whole["seconds"]["rollout"] > 0
    assert whole["repeats"] == 2 and {len(seconds) for seconds in whole["all"].values()} == {2} and "cut" not in whole
    found = content["speed_up_of_nvfp4_over_bf16"]
    assert found.keys() == {"7B nvfp4, step of 64 x 1024", "32B nvfp4, step of 8 x 512"}
    assert all(entry["predicted"] > 0 and entry["measured"] > 0 for entry in found.values())
    for name, entry in found.items():
        ours, theirs = rows[name], rows[name.replace("nvfp4", "bf16")]
        for row in (ours, theirs):
            every = row["all"]
            assert row["repeats"] == 3 and {len(seconds) for seconds in every.values()} == {3} and "cut" not in row
            assert row["seconds"] == {name: statistics.median(seconds) for name, seconds in every.items()}
            parts = zip(*(every[name] for name in every if name != "step"), strict=True)
            assert every["step"] == pytest.approx([sum(seconds) for seconds in parts])
            part, learning = row["part_of_a_rollout"], row["learning"]
            assert len(part["again"]) == len(part["twice"]) == 3
            assert all(len(passes["all"]) == 3 for passes in learning["parts"])
            assert sum(passes["answers"] * passes["times"] for passes in learning["parts"]) in (8, 64)
            assert sum(passes["times"] for passes in learning["parts"]) == len(row["tokens"]["micro_batches"])
            assert learning["seconds"] == pytest.approx(
                sum(passes["times"] * statistics.median(passes["all"]) for passes in learning["parts"])
            )
            more = max(0.0, statistics.median(part["twice"]) - statistics.median(part["again"]))
            rest = row["tokens"]["sampled"] / part["tokens"] - 1
            assert part["whole"] == pytest.approx(part["first"] + rest * more)
            assert row["switch"].keys() == {"to_training", "to_rollout", "short_rollout"}
        stages = [sum(row["seconds"][stage] for stage in ("logprobs", "backward")) for row in (ours, theirs)]
        eta = (ours["learning"]["seconds"] / theirs["learning"]["seconds"] - 1) * stages[1] / theirs["seconds"]["step"]
        assert entry["eta"] == pytest.approx(eta)
        step = theirs["seconds"]["step"]
        assert entry["eta_of_the_stages"] == pytest.approx((stages[0] - stages[1]) / step)
        inverse = 1 - entry["f"] + entry["f"] / entry["s"] + entry["eta_of_the_stages"]
        assert entry["error_with_eta_of_the_stages"] == pytest.approx(1 / inverse / entry["measured"] - 1)


def test_repeats_that_there_is_no_time_for_are_left_out_and_counted(module, monkeypatch):
    step = module("step")
    now = [0.0]
    monkeypatch.setattr(step.time, "perf_counter", lambda: now[0])
    timed = step.Bench(torch.device("cpu"), 100.0, tiny=True, most_new={})

    def once():
        now[0] += 20
        return now[0]

    row = {}
    assert timed._repeated(3, once, row) == [20, 40, 60] and row == {}
    timed.reserved = 15
    # A second one would end at 100, and 15 seconds are kept for what comes after.
    assert timed._repeated(3, once, row) == [80]
    assert row == {"cut": "1 of 3 were made: there was no time for more"}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB."),
        KernelUnavailableError("the CUDA driver refused a graph", got="error 2: out of memory"),
    ],
    ids=["torch", "driver"],
)
def test_a_case_that_runs_out_of_memory_under_its_cap_is_not_runnable(module, monkeypatch, error):
    step, asked, given = module("step"), [], []

    @contextmanager
    def bounded(size, device):
        asked.append(size)
        yield
        given.append(size)

    def no_room(*_, **__):
        raise error

    monkeypatch.setattr(step, "bounded", bounded)
    monkeypatch.setattr(step, "Run", no_room)
    timed = step.Bench(torch.device("cpu"), 100.0, tiny=True, most_new={})
    case = next(case for case in step.CASES if case.cap_gb and case.size == "7B" and case.format == "bf16")
    timed.run(case)
    assert asked == [14_000_000_000] and given == []
    assert "out of memory" in timed.rows["7B bf16 in 14 GB, step of 8 x 2048"]["not runnable"]
    error = ValueError("another fault")
    with pytest.raises(ValueError, match="another fault"):
        timed.run(case)


def test_added_rows_keep_their_command_and_commit(module, tmp_path):
    step = module("step")
    rows = {"7B nvfp4": {"command": "python benchmarks/step.py --only passes", "commit": "a" * 40, "backward": {}}}
    content = {"command": "python benchmarks/step.py --only ''", "environment": {"commit": "b" * 40}, "rows": rows}
    (tmp_path / "one.json").write_text(json.dumps(content))
    timed = step.Bench(torch.device("cpu"), 1.0, tiny=True, most_new={})
    timed.add(tmp_path / "one.json")
    assert timed.rows["7B nvfp4"] == {"torch": None, "device": None} | rows["7B nvfp4"]
