"""Settings that an engine, or a call of it, refuses."""

import pytest
from rollout_builders import MAX_POSITIONS, load_tiny, make_prompts

from qerl.errors import ConfigError
from qerl.model.tokenizer import load_tokenizer
from qerl.records import SamplingSpec
from qerl.rollout.engine import Engine


@pytest.fixture(scope="module")
def tokenizer(qwen2_folder):
    return load_tokenizer(qwen2_folder)


@pytest.fixture(scope="module")
def model(qwen2_folder):
    return load_tiny(qwen2_folder)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is out of range; got 0; expected 1 or more"),
        ({"max_model_len": MAX_POSITIONS + 1}, "max_model_len is out of range"),
        ({"kv_bytes": 0, "paged": True}, "kv_bytes is out of range; got 0; expected 1 or more"),
        ({"expected_tokens": -1}, "expected_tokens is out of range; got -1; expected 0 or more"),
        ({"kv_format": "foo"}, "kv_format is not known; got foo; expected compute, fp8_values, fp8"),
        ({"static_shapes": True, "paged": False}, "static_shapes needs keys and values in pages"),
        ({"kv_bytes": 10**6}, "kv_bytes needs keys and values in pages; got kv_bytes with an unpaged cache on cpu"),
        ({"read_together": True}, "read_together needs keys and values in pages"),
    ],
    ids=str,
)
def test_an_engine_is_not_made_with_settings_out_of_range_or_that_it_would_ignore(model, tokenizer, settings, said):
    with pytest.raises(ConfigError, match=said):
        Engine(model, tokenizer, **settings)


def test_settings_of_a_call_out_of_range_are_refused_by_name(model, tokenizer):
    with pytest.raises(ConfigError, match="group size"):
        Engine(model, tokenizer).generate(make_prompts([3]), SamplingSpec(), group_size=0)
    for key in (-1, (1 << 32) - 1):
        with pytest.raises(ConfigError, match="sample key"):
            Engine(model, tokenizer).generate(make_prompts([3]), SamplingSpec(), group_size=2, first_sample_key=key)
    with pytest.raises(ConfigError, match="top_p"):
        Engine(model, tokenizer).generate(make_prompts([3]), SamplingSpec(top_p=0.0))
