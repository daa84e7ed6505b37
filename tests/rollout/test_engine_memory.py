"""What the engine does with memory must not show in the answers: pages, preemption, padded steps, and how often the host looks."""

import pytest
import torch
from rollout_builders import PAGE_BYTES, load_tiny, make_prompts

from qerl.errors import ConfigError
from qerl.model.aqn import NoiseState
from qerl.model.tokenizer import load_tokenizer
from qerl.records import SamplingSpec
from qerl.rollout import kv_cache
from qerl.rollout.engine import Engine

RAGGED, GROUP = (5, 1, 17, 9, 16), 4
SPEC = SamplingSpec(max_new_tokens=18, seed=4)
BATCH_TOLERANCE = 1e-5
"""float32 log-probs of an answer in different batches."""

pytestmark = pytest.mark.usefixtures("small_pages")


@pytest.fixture(scope="module")
def tokenizer(qwen2_folder):
    return load_tokenizer(qwen2_folder)


@pytest.fixture(scope="module")
def model(qwen2_folder):
    return load_tiny(qwen2_folder)


def make_noise(model, scope, prompt="noisy"):
    sites = ("attn_norm", "mlp_norm", "final_norm")
    return NoiseState(
        seed=1, rollout=2, stage=1, sigma=0.3, group_size=GROUP, scope=scope, prompt=prompt, sites=sites
    ).materialize(model)


def generate(model, tokenizer, noise=None, spec=SPEC, buckets=None, ahead=0, **settings):
    engine = Engine(model, tokenizer, **settings)
    engine.buckets, engine.ahead = buckets, ahead
    return engine.generate(make_prompts(RAGGED), spec, group_size=GROUP, noise=noise)


def assert_same_answers(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one.sample_key, one.token_ids, one.stop_reason) == (
            other.sample_key,
            other.token_ids,
            other.stop_reason,
        )
        assert one.behavior_logprobs == pytest.approx(other.behavior_logprobs, abs=BATCH_TOLERANCE)
        assert one.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=BATCH_TOLERANCE)


SPECS = [
    SPEC,
    SamplingSpec(max_new_tokens=18, top_p=0.9, temperature=0.8),
    SamplingSpec(temperature=0.0, max_new_tokens=18),
]


@pytest.mark.parametrize("spec", SPECS, ids=["plain", "top_p", "greedy"])
def test_answers_do_not_depend_on_how_often_the_host_looks_nor_on_pages_nor_on_padding(model, tokenizer, spec):
    expected, _ = generate(model, tokenizer, spec=spec)
    assert len({len(completion.token_ids) for completion in expected}) > 2, "answers should end at many places"
    for settings in (
        {"window": 5},
        {"window": 100, "max_num_seqs": 3},
        {"window": 7, "paged": True, "max_num_seqs": 6},
        {"paged": True, "max_num_seqs": 3, "prefill_tokens": 10},
        {"window": 4, "paged": True, "max_num_seqs": 8, "buckets": (1, 3, 8)},
        {"window": 3, "paged": True, "max_num_seqs": 7, "buckets": (1, 3, 7), "ahead": 1},
        {"window": 2, "paged": True, "ahead": 1},
        {"window": 100, "paged": True, "max_num_seqs": 5, "ahead": 1},
    ):
        found, stats = generate(model, tokenizer, spec=spec, **settings)
        assert_same_answers(found, expected)
        assert stats["preemptions"] == 0
        assert stats["generated_tokens"] == sum(len(completion.token_ids) for completion in expected)


@pytest.mark.parametrize("scope", ["rollout", "group", "response", "token"])
@pytest.mark.parametrize("prompt", ["noisy", "clean"])
def test_preempted_sequences_give_the_answers_of_undisturbed_ones_under_any_noise(model, tokenizer, scope, prompt):
    noise = make_noise(model, scope, prompt)
    expected, _ = generate(model, tokenizer, noise)
    settings = {"paged": True, "kv_bytes": 16 * PAGE_BYTES, "max_num_seqs": 12, "window": 3, "buckets": (4, 12)}
    for ahead in (0, 1):
        found, stats = generate(model, tokenizer, noise, **settings, ahead=ahead)
        assert_same_answers(found, expected)
        assert stats["preemptions"] > 0 and stats["prefill_tokens_again"] > 0
        assert stats["kv_bytes"] <= 16 * PAGE_BYTES


@pytest.mark.parametrize("pages", [11, 12, 13, 17])
@pytest.mark.parametrize("ahead", [0, 1])
def test_preemption_at_any_shortage_changes_no_answer(model, tokenizer, pages, ahead):
    """11 pages are the least: the longest sequence has 34 tokens in the cache, 9 pages; a spare one; and the one of nobody."""
    expected, whole = generate(model, tokenizer)
    found, stats = generate(model, tokenizer, paged=True, kv_bytes=pages * PAGE_BYTES, window=2, ahead=ahead)
    assert_same_answers(found, expected)
    assert stats["prefill_tokens"] > whole["prefill_tokens"]
    assert stats["prefill_tokens"] - stats["prefill_tokens_again"] == whole["prefill_tokens"]
    assert whole["prefill_tokens_again"] == 0


def test_a_memory_too_small_for_one_sequence_is_refused(model, tokenizer):
    with pytest.raises(ConfigError, match="do not fit") as caught:
        generate(model, tokenizer, paged=True, kv_bytes=10 * PAGE_BYTES)
    assert "room for 32 tokens; expected 34" in str(caught.value)
    # The least that the remedy names is 11 pages of 1,536 bytes.
    assert "rollout.kv_cache_gb to at least 0.000017" in str(caught.value)


def test_pages_are_kept_between_calls_and_grow_with_need(model, tokenizer):
    engine = Engine(model, tokenizer, paged=True)
    prompts, short = make_prompts(RAGGED), SamplingSpec(max_new_tokens=2)
    _, first = engine.generate(prompts[:1], short)
    _, larger = engine.generate(prompts, SPEC, group_size=GROUP)
    _, again = engine.generate(prompts[:1], short)
    assert first["kv_bytes"] < larger["kv_bytes"] == again["kv_bytes"]
    kept = engine._workspace
    expected, _ = Engine(model, tokenizer).generate(prompts, SPEC, group_size=GROUP)
    assert_same_answers(engine.generate(prompts, SPEC, group_size=GROUP)[0], expected)
    assert engine._workspace is kept
    engine.release()
    assert_same_answers(engine.generate(prompts, SPEC, group_size=GROUP)[0], expected)


class Lent:
    """Stands in for memory of a CUDA device: what is given back holds nothing that may be read."""

    def __init__(self, size, device):
        self.bytes, self.there = torch.zeros(size, dtype=torch.uint8), True

    def tensor(self):
        return self.bytes

    def give_back(self):
        self.bytes.fill_(0xFF)
        self.there = False

    def take(self):
        if not self.there:
            self.bytes.zero_()
        self.there = True


def test_memory_that_is_lent_comes_back_where_it_was(model, tokenizer, monkeypatch):
    monkeypatch.setattr(kv_cache, "LentMemory", Lent)
    engine = Engine(model, tokenizer, paged=True)
    engine.lends = True
    expected, _ = Engine(model, tokenizer).generate(make_prompts(RAGGED), SPEC, group_size=GROUP)
    assert_same_answers(engine.generate(make_prompts(RAGGED), SPEC, group_size=GROUP)[0], expected)
    kept = engine._workspace
    for early in (False, True):
        engine.release()
        assert not kept.cache.there
        assert all(bool(torch.isnan(slab.float()).all()) for pair in kept.cache.slabs for slab in pair)
        if early:
            engine.take()
            assert kept.cache.there
        assert_same_answers(engine.generate(make_prompts(RAGGED), SPEC, group_size=GROUP)[0], expected)
        assert engine._workspace is kept
        assert kept.cache.there


def test_an_expected_length_makes_the_cache_large_enough_at_once(model, tokenizer):
    engine = Engine(model, tokenizer, paged=True, max_num_seqs=20, expected_tokens=17 + 18)
    _, first = engine.generate(make_prompts(RAGGED)[:1], SamplingSpec(max_new_tokens=2))
    kept = engine._workspace
    _, later = engine.generate(make_prompts(RAGGED), SPEC, group_size=GROUP)
    assert engine._workspace is kept
    assert first["kv_bytes"] == later["kv_bytes"] >= 20 * 9 * PAGE_BYTES


def test_a_bounded_cache_is_not_made_anew_for_a_little_more_memory(model, tokenizer):
    engine = Engine(model, tokenizer, paged=True, kv_bytes=20 * PAGE_BYTES)
    expected, _ = Engine(model, tokenizer).generate(make_prompts(RAGGED), SPEC, group_size=GROUP)
    engine.generate(make_prompts(RAGGED), SPEC, group_size=GROUP)
    kept = engine._workspace
    for pages, same in ((22, True), (40, False)):
        engine.kv_bytes = pages * PAGE_BYTES
        assert_same_answers(engine.generate(make_prompts(RAGGED), SPEC, group_size=GROUP)[0], expected)
        assert (engine._workspace is kept) == same


def test_a_kept_workspace_takes_each_calls_settings(model, tokenizer):
    """Noise, adapters, temperature, seed and stream of one call must not leak into the next."""
    kept = Engine(model, tokenizer, paged=True, window=4)
    prompts = make_prompts(RAGGED)
    calls = [
        {"noise": make_noise(model, "rollout")},
        {"noise": make_noise(model, "response")},
        {},
        {"adapters": False},
        {"noise": make_noise(model, "response", "clean"), "first_sample_key": 40},
        {"spec": SamplingSpec(max_new_tokens=9, temperature=0.5, seed=2)},
        {"spec": SamplingSpec(max_new_tokens=18, stream="eval", rollout=3)},
        {"spec": SamplingSpec(max_new_tokens=5, temperature=0.0)},
        {},
    ]
    for arguments in calls:
        rest = dict(arguments)
        spec = rest.pop("spec", SPEC)
        found, _ = kept.generate(prompts, spec, group_size=GROUP, **rest)
        expected, _ = Engine(model, tokenizer).generate(prompts, spec, group_size=GROUP, **rest)
        assert_same_answers(found, expected)


@pytest.mark.parametrize("settings", [{}, {"window": 6, "paged": True, "max_num_seqs": 7}])
def test_answers_may_have_limits_of_their_own(model, tokenizer, settings):
    engine, prompts = Engine(model, tokenizer, **settings), make_prompts(RAGGED)
    expected, _ = Engine(model, tokenizer).generate(prompts, SPEC, group_size=GROUP)
    limits = [1 + 7 * index % 18 for index in range(len(expected))]
    found, _ = engine.generate(prompts, SPEC, group_size=GROUP, limits=limits)
    for one, other, limit in zip(found, expected, limits, strict=True):
        assert one.token_ids == other.token_ids[:limit]
        assert one.stop_reason == (other.stop_reason if len(other.token_ids) <= limit else "length")
    with pytest.raises(ConfigError, match="limits of the answers"):
        engine.generate(prompts, SPEC, group_size=GROUP, limits=[*limits[1:], 19])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scope", [None, "rollout", "response", "token"])
def test_with_static_shapes_an_answer_has_the_same_bits_alone_and_in_any_batch(qwen2_folder, tokenizer, dtype, scope):
    model = load_tiny(qwen2_folder, dtype=dtype)
    noise = None if scope is None else make_noise(model, scope)
    prompts = make_prompts(RAGGED)

    def generate_static(prompts, kv_bytes=None, **arguments):
        engine = Engine(model, tokenizer, max_num_seqs=8, static_shapes=True, kv_bytes=kv_bytes)
        return engine.generate(prompts, SPEC, noise=noise, **arguments)

    together, _ = generate_static(prompts, group_size=GROUP)
    for index in (0, 5, 6, 13, 19):
        alone, _ = generate_static([prompts[index // GROUP]], first_sample_key=index)
        assert list(alone) == [together[index]]
    scarce, stats = generate_static(prompts, 40 * PAGE_BYTES * dtype.itemsize // 4, group_size=GROUP)
    assert scarce == together
    assert stats["preemptions"] == 0


def test_graphs_are_refused_on_the_cpu(model, tokenizer):
    with pytest.raises(ConfigError, match="captured on CUDA"):
        Engine(model, tokenizer, graphs=True)
