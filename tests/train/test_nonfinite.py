"""An update whose gradient is not finite is not made; what it was to be made from can be looked at."""

import math

import pytest
import torch
from tiny_models import load_tiny, write_tiny

from qerl.config.load import load_config
from qerl.errors import TrainingError
from qerl.objective.batch import Sample
from qerl.records import Completion, Prompt
from qerl.train.learn import learn
from qerl.train.nonfinite import write_nonfinite
from qerl.train.optimizer import make_optimizer
from qerl.train.timing import StageTimer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path)
    return path


def sample(key, advantage):
    prompt = Prompt(id=f"p{key}", question="", answer="", text="", token_ids=(3, 4, 5))
    completion = Completion(
        prompt=prompt,
        sample_key=key,
        token_ids=(7 + key, 9, 2),
        text="",
        behavior_logprobs=(-4.5, -4.4, -4.6),
        sampler_logprobs=(-4.5, -4.4, -4.6),
        stop_reason="stop",
    )
    return Sample(completion=completion, advantage=advantage, in_loss=True)


def groups(bad):
    """Two groups, one a mini-batch; the first holds one bad advantage."""
    return [[sample(0, 1.0), sample(1, bad)], [sample(2, 1.0), sample(3, -1.0)]]


def learned(folder, bad, *settings, report=None):
    config = load_config(None, ["optim.updates_per_rollout=2", "lora.rank=2", "optim.lr=1e-3", *settings])
    model = load_tiny(folder, lora=config.lora, seed=0)
    optimizer = make_optimizer(model.trainable_parameters(), config.optim)
    before = {name: p.detach().clone() for name, p in model.trainable_parameters().items()}
    try:
        stats = learn(config, model, optimizer, groups(bad), noise=None, completed=4, timer=StageTimer(), report=report)
    finally:
        assert all(p.grad is None for p in model.parameters())
        moved = [name for name, p in model.trainable_parameters().items() if not torch.equal(p, before[name])]
    return stats.metrics(), moved, optimizer


def test_stop_ends_the_run_and_names_the_update(folder):
    seen = []
    with pytest.raises(TrainingError, match=r"update 5 is not finite.*micro-batches \[0\]") as caught:
        learned(folder, float("nan"), report=seen.append)
    assert "optim.nonfinite=skip" in str(caught.value)
    (found,) = seen
    assert found.update == 5 and math.isnan(found.norm) and math.isnan(found.losses[0])
    assert any("lora_b" in name for name in found.parameters)


def test_skip_leaves_out_that_update_alone(folder):
    seen = []
    metrics, moved, optimizer = learned(folder, float("nan"), "optim.nonfinite=skip", report=seen.append)
    assert (metrics["updates"], metrics["nonfinite_updates"], metrics["skipped_updates"]) == (1, 1, 0)
    assert math.isfinite(metrics["grad_norm"]) and moved
    assert [found.update for found in seen] == [5]
    alone, _, other = learned(folder, 0.5)
    assert alone["updates"] == 2
    steps = {float(state["step"]) for state in optimizer.inner.state.values()}
    assert steps == {1.0} and {float(state["step"]) for state in other.inner.state.values()} == {2.0}


def test_the_written_batch_holds_what_would_have_been_learned(folder, tmp_path):
    seen = []
    learned(folder, float("inf"), "optim.nonfinite=skip", report=seen.append)
    write_nonfinite(tmp_path / "nonfinite" / "update.pt", seen[0])
    content = torch.load(tmp_path / "nonfinite" / "update.pt", weights_only=True)
    assert content["update"] == 5 and not math.isfinite(content["norm"])
    (batch,) = content["batches"]
    assert batch["tokens_T"].tolist() == [3, 4, 5, 7, 9, 2, 3, 4, 5, 8, 9, 2]
    assert batch["advantages_S"].tolist() == [1.0, float("inf")]
    assert set(content["parameters"]) <= set(load_tiny(folder, lora=load_config(None, ["lora.rank=2"]).lora).trainable_parameters())  # fmt: skip
