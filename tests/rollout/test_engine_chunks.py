"""Prompts that are computed in parts: the answers are those of whole prompts, and other rows decode in between."""

import random

import pytest
from rollout_builders import PAGE, PAGE_BYTES, load_tiny, make_prompts

from qerl.model.aqn import NoiseState
from qerl.model.tokenizer import load_tokenizer
from qerl.records import SamplingSpec
from qerl.rollout.engine import Engine

LENGTHS, GROUP = (5, 33, 1, 44, 20, 16), 3
SPEC = SamplingSpec(max_new_tokens=18, seed=4)
TOLERANCE = 1e-5
"""float32 log-probs of an answer whose prompt was computed in other parts."""

pytestmark = pytest.mark.usefixtures("small_pages")


@pytest.fixture(scope="module")
def tokenizer(qwen2_folder):
    return load_tokenizer(qwen2_folder)


@pytest.fixture(scope="module")
def model(qwen2_folder):
    return load_tiny(qwen2_folder)


def generate(model, tokenizer, noise=None, lengths=LENGTHS, group=GROUP, buckets=None, ahead=0, **settings):
    engine = Engine(model, tokenizer, **settings)
    engine.buckets, engine.ahead = buckets, ahead
    return engine.generate(make_prompts(lengths), SPEC, group_size=group, noise=noise)


def assert_same_answers(found, expected):
    assert [completion.token_ids for completion in found] == [completion.token_ids for completion in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.behavior_logprobs == pytest.approx(other.behavior_logprobs, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("scope", "prompt"),
    [
        (None, "noisy"),
        *((scope, prompt) for scope in ("rollout", "response", "token") for prompt in ("noisy", "clean")),
    ],
)
def test_answers_do_not_depend_on_the_parts_of_a_prompt(model, tokenizer, scope, prompt):
    noise = None
    if scope is not None:
        sites = ("attn_norm", "mlp_norm", "final_norm")
        noise = NoiseState(
            seed=1, rollout=2, stage=1, sigma=0.3, group_size=GROUP, scope=scope, prompt=prompt, sites=sites
        ).materialize(model)
    expected, whole = generate(model, tokenizer, noise)
    assert whole["prefill_chunks"] == 0
    for parts, rows, ahead, paged in ((7, 4, 0, True), (7, 4, 0, False), (1, 7, 0, True), (16, 5, 1, False)):
        found, stats = generate(
            model, tokenizer, noise, max_num_seqs=rows, prefill_tokens=parts, paged=paged, window=3, ahead=ahead
        )
        assert_same_answers(found, expected)
        assert stats["prefill_chunks"] > 0


def test_running_rows_decode_between_the_parts(model, tokenizer, monkeypatch):
    """One row answers a short prompt while another's of 44 tokens is computed in parts of 4."""
    order = []
    forward = type(model).forward

    def recorded(self, tokens_T, *arguments, **settings):
        order.append(len(tokens_T))
        return forward(self, tokens_T, *arguments, **settings)

    monkeypatch.setattr(type(model), "forward", recorded)
    generate(model, tokenizer, lengths=(2, 44), group=1, max_num_seqs=2, prefill_tokens=4)
    # The short prompt's pass; then a part, and a step over both rows (the second is not alive), in turn.
    assert order[:7] == [1, 4, 2, 4, 2, 4, 2]


@pytest.mark.parametrize("seed", range(16))
def test_any_mix_of_lengths_rows_pages_and_parts_ends_with_the_same_answers(model, tokenizer, seed):
    rng = random.Random(seed)
    lengths, group = [rng.randint(1, 45) for _ in range(rng.randint(1, 7))], rng.randint(1, 4)
    expected, _ = generate(model, tokenizer, lengths=lengths, group=group)
    least = -(-(max(lengths) + SPEC.max_new_tokens - 1) // PAGE) + 2
    found, _ = generate(
        model,
        tokenizer,
        lengths=lengths,
        group=group,
        max_num_seqs=rng.randint(1, 9),
        prefill_tokens=rng.randint(1, 20),
        paged=True,
        kv_bytes=(least + rng.randint(0, 20)) * PAGE_BYTES,
        window=rng.randint(1, 6),
        ahead=rng.randint(0, 1),
    )
    assert_same_answers(found, expected)
