"""A run whose memory is planned: decided before it starts, written down, kept when it goes on, refused when it does not fit."""

import gc
import json
import weakref
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

import pytest

from qerl import memory
from qerl.config.load import load_config
from qerl.data.synthetic import arithmetic_problems
from qerl.errors import MemoryBudgetError
from qerl.metrics.catalogue import is_reproducible
from qerl.metrics.run_dir import RunDir
from qerl.rollout.engine import Engine
from qerl.train import loop, session
from qerl.train.run import train

SETTINGS = (
    "model.path=demo",
    "model.dtype=float32",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_prompt_tokens=96",
    "rollout.max_new_tokens=32",
    "lora.rank=4",
    "optim.lr=1e-3",
    "train.steps=4",
    "train.save_every=0",
    "train.token_budget=auto",
    "eval.before=false",
    "eval.after=false",
    "aqn.num_stages=2",
    "diagnostics.every=0",
    "log.progress=off",
)


@pytest.fixture
def run(tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(asdict(problem)) + "\n" for problem in arithmetic_problems("train", 16)))

    def start(name, *settings, **call):
        where = [f"data.train={data}", f"run.dir={tmp_path / 'runs'}", f"run.name={name}"]
        return RunDir.open(train(load_config(None, [*SETTINGS, *where, *settings]), **call))

    return start


def rows(run_dir):
    return [{k: v for k, v in row.items() if is_reproducible(k)} for row in run_dir.read_metrics()]


def test_a_plan_is_written_down_and_stays_when_the_run_goes_on(run):
    whole = run("whole", "train.memory_budget=0.06")
    planned = load_config(whole.config_path, [])
    assert isinstance(planned.train.token_budget, int) and planned.train.checkpointing != "auto"
    assert planned.rollout.keep_cache == "on"
    run("parts", "train.memory_budget=0.06", stop_after=2)
    # Another machine would plan differently; the run goes on as it began.
    parts = run("parts", "train.memory_budget=off", resume=True)
    assert load_config(parts.config_path, []).train == planned.train
    assert rows(whole) == rows(parts)


def test_what_was_planned_and_measured_is_in_the_folder(run):
    kept = run("r", "train.steps=1").read_json("memory.json")
    assert set(kept["predicted_peaks"]) == {"load", "rollout", "logprobs", "backward", "optimizer"}
    assert kept["predicted_phases"]["backward"]["activations"] > 0
    assert kept["measured_peaks"] == {} and kept["largest_pass"] == {}, "known on a GPU alone"
    assert kept["process"]["rss_peak"] > 0
    # What outlives a phase, by owner: the largest prediction of a cache is for prompts and answers at their longest.
    found = kept["by_owner"]
    assert found.keys() == {owner for owner, size in kept["measured"].items() if size}
    assert all(abs(row["error"]) < 0.05 for owner, row in found.items() if owner != "kv_cache"), found
    assert found["kv_cache"]["error"] > -0.05


def test_a_run_keeps_to_its_budget_from_the_first_weight_to_its_end(run, monkeypatch):
    """Training, evaluations in it and what a matrix does after it; a start that fails leaves the bound, too."""
    bounds, seen = [], []

    @contextmanager
    def within(config, device):
        bounds.append((config.train.memory_budget, device.type))
        try:
            yield
        finally:
            bounds.pop()

    def look(*arguments):
        seen.append(list(bounds))

    monkeypatch.setattr(memory, "within_budget", within)
    make = session.load_model
    monkeypatch.setattr(session, "load_model", lambda *arguments, **keywords: look() or make(*arguments, **keywords))
    run("r", "train.steps=1", "train.memory_budget=0.06", after=look)
    assert seen == [[(0.06, "cpu")]] * 2 and not bounds
    monkeypatch.setattr(session, "load_model", None)
    with pytest.raises(TypeError):
        run("fails", "train.steps=1", "train.memory_budget=0.06")
    assert not bounds


def test_a_plan_beyond_the_budget_starts_nothing(run, tmp_path):
    with pytest.raises(MemoryBudgetError, match="does not fit"):
        run("refused", "train.memory_budget=0.001")
    assert not (tmp_path / "runs" / "refused").exists()


@pytest.mark.parametrize("keep", ["off", "on"])
def test_keys_and_values_are_gone_while_a_step_learns_unless_they_are_kept(run, monkeypatch, keep):
    """With the pages that an engine keeps on a GPU, on the CPU."""
    made, there = [], []
    make, learn = Engine._workspace_for, loop.learn

    def noted(engine, *sizes):
        made.append(weakref.ref(workspace := make(engine, *sizes)))
        return workspace

    def looks(*arguments, **keywords):
        gc.collect()
        there.append(made[-1]() is not None)
        return learn(*arguments, **keywords)

    monkeypatch.setattr(session, "Engine", partial(Engine, paged=True))
    monkeypatch.setattr(Engine, "_workspace_for", noted)
    monkeypatch.setattr(loop, "learn", looks)
    run("r", f"rollout.keep_cache={keep}", "train.steps=2", "aqn.enabled=false")
    assert there == [keep == "on"] * 2


def test_a_run_that_is_larger_than_the_machine_says_so_as_its_plan_does(tmp_path, monkeypatch):
    monkeypatch.setattr("qerl.train.fit.machine_memory", lambda: 1_000_000)
    train(
        load_config(
            None, [*SETTINGS, "train.steps=1", "data.train=arithmetic", f"run.dir={tmp_path}", "run.name=large"]
        )
    )
    found = RunDir(tmp_path / "large").read_json("summary.json")["warnings"]
    assert [text for text in found if "this machine has 1.00 MB: DOES NOT FIT" in text]
