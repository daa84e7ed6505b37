"""Whole runs under every kind of noise: the ratio is 1 when noise is replayed, and stopping changes nothing."""

import json
from dataclasses import asdict

import pytest
import torch

from qerl.config.load import load_config
from qerl.data.synthetic import arithmetic_problems
from qerl.metrics.behavior import read_behavior
from qerl.metrics.catalogue import is_reproducible
from qerl.metrics.run_dir import RunDir
from qerl.model.aqn import NoiseState
from qerl.train.run import train

BASE = (
    "model.path=demo",
    "model.dtype=float32",
    "rollout.prompts_per_step=4",
    "rollout.group_size=2",
    "rollout.max_prompt_tokens=96",
    "rollout.max_new_tokens=24",
    "lora.rank=4",
    "optim.lr=1e-3",
    "optim.updates_per_rollout=2",
    "train.steps=4",
    "train.save_every=0",
    "aqn.num_stages=4",
    "aqn.sigma_start=0.1",
    "aqn.sigma_end=0.05",
    "aqn.calibration.prompts=2",
    "aqn.calibration.max_new_tokens=8",
    "diagnostics.every=0",
    "diagnostics.canary=false",
    "eval.before=false",
    "eval.after=false",
    "log.progress=off",
)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Runs the loop under a name with settings on top of BASE; gives the run folder."""
    folder = tmp_path_factory.mktemp("runs")
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(asdict(problem)) + "\n" for problem in arithmetic_problems("train", 32)))

    def run(name, *settings, resume=False, stop_after=None):
        where = (f"data.train={data}", f"run.dir={folder}", f"run.name={name}")
        config = load_config(None, [*BASE, *where, *settings])
        return RunDir.open(train(config, resume=resume, stop_after=stop_after))

    return run


def reproducible(run):
    return [{key: value for key, value in row.items() if is_reproducible(key)} for row in run.read_metrics()]


KINDS = {
    "group": ("aqn.scope=group", "aqn.magnitude=relative"),
    "response_clean": ("aqn.scope=response", "aqn.prompt=clean", "train.checkpointing=selective"),
    "token": ("aqn.scope=token", "aqn.sites=[attn_norm, final_norm]", "train.token_budget=150"),
    "independent": ("aqn.sharing=independent", "aqn.match_budget=true"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_ratio_is_one_before_any_update_when_noise_is_replayed(start, kind):
    """To the trainer's own pass exactly; to what the engine recorded within rounding."""
    run = start(
        kind,
        *KINDS[kind],
        "objective.denominator=recomputed",
        "optim.updates_per_rollout=1",
        "train.steps=2",
        "aqn.num_stages=2",
    )
    row = run.read_metrics()[-1]
    assert row["aqn/sigma"] == 0.1
    assert row["ratio/min"] == row["ratio/max"] == 1.0
    for end in ("min", "max"):
        assert abs(row[f"sampling/importance_sampling_ratio/{end}"] - 1) <= 1e-4
    records = read_behavior(run.rollout_paths()[-1][1])
    states = {NoiseState.from_dict(record["noise"]) for record in records}
    assert [state.scope for state in states] == [load_config(run.config_path).aqn.scope]
    if "scope" in KINDS[kind][0]:
        expected = [0, 0, 1, 1, 2, 2, 3, 3] if kind == "group" else list(range(8))
        assert [record["noise"]["key"] for record in records] == expected


@pytest.mark.parametrize("kind", ["group", "token"])
def test_absent_noise_shows_in_the_mismatch(start, kind):
    run = start(f"{kind}_absent", *KINDS[kind], "objective.noise=absent", "train.steps=2", "aqn.num_stages=2")
    assert run.read_metrics()[-1]["sampling/sampling_logp_difference/mean"] > 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        ("aqn.scope=response", "aqn.magnitude=kl", "aqn.sigma_start=0.02", "aqn.sigma_end=0.002"),
        ("aqn.mode=accumulate",),
        ("aqn.controller.enabled=true", "aqn.magnitude=sensitivity"),
    ],
    ids=("kl", "accumulate", "controller"),
)
def test_stopping_and_resuming_changes_no_metric_and_no_record(start, settings, request):
    name = request.node.callspec.id
    whole = start(f"{name}_whole", *settings)
    start(f"{name}_parts", *settings, stop_after=3)
    parts = start(f"{name}_parts", *settings, resume=True)
    assert reproducible(whole) == reproducible(parts)
    for (_, one), (_, other) in zip(whole.rollout_paths(), parts.rollout_paths(), strict=True):
        keep = ("token_ids", "behavior_logprobs", "noise")
        assert read_behavior(one, keep) == read_behavior(other, keep)


def test_the_stored_sum_of_an_accumulating_run_is_what_its_record_gives(start):
    from safetensors.torch import load_file

    from qerl.train.session import open_session

    run = start("sum", "aqn.mode=accumulate", "lora.train_norms=false", "train.steps=3")
    stored = load_file(run.checkpoint(3) / "noise_sum.safetensors")
    state = NoiseState.from_dict(read_behavior(run.rollout_paths()[-1][1])[0]["noise"])
    noise = state.materialize(open_session(load_config(run.config_path)).model)
    assert len(stored) == len(noise.places()) > 0
    for (layer, site), z in noise.values.items():
        assert torch.equal(stored[f"{layer}/{site}"], z)
