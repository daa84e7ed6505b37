"""Advice where keys and values have room whatever the plan, and where a GPU's memory is not beside the host's: on the CPU."""

import json

import pytest
from memory_builders import budget, configured, qwen, qwen_config

from qerl import memory
from qerl.errors import ConfigError
from qerl.train.fit import plan
from qerl.train.plan import describe
from qerl.train.run import train

FEW = ("rollout.max_prompt_tokens=128", "rollout.max_new_tokens=1024", "train.token_budget=1152")
"""On the CPU, where all sequences have room at their longest: passes of one, so that it is the rollout that needs most."""


@pytest.mark.parametrize("gigabytes", [1.8, 2.0])
def test_where_half_of_the_sequences_are_too_many_the_most_that_fit_are_advised(gigabytes):
    """The very number that the table of limits has, which is less than half, and the advice alone is enough."""
    spec, bound = qwen("0.5b"), budget(gigabytes)
    asked = configured(*FEW, "rollout.max_num_seqs=128")
    settled = memory.resolve(asked, spec, bound, device_type="cpu")
    limit = memory.limits(settled, spec, bound, device_type="cpu", asked=asked)[0]
    assert limit.setting == "rollout.max_num_seqs" and 1 < limit.largest < 64
    found = memory.together(asked, spec, bound, device_type="cpu")
    assert found == f"rollout.max_num_seqs={limit.largest}"
    for count, enough in ((limit.largest, True), (limit.largest + 1, False)):
        changes = {"rollout.max_num_seqs": count}
        assert memory.fits_with(changes, asked, spec, bound, device_type="cpu") == enough


def test_fewer_sequences_are_advised_with_what_they_need_beside_them():
    spec, bound, asked = qwen("0.5b"), budget(1.6), configured(*FEW, "rollout.max_num_seqs=128")
    alone = {"rollout.max_num_seqs": 1}
    assert not memory.fits_with(alone, asked, spec, bound, device_type="cpu")
    found = memory.together(asked, spec, bound, device_type="cpu")
    changes = dict(change.split("=") for change in found.split())
    assert 1 <= int(changes["rollout.max_num_seqs"]) < 64 and len(changes) > 1
    more = configured(*FEW, *found.split())
    assert memory.fits_with({}, more, spec, bound, device_type="cpu")


@pytest.mark.parametrize(("gigabytes", "ending"), [(2.5, ""), (3.4, "; rollout.max_new_tokens=")])
def test_that_nothing_fits_is_said_of_answers_as_long_as_they_are(tmp_path, gigabytes, ending):
    """Where shorter ones fit, it is said how long."""
    (tmp_path / "config.json").write_text(json.dumps(qwen_config("0.5b")))
    long = ("rollout.max_num_seqs=1", "train.token_budget=16384", "rollout.max_new_tokens=16256")
    small = ("optim.name=adamw_8bit", "quant.lm_head=nvfp4", "lora.rank=1")
    asked = (*FEW, *long, *small, f"model.path={tmp_path}", f"train.memory_budget={gigabytes}", "model.device=cpu")
    text, fitting = plan(configured(*asked), width=200)
    said = next(line for line in text.splitlines() if line.startswith("what would fit: "))
    assert not fitting and f"answers as long as they are{ending}" in said
    if ending:
        shorter = said.split("; ")[1].removesuffix(" does")
        assert plan(configured(*asked, shorter))[1]
    else:
        assert said.endswith("as they are")


def test_the_cpu_is_offered_no_offloading():
    """Its memory is the host's: a stream that waits there is as large."""
    settings = ("train.checkpointing=full", *FEW, "train.token_budget=16384")
    for device, offered in (("cpu", False), ("cuda", True)):
        settled = memory.resolve(configured(*settings), qwen("0.5b"), None, device_type=device)
        rows = memory.options(settled, qwen("0.5b"), None, device_type=device, asked=configured(*settings))
        assert any("offloading" in row.change for row in rows) == offered


@pytest.mark.parametrize("way", ["plan", "train", "dry run"])
def test_offloading_on_the_cpu_is_refused_before_weights_are_read(tmp_path, way):
    (tmp_path / "config.json").write_text(json.dumps(qwen_config("0.5b")))
    asked = ("train.checkpointing=full", "train.activation_offloading=true", f"model.path={tmp_path}")
    config = configured(*asked, "model.device=cpu", "data.train=arithmetic", f"run.dir={tmp_path}")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="saves nothing on the CPU") as caught:
        {"plan": plan, "train": train, "dry run": describe}[way](config)
    assert "Use train.activation_offloading=false" in str(caught.value)
    assert plan(config, gpu="24GB")[1], "it is of a GPU that this is a plan"
