"""An answer keeps its random numbers in another process: nothing of its tokens depends on what else a process has done."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rollout_builders import load_tiny, make_prompts

from qerl.model.aqn import NoiseState
from qerl.model.tokenizer import load_tokenizer
from qerl.records import SamplingSpec
from qerl.rollout.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
SAMPLING = SamplingSpec(temperature=1.3, top_p=0.95, max_new_tokens=18, seed=7, rollout=4)
NOISE = NoiseState(seed=7, rollout=4, stage=1, sigma=0.1, scope="response", sites=("attn_norm", "mlp_norm"))
BATCH_TOLERANCE = 1e-5
"""float32 log-probs in different batches, as in `test_engine.py`."""

# With a hash seed of its own and without the packages that tests import: another interpreter, not a copy of this one.
CHILD = """
import json, sys
import torch
torch.randn(5), torch.manual_seed(99)
from qerl.config.schema import LoraConfig, QuantConfig
from qerl.kernels import philox
from qerl.model.aqn import NoiseState
from qerl.model.checkpoint import load_model
from qerl.model.tokenizer import load_tokenizer
from qerl.records import Prompt, SamplingSpec
from qerl.rollout.engine import Engine

asked = json.load(sys.stdin)
lora = LoraConfig(rank=4, alpha=8.0)
model = load_model(asked["folder"], quant=QuantConfig(format="bf16"), lora=lora, dtype=torch.float32)
for name, parameter in model.trainable_parameters().items():
    if "lora_b" in name:
        parameter.data.add_(0.1 * philox.normal(0, f"test/{name}", parameter.numel()).view_as(parameter))
engine = Engine(model, load_tokenizer(asked["folder"]), max_num_seqs=2)
noise = NoiseState.from_dict(asked["noise"]).materialize(model)
found = []
for ids, first in asked["calls"]:
    prompts = [Prompt(id=str(i), question="", answer="", text="", token_ids=tuple(one)) for i, one in enumerate(ids)]
    answers, _ = engine.generate(prompts, SamplingSpec(**asked["sampling"]), noise=noise, first_sample_key=first)
    found.append([[a.sample_key, a.token_ids, a.behavior_logprobs, a.sampler_logprobs] for a in answers])
json.dump(found, sys.stdout)
"""


def test_an_answer_has_the_same_tokens_in_another_process_alone_and_in_another_batch(qwen2_folder):
    model, prompts = load_tiny(qwen2_folder), make_prompts([6, 1, 11, 4])
    here, _ = Engine(model, load_tokenizer(qwen2_folder)).generate(
        prompts, SAMPLING, group_size=3, noise=NOISE.materialize(model)
    )
    # The longest that is neither the first of all nor the last of its group.
    chosen = max((one for one in here[1:] if one.sample_key % 3 < 2), key=lambda one: len(one.token_ids))
    key, own = chosen.sample_key, chosen.sample_key // 3
    ids = [list(prompt.token_ids) for prompt in prompts]
    sampling = {name: getattr(SAMPLING, name) for name in ("temperature", "top_p", "max_new_tokens", "seed", "rollout")}
    # Alone; then second of three, in two rows, between other prompts; and the next one of its group.
    strangers = [ids[(own + 2) % 4], ids[own], ids[(own + 1) % 4]]
    calls = [([ids[own]], key), (strangers, key - 1), ([ids[own]], key + 1)]
    asked = {"folder": str(qwen2_folder), "noise": NOISE.to_dict(), "sampling": sampling, "calls": calls}
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "12345"},
    )
    assert child.returncode == 0, child.stderr
    (alone,), batch, (other,) = json.loads(child.stdout)
    assert len(chosen.token_ids) > 5
    for found_key, tokens, behavior, sampler in (alone, batch[1]):
        assert found_key == key and tuple(tokens) == chosen.token_ids
        assert behavior == pytest.approx(chosen.behavior_logprobs, abs=BATCH_TOLERANCE)
        assert sampler == pytest.approx(chosen.sampler_logprobs, abs=BATCH_TOLERANCE)
    assert tuple(other[1]) == here[key + 1].token_ids != chosen.token_ids
