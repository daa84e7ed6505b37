"""Whole runs in full mode: all weights move, runs resume to the bit, records score again, checkpoints are models."""

import gc
import json
import weakref
from dataclasses import asdict

import pytest
import torch
from transformers import AutoModelForCausalLM

from qerl.config.load import load_config
from qerl.data.synthetic import arithmetic_problems
from qerl.errors import ConfigError, RunFolderError
from qerl.metrics.behavior import read_behavior
from qerl.metrics.catalogue import is_reproducible
from qerl.metrics.run_dir import RunDir
from qerl.model.checkpoint import resolve_model_path
from qerl.model.tensor_folder import TensorFolder
from qerl.train.deployment import choose_targets, measure
from qerl.train.rescore import rescore
from qerl.train.run import train

SETTINGS = (
    "model.path=demo",
    "train.mode=full",
    "quant.format=bf16",
    "data.eval_limit=8",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_prompt_tokens=96",
    "rollout.max_new_tokens=32",
    "optim.lr=1e-3",
    "optim.warmup_ratio=0",
    "optim.updates_per_rollout=2",
    "train.steps=4",
    "train.save_every=0",
    "train.save_adapter_every=1",
    "train.token_budget=600",
    "eval.before=false",
    "eval.every=0",
    "aqn.num_stages=2",
    "diagnostics.every=2",
    "log.progress=off",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for split in ("train", "test"):
        rows = [asdict(problem) for problem in arithmetic_problems(split, 32)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def settings_of(data, folder, *more):
    return [*SETTINGS, f"data.train={data}/train.jsonl", f"data.eval={data}/test.jsonl", f"run.dir={folder}", *more]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runs(request, data, tmp_path_factory):
    """(dtype, a whole run, the same run stopped after two steps and resumed)."""
    folder = tmp_path_factory.mktemp("runs")
    dtype = f"model.dtype={request.param}"
    whole = train(load_config(None, settings_of(data, folder, dtype, "run.name=whole")))
    parts = load_config(None, settings_of(data, folder, dtype, "run.name=parts"))
    train(parts, stop_after=2)
    return request.param, RunDir.open(whole), RunDir.open(train(parts, resume=True))


def tensors_of(folder):
    source = TensorFolder(folder)
    return {name: source.read(name) for name in source}


def test_every_weight_moves(runs):
    before = tensors_of(resolve_model_path("demo"))
    after = tensors_of(runs[1].checkpoint(4))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        changed = (after[name].float() != tensor.to(after[name].dtype).float()).float().mean()
        assert changed > (0 if "embed" in name else 0.5), name


def test_a_resumed_run_repeats_a_whole_one_to_the_bit(runs):
    _, whole, parts = runs
    rows = [
        [{k: v for k, v in row.items() if is_reproducible(k)} for row in run.read_metrics()] for run in (whole, parts)
    ]
    assert rows[0] == rows[1]
    ours, theirs = (tensors_of(run.checkpoint(4)) for run in (whole, parts))
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_records_of_every_rollout_score_again_with_the_kept_model(runs):
    dtype, whole, _ = runs
    hashes = set()
    for index in range(4):
        result = rescore(whole.path, rollout=index)
        assert result.within, result
        assert result.largest <= (1e-4 if dtype == "float32" else 0.5)
        hashes.add(read_behavior(whole.rollout_path(index))[0]["adapter_hash"])
    assert len(hashes) == 4, "each rollout has weights of its own"


def test_a_kept_model_that_is_not_the_records_is_refused(runs):
    _, whole, _ = runs
    kept, other = whole.adapter_path(1), whole.adapter_path(2)
    (kept / "model.safetensors").rename(kept / "aside")
    try:
        (kept / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
        with pytest.raises(ConfigError, match="trained weights are not what the record was made with"):
            rescore(whole.path, rollout=1)
    finally:
        (kept / "aside").replace(kept / "model.safetensors")


def test_a_checkpoint_is_a_model_that_eval_and_transformers_open(runs):
    dtype, whole, _ = runs
    measured = whole.read_json("summary.json")["evaluation"]["after"]
    targets = choose_targets(str(whole.path), [f"model.dtype={dtype}"], base=True, checkpoints="4")
    found = measure(targets, (), noise=None, warn=lambda text: None)
    base, again = (measurement.result for measurement in found.measurements)
    assert again.to_dict()["accuracy"] == measured["accuracy"]
    assert base.rows != again.rows
    model = AutoModelForCausalLM.from_pretrained(whole.checkpoint(4), dtype=torch.float32)
    stored = tensors_of(whole.checkpoint(4))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[name].float()), name


def test_memory_by_owner_is_what_was_predicted(runs):
    dtype, whole, _ = runs
    memory = whole.read_json("memory.json")
    for owner in ("base_weights", "embeddings", "norms", "adapters", "masters", "optimizer"):
        assert memory["measured"][owner] == memory["predicted"][owner], owner
    assert (memory["predicted"]["masters"] > 0) == (dtype == "bfloat16")
    assert memory["predicted"]["adapters"] == 0


def test_models_of_rollouts_are_not_kept_unless_asked_for(data, tmp_path):
    settings = settings_of(data, tmp_path, "train.steps=1", "run.name=r", "eval.after=false")
    settings.remove("train.save_adapter_every=1")
    run = RunDir.open(train(load_config(None, [*settings, "model.dtype=float32"])))
    assert not run.adapter_path(0).exists()
    with pytest.raises(RunFolderError, match="was not kept"):
        rescore(run.path, rollout=0)


@pytest.mark.parametrize("mode", ["train.mode=full quant.format=bf16", "train.mode=lora quant.format=nvfp4"])
def test_a_finished_training_leaves_nothing_behind(data, tmp_path, mode):
    """A process may train again: model, optimizer and engine of a run that has ended are freed."""
    settings = [one for one in SETTINGS if not one.startswith(("train.mode", "quant.format", "train.steps"))]
    where = [f"data.train={data}/train.jsonl", f"data.eval={data}/test.jsonl", f"run.dir={tmp_path}", "run.name=r"]
    config = load_config(None, [*settings, *where, *mode.split(), "model.dtype=bfloat16", "train.steps=1"])
    held = {}

    def hold(trainer, stop):
        learning = trainer.session.model.trainable_parameters()
        held.update({f"parameter {name}": weakref.ref(parameter) for name, parameter in learning.items()})
        held.update({f"trained {name}": weakref.ref(one) for name, one in trainer.optimizer.trained.items()})
        moments = trainer.optimizer.state_tensors()
        held.update({f"moment {index}": weakref.ref(moment) for index, moment in enumerate(moments)})
        owners = {"model": trainer.session.model, "engine": trainer.session.engine, "optimizer": trainer.optimizer}
        held.update({name: weakref.ref(owner) for name, owner in owners.items()})

    train(config, after=hold)
    gc.collect()
    assert len(held) > 20 and any(name.startswith("moment") for name in held)
    assert not [name for name, reference in held.items() if reference() is not None]
