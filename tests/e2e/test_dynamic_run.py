"""Runs with dynamic sampling: what is trained on, what is recorded, and that stopping changes nothing."""

import json
from dataclasses import asdict

import pytest

from qerl.config.load import load_config
from qerl.data.synthetic import arithmetic_problems
from qerl.metrics.behavior import read_behavior
from qerl.metrics.catalogue import is_reproducible
from qerl.metrics.run_dir import RunDir
from qerl.train.run import train

BASE = [
    "model.path=demo",
    "model.dtype=float32",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_prompt_tokens=96",
    "rollout.max_new_tokens=32",
    "lora.rank=4",
    "optim.lr=1e-3",
    "train.steps=3",
    "train.save_every=0",
    "eval.every=0",
    "aqn.num_stages=2",
    "objective.dynamic_sampling=true",
    "objective.dynamic_sampling_max_rounds=3",
    "log.progress=off",
]
DYNAMIC = ("sampling/refill_rounds", "sampling/groups_kept", "sampling/groups_dropped", "sampling/tokens_wasted")


def write_problems(folder, unsolvable):
    """Ten problems, so that a step runs on into following epochs; those numbered in ``unsolvable`` have no right answer."""
    rows = [asdict(problem) for problem in arithmetic_problems("train", 10)]
    for index in unsolvable:
        rows[index]["answer"] = "-123456"
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def half(tmp_path_factory):
    return write_problems(tmp_path_factory.mktemp("half"), range(0, 10, 2))


@pytest.fixture(scope="session")
def hopeless(tmp_path_factory):
    return write_problems(tmp_path_factory.mktemp("hopeless"), range(10))


@pytest.fixture
def start(tmp_path):
    def start(name, data, *settings, **how):
        config = load_config(None, [*BASE, f"data.train={data}", f"run.dir={tmp_path}", f"run.name={name}", *settings])
        return RunDir.open(train(config, **how))

    return start


def steps_of(run):
    return [{k: v for k, v in row.items() if is_reproducible(k)} for row in run.read_metrics() if row["step"]]


def records(run, step):
    return read_behavior(run.rollouts_dir / f"rollout-{step - 1:06d}.parquet")


def test_records_of_all_rounds_say_which_groups_were_trained_on(start, half):
    run = start("whole", half, "aqn.sigma_start=0.02", "aqn.scope=response")
    refilled = 0
    for row in steps_of(run):
        rows = records(run, row["step"])
        assert [record["sample_key"] for record in rows] == list(range(len(rows)))
        assert {record["rollout"] for record in rows} == {row["step"] - 1}
        states = {json.dumps({k: v for k, v in record["noise"].items() if k != "key"}) for record in rows}
        assert len(states) == 1, "all rounds have one noise state"
        assert max(1 - row["ratio/min"], row["ratio/max"] - 1) <= 1e-4, "the trainer replays every sample's own noise"
        groups = [rows[i : i + 4] for i in range(0, len(rows), 4)]
        kept = [group for group in groups if group[0]["in_batch"]]
        for group in groups:
            assert len({record["in_batch"] for record in group}) == 1
        for group in kept:
            outcomes = {record["outcome"] for record in group}
            assert "correct" in outcomes and len(outcomes) > 1
        dropped = sum(len(record["token_ids"]) for record in rows if not record["in_batch"])
        counted = [row[key] for key in DYNAMIC]
        assert counted[1:] == [len(kept), len(groups) - len(kept), dropped]
        assert row["groups/mixed"] * len(groups) >= len(kept), "metrics of groups cover all that were drawn"
        assert row["tokens/completion"] == sum(len(record["token_ids"]) for record in rows)
        refilled += counted[0]
    assert refilled > 0, "no step needed a refill: the test shows nothing"
    last = steps_of(run)[-1]
    assert last["aqn/sigma"] == 0.02
    drawn = sum(len(records(run, row["step"])) // 4 for row in steps_of(run))
    assert last["epoch"] == pytest.approx(drawn / 10)


def test_stopping_and_resuming_changes_no_metric_and_no_record(start, half):
    settings = ["optim.updates_per_rollout=2", "objective.noise=absent"]
    whole = start("whole", half, *settings)
    start("parts", half, *settings, stop_after=1)
    parts = start("parts", half, *settings, resume=True)
    assert steps_of(parts) == steps_of(whole)
    for step in (2, 3):
        mine, theirs = (
            [(r["prompt_id"], r["token_ids"], r["in_batch"]) for r in records(run, step)] for run in (parts, whole)
        )
        assert mine == theirs
    assert parts.read_json("summary.json")["on_policy"] == whole.read_json("summary.json")["on_policy"]


@pytest.mark.parametrize("updates", [1, 2])
def test_a_task_that_is_never_solved_ends_with_a_warning_and_without_an_update(start, hopeless, updates):
    run = start("hard", hopeless, f"optim.updates_per_rollout={updates}")
    for row in steps_of(run):
        assert [row[key] for key in DYNAMIC[:3]] == [2, 0, 12]
        assert (row["updates"], row["skipped_updates"]) == (0, updates)
        assert row["loss"] == 0.0 and row["tokens/loss"] == 0
        assert "grad_norm" not in row and "ratio/mean" not in row
    (text,) = [text for text in run.read_json("summary.json")["warnings"] if "dynamic_sampling_max_rounds" in text]
    assert "no update" in text
    hashes = {record["adapter_hash"] for step in (1, 2, 3) for record in records(run, step)}
    assert len(hashes) == 1, "the adapter did not change"


def test_summary_says_whether_the_run_was_on_policy(start, half):
    plain = ["objective.dynamic_sampling=false", "objective.dynamic_sampling_max_rounds=10"]
    replayed = start("replayed", half, *plain)
    assert [row["on_policy"] for row in steps_of(replayed)] == [1, 1, 1]
    found = replayed.read_json("summary.json")["on_policy"]
    assert found == {"on_policy": True, "on_policy_steps": 3, "steps": 3, "reasons": {}}
    absent = start("absent", half, *plain, "objective.noise=absent", "optim.updates_per_rollout=2")
    found = absent.read_json("summary.json")["on_policy"]
    assert not found["on_policy"] and set(found["reasons"]) == {"noise_key", "adapter_version"}
    assert found["reasons"]["adapter_version"]["steps"] == 3
    assert found["reasons"]["noise_key"]["first_step"] == 3, "stage 0 is noise-free"
