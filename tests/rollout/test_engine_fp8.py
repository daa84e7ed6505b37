"""Keys and values in FP8: the engine's log-probs are those of a pass in which the answer's tokens see rounded ones."""

import pytest
import torch
from rollout_builders import load_tiny, make_prompts, teacher_forced

from qerl.config.load import load_config
from qerl.kernels.cached_attention import FP8
from qerl.memory import kv_bytes
from qerl.model.attention import PackedSequences
from qerl.model.tokenizer import load_tokenizer
from qerl.records import SamplingSpec
from qerl.rollout import engine as engine_module
from qerl.rollout.engine import Engine

PROMPTS = (5, 1, 17)


@pytest.fixture(scope="module")
def tokenizer(qwen2_folder):
    return load_tokenizer(qwen2_folder)


@pytest.fixture(scope="module")
def model(qwen2_folder):
    return load_tiny(qwen2_folder)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("kv_format", ["fp8_values", "fp8"])
def test_logprobs_are_those_of_a_pass_over_rounded_keys_and_values(model, tokenizer, monkeypatch, kv_format, paged):
    monkeypatch.setattr(engine_module, "PAGE_TOKENS", 4)
    settings = {"paged": paged, "max_num_seqs": 4}
    found, stats = Engine(model, tokenizer, kv_format=kv_format, **settings).generate(
        make_prompts(PROMPTS), SamplingSpec(max_new_tokens=18, seed=4), group_size=3
    )
    plain, whole = Engine(model, tokenizer, **settings).generate(
        make_prompts(PROMPTS), SamplingSpec(max_new_tokens=18, seed=4), group_size=3
    )
    assert stats["kv_bytes"] * 8 == whole["kv_bytes"] * (5 if kv_format == "fp8_values" else 2)
    attend = PackedSequences.attend_heads

    def rounded(self, q_THd, k_TKd, v_TKd):
        """The prompt's own pass, all but its last token, sees what it has just computed."""
        exact = attend(self, q_THd, k_TKd, v_TKd)
        k = k_TKd.to(FP8).float() if kv_format == "fp8" else k_TKd
        answer_T = self.positions_T >= first
        return torch.where(answer_T[:, None, None], attend(self, q_THd, k, v_TKd.to(FP8).float()), exact)

    monkeypatch.setattr(PackedSequences, "attend_heads", rounded)
    gaps = []
    for completion, exact in zip(found, plain, strict=True):
        first = len(completion.prompt.token_ids) - 1
        expected = teacher_forced(model, completion, 1.0)
        assert completion.behavior_logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        gaps.append(abs(completion.behavior_logprobs[0] - exact.behavior_logprobs[0]))
    assert max(gaps) > 1e-4, "rounding must show"


@pytest.mark.parametrize(("kv_format", "share"), [("compute", 1.0), ("fp8_values", 0.75), ("fp8", 0.5)])
def test_the_plan_counts_the_bytes_of_the_format(model, kv_format, share):
    plain, given = (load_config(None, [f"rollout.kv_format={name}"]) for name in ("compute", kv_format))
    assert kv_bytes(given, model.spec, "cuda") == share * kv_bytes(plain, model.spec, "cuda")
