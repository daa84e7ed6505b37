"""An engine whose keys and values are in float16: its log-probs against a training pass, and numbers beyond float16's range."""

import pytest
import torch
from rollout_builders import load_tiny, make_prompts, teacher_forced

from qerl.errors import TrainingError
from qerl.kernels.cached_attention import FP8
from qerl.model.aqn import NoiseState
from qerl.model.tokenizer import load_tokenizer
from qerl.records import SamplingSpec
from qerl.rollout.engine import Engine

PROMPTS = (5, 1, 17, 9)
SPEC = SamplingSpec(max_new_tokens=18, seed=4)


@pytest.fixture(scope="module")
def tokenizer(qwen2_folder):
    return load_tokenizer(qwen2_folder)


@pytest.fixture(scope="module")
def models(qwen2_folder):
    return [load_tiny(qwen2_folder, dtype=torch.bfloat16, float16_attention=half) for half in (False, True)]


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize(
    "settings", [{"paged": False}, {"paged": True, "prefill_tokens": 6}, {"static_shapes": True}], ids=str
)
@pytest.mark.parametrize("noisy", [False, True])
def test_log_probs_are_those_of_a_training_pass(models, tokenizer, settings, noisy):
    """Prompts that are shared, read in parts, or alone; with the noise that sampled."""
    state = NoiseState(seed=1, rollout=2, stage=1, sigma=0.2, sites=("attn_norm", "mlp_norm"))
    noise = state.materialize(models[1]) if noisy else None
    engine = Engine(models[1], tokenizer, max_num_seqs=4, **settings)
    assert engine.kv_dtypes == (torch.float16, torch.float16)
    found, stats = engine.generate(make_prompts(PROMPTS), SPEC, group_size=3, noise=noise)
    plain, other = Engine(models[0], tokenizer, max_num_seqs=4, **settings).generate(
        make_prompts(PROMPTS), SPEC, group_size=3
    )
    assert stats["kv_bytes"] == other["kv_bytes"]
    gaps = [
        abs(torch.tensor(one.behavior_logprobs).double() - teacher_forced(models[1], one, 1.0, noise=noise))
        for one in found
    ]
    # As large as without: products, norms and the MLP round as before.
    assert torch.cat(gaps).mean() < 0.006
    assert noisy or any(a.behavior_logprobs != b.behavior_logprobs for a, b in zip(found, plain, strict=True))


def test_values_in_fp8_are_made_of_float16(models, tokenizer):
    engine = Engine(models[1], tokenizer, kv_format="fp8_values", paged=True)
    assert engine.kv_dtypes == (torch.float16, FP8)
    found, _ = engine.generate(make_prompts(PROMPTS), SPEC)
    gaps = [abs(torch.tensor(one.behavior_logprobs) - teacher_forced(models[1], one, 1.0)) for one in found]
    assert torch.cat(gaps).mean() < 0.1


@pytest.mark.parametrize("part", ["k_proj", "v_proj"])
def test_what_is_beyond_the_range_ends_the_call_and_names_the_setting(qwen2_folder, tokenizer, part):
    for half in (False, True):
        model = load_tiny(qwen2_folder, dtype=torch.bfloat16, float16_attention=half)
        linear = model.layers[1].qkv
        start, stop = linear.rows_of(part)
        with torch.no_grad():
            values = model.layers[1].head_bias.bias_X if half else linear.bias_O
            values[start:stop] = 1e5
        engine = Engine(model, tokenizer)
        if half:
            with pytest.raises(TrainingError, match=r"beyond 65504 .* model\.attention_dtype=float16"):
                engine.generate(make_prompts(PROMPTS), SPEC)
        else:
            engine.generate(make_prompts(PROMPTS), SPEC)
