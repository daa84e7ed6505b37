"""Two steps of training on the packaged model in every format: rollout, log-probs, backward and memory by the packed weights."""

import json
from dataclasses import asdict

import pytest

from qerl.config.load import load_config
from qerl.data.synthetic import arithmetic_problems
from qerl.metrics.run_dir import RunDir
from qerl.train.run import train

SETTINGS = [
    "model.path=demo",
    "model.dtype=float32",
    "rollout.prompts_per_step=2",
    "rollout.group_size=3",
    "rollout.max_prompt_tokens=96",
    "rollout.max_new_tokens=24",
    "lora.rank=4",
    "optim.lr=1e-3",
    "train.steps=2",
    "train.save_every=0",
    "eval.every=0",
    "eval.before=false",
    "eval.after=false",
    "aqn.num_stages=2",
    "log.progress=off",
]


@pytest.mark.parametrize(
    "quant",
    [
        ["quant.format=mxfp4"],
        ["quant.format=nf4", "quant.double_quant=true", "quant.dense_cache=off"],
        ["quant.format=nvfp4", "quant.method=mse", "quant.lm_head=fp8", "quant.dense_cache=off"],
        ["quant.format=nf4", 'quant.overrides={"*.o_proj": mxfp4, "layers.0.*": bf16}', "quant.lm_head=nvfp4"],
    ],
    ids=" ".join,
)
def test_a_run_trains_replays_its_own_log_probs_and_holds_what_was_predicted(tmp_path, quant):
    rows = [asdict(problem) for problem in arithmetic_problems("train", 32)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = [f"data.train={tmp_path / 'train.jsonl'}", f"run.dir={tmp_path}", "run.name=run"]
    run = RunDir.open(train(load_config(None, [*SETTINGS, *where, *quant])))
    metrics = run.read_metrics()
    assert metrics[-1]["step"] == 2
    # Engine and trainer read one weight: with the noise replayed, what the engine recorded is what the trainer computes.
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in metrics[1:])
    memory = run.read_json("memory.json")
    for owner in ("base_weights", "dense_cache", "embeddings"):
        assert memory["predicted"][owner] == memory["measured"][owner], owner
