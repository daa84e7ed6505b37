"""A run one of whose updates has a gradient that is not finite: what is left of it in the run folder, under both policies."""

import json
import math
from dataclasses import asdict

import pytest
import torch

from qerl.config.load import load_config
from qerl.data.synthetic import arithmetic_problems
from qerl.errors import TrainingError
from qerl.metrics.run_dir import RunDir
from qerl.train import loop
from qerl.train.run import train

SETTINGS = (
    "model.path=demo",
    "model.dtype=float32",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.max_prompt_tokens=96",
    "rollout.max_new_tokens=8",
    "lora.rank=2",
    "train.steps=3",
    "train.save_every=0",
    "eval.before=false",
    "eval.after=false",
    "aqn.enabled=false",
    "diagnostics.every=0",
    "diagnostics.canary=false",
    "log.progress=off",
)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs three steps, in the second of which one answer's advantage is NaN; gives the run folder."""
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(asdict(problem)) + "\n" for problem in arithmetic_problems("train", 16)))
    real, steps = loop.advantages, []

    def advantages(rewards, kind):
        steps.append(1)
        values = [[1.0, -1.0] for _ in real(rewards, kind)]
        if len(steps) == 2:
            values[1][0] = math.nan
        return values

    monkeypatch.setattr(loop, "advantages", advantages)

    def start(policy):
        config = load_config(
            None, [*SETTINGS, f"optim.nonfinite={policy}", f"data.train={data}", f"run.dir={tmp_path}"]
        )
        try:
            train(config)
        finally:
            folder = RunDir.open(tmp_path / config.run.name)
        return folder

    return start, tmp_path / "run" / "nonfinite"


def assert_written(folder):
    (path,) = folder.iterdir()
    content = torch.load(path, weights_only=True)
    assert (path.name, content["update"]) == ("update-000002.pt", 2)
    assert math.isnan(content["norm"]) and content["parameters"] and math.isnan(content["losses"][0])
    found = torch.cat([batch["advantages_S"] for batch in content["batches"]])
    assert found.isnan().sum() == 1 and len(found) == 4
    assert all(len(batch["tokens_T"]) > 0 for batch in content["batches"])


def test_skip_writes_the_batch_and_goes_on_with_a_warning(run):
    start, folder = run
    found = start("skip")
    assert_written(folder)
    metrics = found.read_metrics()
    assert [row["nonfinite_updates"] for row in metrics] == [0, 1, 0]
    assert all(math.isfinite(row["grad_norm"]) for row in (metrics[0], metrics[2]))
    (warning,) = [text for text in found.read_json("summary.json")["warnings"] if "not finite" in text]
    assert "update 2" in warning and "update-000002.pt" in warning


def test_stop_writes_the_batch_and_ends_with_an_error_that_names_the_file(run):
    start, folder = run
    with pytest.raises(TrainingError, match="gradient of update 2 is not finite") as caught:
        start("stop")
    assert_written(folder)
    assert str(folder / "update-000002.pt") in str(caught.value)
    assert [row["step"] for row in RunDir.open(folder.parent).read_metrics()] == [1]
