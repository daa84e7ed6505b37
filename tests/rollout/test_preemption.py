"""Sequences that are put back for want of pages of the size that CUDA has: the same on the CPU and on a GPU, where steps are captured."""

import pytest
import rollout_builders
from rollout_builders import load_tiny, make_prompts

from qerl.model.aqn import NoiseState
from qerl.model.tokenizer import load_tokenizer
from qerl.records import SamplingSpec
from qerl.rollout.engine import CUDA_WINDOW, PAGE_TOKENS, Engine

GROUP = 4
LENGTHS = (100, 60, 190, 127, 40)
"""Of prompts, one to three pages."""
SPEC = SamplingSpec(max_new_tokens=150, temperature=1.5, seed=4)
PAGE_BYTES = 2 * 2 * PAGE_TOKENS * 24 * 4
"""Of the tiny model: layers, k and v, tokens, 2 heads of 12, float32."""
PAGES = 10
"""For 20 answers of up to six pages."""
TOLERANCE = 1e-5
"""float32 log-probs of an answer in different batches."""


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory):
    """A model with room for several pages, one end token, so that answers become long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_builders, "MAX_POSITIONS", 512)
        patch.setattr(rollout_builders, "EOS_IDS", (2,))
        return rollout_builders.write_checkpoint(tmp_path_factory.mktemp("long") / "model", "qwen2")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scope", [None, "rollout", "response"])
def test_a_bound_on_the_cache_changes_no_answer(long_folder, device, scope):
    model = load_tiny(long_folder, quantized=True, dense_cache="on", device=device)
    tokenizer, noise = load_tokenizer(long_folder), None
    if scope is not None:
        sites = ("attn_norm", "mlp_norm", "final_norm")
        state = NoiseState(seed=1, rollout=2, stage=1, sigma=0.3, group_size=GROUP, scope=scope, sites=sites)
        noise = state.materialize(model)

    def generate(kv_bytes):
        engine = Engine(model, tokenizer, max_num_seqs=16, paged=True, window=CUDA_WINDOW, kv_bytes=kv_bytes)
        engine.ahead = 1
        return engine.generate(make_prompts(LENGTHS), SPEC, group_size=GROUP, noise=noise)

    expected, whole = generate(None)
    found, stats = generate(PAGES * PAGE_BYTES)
    spanned = {-(-(len(one.prompt.token_ids) + len(one.token_ids)) // PAGE_TOKENS) for one in expected}
    assert max(spanned) >= 4 and len(spanned) > 1
    assert whole["preemptions"] == whole["prefill_tokens_again"] == 0
    assert stats["preemptions"] > 0 and stats["prefill_tokens_again"] > 0
    assert stats["kv_bytes"] <= PAGES * PAGE_BYTES
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.behavior_logprobs == pytest.approx(other.behavior_logprobs, abs=TOLERANCE)
        assert one.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=TOLERANCE)
